//! A QEMU process: its console while it runs, its end; dropping it kills QEMU.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use tempfile::TempDir;

use super::output::{Console, GuestOutput};

/// Time between two checks of whether QEMU has ended. No measurement depends on it.
const POLL: Duration = Duration::from_millis(10);

/// How much of the console an error shows.
const TAIL_LINES: usize = 40;

/// A guest that may still run; killed when dropped.
#[derive(Debug)]
pub struct RunningVm {
    child: Child,
    stdin: ChildStdin,
    console: Arc<Console>,
    readers: Vec<JoinHandle<()>>,
    /// Where the next `wait_for_line` starts.
    cursor: usize,
    started: Instant,
    timeout: Duration,
    /// The folder with the initrd.
    _dir: TempDir,
}

impl RunningVm {
    pub(super) fn start(mut qemu: Command, dir: TempDir, timeout: Duration) -> Result<Self> {
        qemu.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = qemu.spawn().context("cannot start `qemu-system-x86_64`: run `cargo xtask setup`")?;
        let stdin = child.stdin.take().context("QEMU has no standard input")?;
        let console = Arc::new(Console::default());
        let readers = vec![
            read_lines(child.stdout.take().context("QEMU has no standard output")?, "", &console),
            read_lines(child.stderr.take().context("QEMU has no standard error")?, "qemu: ", &console),
        ];
        Ok(Self { child, stdin, console, readers, cursor: 0, started: Instant::now(), timeout, _dir: dir })
    }

    /// QEMU's process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The console, readable while the guest runs.
    #[must_use]
    pub fn console(&self) -> Arc<Console> {
        Arc::clone(&self.console)
    }

    /// Waits for the next console line that contains `pattern`, after the line found before.
    ///
    /// # Errors
    /// `timeout` passes, or the guest ends first.
    pub fn wait_for_line(&mut self, pattern: &str, timeout: Duration) -> Result<String> {
        let Some((line, next)) = self.console.wait_for_line(self.cursor, pattern, timeout) else {
            bail!("the guest printed no console line with {pattern:?} within {timeout:?}\n{}", self.tail());
        };
        self.cursor = next;
        Ok(line)
    }

    /// Sends a line to the guest's console, where the script gets it with `read`.
    ///
    /// # Errors
    /// QEMU has ended.
    pub fn send_line(&mut self, line: &str) -> Result<()> {
        self.stdin.write_all(format!("{line}\n").as_bytes()).context("the guest's console is closed")
    }

    /// The result if the guest has ended; `None` if it still runs.
    ///
    /// # Errors
    /// QEMU failed, or the timeout has passed (then the guest is killed).
    pub fn try_wait(&mut self) -> Result<Option<GuestOutput>> {
        if let Some(status) = self.child.try_wait()? {
            return self.finish(status).map(Some);
        }
        if self.started.elapsed() > self.timeout {
            self.end();
            bail!("the guest did not end within {:?}\n{}", self.timeout, self.tail());
        }
        Ok(None)
    }

    /// Waits until the guest powers off.
    ///
    /// # Errors
    /// QEMU fails, or the timeout passes. The text ends with the console's last lines.
    pub fn wait(mut self) -> Result<GuestOutput> {
        loop {
            if let Some(output) = self.try_wait()? {
                return Ok(output);
            }
            thread::sleep(POLL);
        }
    }

    /// Kills QEMU, like a power cut. Returns the guest's output so far.
    #[must_use]
    pub fn kill(mut self) -> GuestOutput {
        self.end();
        GuestOutput::new(self.console.text(), self.started.elapsed())
    }

    fn finish(&mut self, status: ExitStatus) -> Result<GuestOutput> {
        let wall = self.started.elapsed();
        self.join_readers();
        if !status.success() {
            bail!("QEMU failed ({status})\n{}", self.tail());
        }
        Ok(GuestOutput::new(self.console.text(), wall))
    }

    fn end(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.join_readers();
    }

    fn join_readers(&mut self) {
        for reader in self.readers.drain(..) {
            let _ = reader.join();
        }
    }

    fn tail(&self) -> String {
        let text = self.console.text();
        let lines: Vec<&str> = text.lines().collect();
        let tail = lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n");
        format!("console, last lines:\n{tail}")
    }
}

impl Drop for RunningVm {
    fn drop(&mut self) {
        self.end();
    }
}

fn read_lines(
    from: impl Read + Send + 'static,
    prefix: &'static str,
    console: &Arc<Console>,
) -> JoinHandle<()> {
    let console = Arc::clone(console);
    thread::spawn(move || {
        let mut from = BufReader::new(from);
        let mut line = Vec::new();
        // A guest may print bytes that are not UTF-8.
        while from.read_until(b'\n', &mut line).is_ok_and(|len| len > 0) {
            console.push_line(&format!("{prefix}{}", String::from_utf8_lossy(&line)));
            line.clear();
        }
        console.end_writer();
    })
}
