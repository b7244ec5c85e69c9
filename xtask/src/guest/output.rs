//! A guest's output: its console while it runs, and the values that a test reads from it afterwards.
//!
//! Scripts print lines: `BB:KEY=value` for one value, `BB-BEGIN NAME` … `BB-END NAME` around longer text.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The line that `/init` prints when the script has ended.
const EXIT_MARK: &str = "BAREBLK-GUEST-EXIT ";

/// A finished guest.
#[derive(Debug, Clone)]
pub struct GuestOutput {
    /// All text on the serial console, QEMU's own messages (`qemu: …`) included.
    pub console: String,
    /// The script's exit status; `None` if the guest ended before the script did.
    pub exit_code: Option<i32>,
    /// Time from QEMU's start to its end.
    pub wall: Duration,
}

impl GuestOutput {
    pub(super) fn new(console: String, wall: Duration) -> Self {
        let last = console.lines().rev().find_map(|line| line.strip_prefix(EXIT_MARK));
        let exit_code = last.and_then(|code| code.trim().parse().ok());
        Self { console, exit_code, wall }
    }

    /// The value of the last line `BB:key=value`.
    #[must_use]
    pub fn value(&self, key: &str) -> Option<&str> {
        let value = |line: &'_ str| line.find("BB:").map(|at| at + 3);
        let lines = self.console.lines().rev();
        lines.filter_map(|line| line[value(line)?..].strip_prefix(key)?.strip_prefix('=')).next()
    }

    /// The lines between the last `BB-BEGIN name` and its `BB-END name`.
    #[must_use]
    pub fn block(&self, name: &str) -> Option<&str> {
        let (begin, end) = (format!("BB-BEGIN {name}\n"), format!("BB-END {name}\n"));
        let start = self.console.rfind(&begin)? + begin.len();
        let rest = &self.console[start..];
        Some(&rest[..rest.find(&end)?])
    }
}

/// Console lines of a running guest, readable by several threads.
#[derive(Debug, Default)]
pub struct Console {
    state: Mutex<State>,
    grew: Condvar,
}

#[derive(Debug, Default)]
struct State {
    text: String,
    /// Writers (serial port, QEMU's standard error) that have ended.
    ended: usize,
}

/// The number of writers: serial port and standard error.
const WRITERS: usize = 2;

impl Console {
    /// The text of the console so far.
    #[must_use]
    pub fn text(&self) -> String {
        self.state().text.clone()
    }

    pub(super) fn push_line(&self, line: &str) {
        let mut state = self.state();
        state.text.push_str(line.trim_end_matches(['\r', '\n']));
        state.text.push('\n');
        self.grew.notify_all();
    }

    pub(super) fn end_writer(&self) {
        self.state().ended += 1;
        self.grew.notify_all();
    }

    /// The first whole line after byte `from` that contains `pattern`, and the position of the next line.
    pub(super) fn wait_for_line(
        &self,
        from: usize,
        pattern: &str,
        timeout: Duration,
    ) -> Option<(String, usize)> {
        let deadline = Instant::now() + timeout;
        let mut state = self.state();
        let mut at = from;
        loop {
            while let Some(len) = state.text[at..].find('\n') {
                let line = &state.text[at..at + len];
                if line.contains(pattern) {
                    return Some((line.to_owned(), at + len + 1));
                }
                at += len + 1;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || state.ended >= WRITERS {
                return None;
            }
            state = self.grew.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output(console: &str) -> GuestOutput {
        GuestOutput::new(console.to_owned(), Duration::ZERO)
    }

    #[test]
    fn last_exit_mark_is_the_exit_code() {
        assert_eq!(output("a\nBAREBLK-GUEST-EXIT 3\nb\nBAREBLK-GUEST-EXIT 0\n").exit_code, Some(0));
    }

    #[test]
    fn console_without_mark_has_no_exit_code() {
        assert_eq!(output("Kernel panic\n").exit_code, None);
    }

    #[test]
    fn value_is_the_last_one_of_exactly_that_key() {
        let output = output("BB:SIZE=1\nBB:SIZE=2\nBB:SIZES=9\nBB:TEXT=a=b\n");
        assert_eq!(output.value("SIZE"), Some("2"));
        assert_eq!(output.value("TEXT"), Some("a=b"));
        assert_eq!(output.value("OTHER"), None);
    }

    #[test]
    fn block_is_the_text_between_its_marks() {
        let output = output("x\nBB-BEGIN job\n{\n}\nBB-END job\ny\n");
        assert_eq!(output.block("job"), Some("{\n}\n"));
        assert_eq!(output.block("none"), None);
    }

    #[test]
    fn block_without_end_is_none() {
        assert_eq!(output("BB-BEGIN job\n{\n").block("job"), None);
    }

    #[test]
    fn waiting_finds_lines_in_order_and_goes_on_after_the_last_one_found() {
        let console = Console::default();
        console.push_line("one go\r");
        console.push_line("two go");

        let (first, next) = console.wait_for_line(0, "go", Duration::ZERO).unwrap();
        let (second, _) = console.wait_for_line(next, "go", Duration::ZERO).unwrap();

        assert_eq!((first.as_str(), second.as_str()), ("one go", "two go"));
    }

    #[test]
    fn waiting_ends_when_both_writers_have_ended() {
        let console = Console::default();
        console.end_writer();
        console.end_writer();
        assert_eq!(console.wait_for_line(0, "never", Duration::from_secs(3600)), None);
    }
}
