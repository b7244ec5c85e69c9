//! Names this process in an attribute of an image, so that the next server recognizes a lock of a process that has ended.
//!
//! `boot id, PID and time namespace, process id, start time` names a process among all processes of all hosts. Only a process
//! of this boot and these namespaces can be looked up; every other process counts as running.

use std::io;
use std::path::Path;
use std::sync::Arc;

use rustix::io::Errno;
use rustix::process::{Pid, getpid, test_kill_process};

use super::client::Helper;

/// The records of this host's processes.
#[derive(Debug)]
pub struct ProcessRecords {
    /// The boot id and the namespaces.
    place: String,
    /// This process's id and start time.
    own: String,
    /// Looks processes up; `None`: this process does.
    helper: Option<Arc<Helper>>,
}

impl ProcessRecords {
    /// To be called before the sandbox closes.
    ///
    /// # Errors
    /// `/proc` cannot be read.
    pub fn new(helper: Option<Arc<Helper>>) -> io::Result<Self> {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
        let namespace = |name: &str| std::fs::read_link(Path::new("/proc/self/ns").join(name));
        let pid = getpid().as_raw_nonzero().get().unsigned_abs();
        if std::fs::read_link("/proc/self")? != Path::new(&pid.to_string()) {
            return Err(io::Error::other("/proc is that of another PID namespace"));
        }
        let start = start_of(pid)?.ok_or(io::ErrorKind::NotFound)?;
        let (pids, times) = (namespace("pid")?, namespace("time")?);
        let place = format!("{} {} {}", boot.trim(), pids.display(), times.display());
        Ok(Self { place, own: format!("{pid} {start}"), helper })
    }

    fn start_of(&self, pid: u32) -> io::Result<Option<u64>> {
        match &self.helper {
            Some(helper) => helper.process_start(pid),
            None => start_of(pid),
        }
    }

    /// This process's record.
    pub fn own(&self) -> String {
        format!("{} {}", self.place, self.own)
    }

    /// Whether the process with this record has certainly ended.
    pub fn has_ended(&self, record: &str) -> bool {
        let process = record.strip_prefix(&self.place).and_then(|rest| rest.strip_prefix(' '));
        let Some((pid, start)) = process.and_then(|process| process.split_once(' ')) else { return false };
        let (Ok(pid), Ok(start)) = (pid.parse(), start.parse::<u64>()) else { return false };
        self.start_of(pid).is_ok_and(|running| running != Some(start))
    }
}

/// When the process started, in clock ticks since the boot (proc(5), `/proc/pid/stat`); `None`: there is no such process.
///
/// # Errors
/// The process exists, but this process may not look at it.
pub fn start_of(pid: u32) -> io::Result<Option<u64>> {
    let Some(named) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return Ok(None) };
    // `/proc` may hide processes of other users, but this call does not.
    if test_kill_process(named) == Err(Errno::SRCH) {
        return Ok(None);
    }
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The command's name, in parentheses, may contain spaces and parentheses. The start time is the 20th field after it.
    let start = stat.rsplit_once(')').and_then(|(_, fields)| fields.split_whitespace().nth(19)?.parse().ok());
    start.map(Some).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn process_has_ended_once_it_is_gone_and_not_before() {
        let records = ProcessRecords::new(None).unwrap();
        assert!(!records.has_ended(&records.own()));
        let mut child = Command::new("sleep").arg("100").spawn().unwrap();
        let start = start_of(child.id()).unwrap().unwrap();
        let record = format!("{} {} {start}", records.place, child.id());
        assert!(!records.has_ended(&record));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(records.has_ended(&record));
    }

    #[test]
    fn process_id_that_is_used_again_is_another_process() {
        let records = ProcessRecords::new(None).unwrap();
        let (before, start) = records.own.rsplit_once(' ').unwrap();
        let earlier = start.parse::<u64>().unwrap() - 1;
        assert!(records.has_ended(&format!("{} {before} {earlier}", records.place)));
    }

    #[test]
    fn process_of_another_boot_or_namespace_may_still_run() {
        let records = ProcessRecords::new(None).unwrap();
        for record in ["", "x", "1 2 3 4", "other-boot pid:[4026531836] 4000000 1"] {
            assert!(!records.has_ended(record), "{record}");
        }
        let malformed = format!("{} many 7", records.place);
        assert!(!records.has_ended(&malformed));
    }
}
