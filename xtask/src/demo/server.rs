//! The demo's server process: `bareblk serve`, which is stopped with SIGTERM, or killed when dropped.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use super::progress::Interrupt;

/// The server waits up to 30 s for the image's lock.
const START_LIMIT: Duration = Duration::from_secs(40);
const STOP_LIMIT: Duration = Duration::from_secs(15);
const TAIL_LINES: usize = 20;

/// A running server and its socket's folder.
#[derive(Debug)]
pub(super) struct Server {
    child: Child,
    /// Below the system's temporary folder: socket paths must be short (108 bytes).
    dir: TempDir,
    log: PathBuf,
}

impl Server {
    /// Starts `program` to serve what `served` says, and returns once its socket exists.
    pub(super) fn start(
        program: &Path,
        served: &[String],
        log: PathBuf,
        interrupt: &Interrupt,
    ) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let output = File::create(&log).with_context(|| format!("cannot create {}", log.display()))?;
        let mut serve = Command::new(program);
        serve.arg("serve").args(served).arg("--socket").arg(dir.path().join("socket"));
        serve.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        let child = serve.spawn().with_context(|| format!("cannot start {}", program.display()))?;
        let mut server = Self { child, dir, log };
        server.wait_for_socket(interrupt)?;
        Ok(server)
    }

    fn wait_for_socket(&mut self, interrupt: &Interrupt) -> Result<()> {
        let deadline = Instant::now() + START_LIMIT;
        while !self.socket().exists() {
            interrupt.check()?;
            self.check_alive()?;
            if Instant::now() > deadline {
                bail!("`bareblk serve` created no socket within {START_LIMIT:?}{}", self.log_tail());
            }
            std::thread::sleep(Interrupt::POLL);
        }
        Ok(())
    }

    /// An error with the end of the server's log, if it has ended.
    pub(super) fn check_alive(&mut self) -> Result<()> {
        if let Some(status) = self.child.try_wait()? {
            bail!("`bareblk serve` ended by itself ({status}){}", self.log_tail());
        }
        Ok(())
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.dir.path().join("socket")
    }

    /// Processor time of the whole process so far, in user space and in the kernel.
    pub(super) fn cpu_time(&self) -> Result<Duration> {
        cpu_time(&self.child).context("the server has ended")
    }

    /// The last lines the server wrote, for the end of an error's text.
    fn log_tail(&self) -> String {
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        let tail = lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n");
        if tail.is_empty() { String::new() } else { format!("; its last lines:\n{tail}") }
    }

    /// Sends SIGTERM to the server, and waits until it has ended.
    pub(super) fn stop(mut self) -> Result<()> {
        kill_process(Pid::from_child(&self.child), Signal::TERM)?;
        let deadline = Instant::now() + STOP_LIMIT;
        while Instant::now() < deadline {
            match self.child.try_wait()? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => bail!("the server ended with {status}{}", self.log_tail()),
                None => std::thread::sleep(Duration::from_millis(20)),
            }
        }
        bail!("the server did not end within {STOP_LIMIT:?} of SIGTERM{}", self.log_tail())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Processor time of a process so far; `None` if it has ended.
pub(super) fn cpu_time(child: &Child) -> Option<Duration> {
    let stat = fs::read_to_string(format!("/proc/{}/stat", child.id())).ok()?;
    Some(Duration::from_secs_f64(ticks_to_seconds(cpu_ticks(&stat)?)))
}

/// utime + stime: fields 14 and 15; the name before them is in parentheses and may contain any characters (proc(5)).
fn cpu_ticks(stat: &str) -> Option<u64> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some(user + system)
}

#[allow(clippy::cast_precision_loss)] // a day of ticks fits 53 bits many times over
fn ticks_to_seconds(ticks: u64) -> f64 {
    ticks as f64 / rustix::param::clock_ticks_per_second() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_the_sum_of_user_and_system_time_whatever_the_name() {
        let stat = "42 (a b) c) S 1 2 3 4 5 6 7 8 9 10 30 12 0 0 20 0 1";
        assert_eq!(cpu_ticks(stat), Some(42));
    }

    #[test]
    fn short_line_has_no_ticks() {
        assert_eq!(cpu_ticks("42 (a) S 1 2"), None);
    }
}
