//! The cost of another process: CPU time, context switches, calls of `write`, threads, memory.
//!
//! - CPU time comes from the process's own clock, with nanosecond resolution. That clock covers all threads of the
//!   process, including ended threads and the kernel's io_uring workers.
//! - Context switches are summed over existing threads; those of ended threads are lost.
//!
//! Facts: clock_getcpuclockid(3), proc_pid_status(5), proc_pid_io(5).

use std::fs;

use nix::time::ClockId;
use nix::unistd::Pid;

/// Sums since the process began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cost {
    pub cpu_ns: u64,
    /// Voluntary and involuntary context switches.
    pub switches: u64,
    /// Calls of `write` and its relatives, but not of `sendmsg`; `None` if the kernel does not tell.
    pub writes: Option<u64>,
}

impl Cost {
    /// The cost of process `pid`; zero if the process has ended.
    pub fn of(pid: u32) -> Self {
        Self {
            cpu_ns: cpu_ns(pid).unwrap_or(0),
            switches: threads(pid).map(|status| switches(&status)).sum(),
            writes: fs::read_to_string(format!("/proc/{pid}/io")).ok().and_then(|io| number(&io, "syscw:")),
        }
    }

    #[must_use]
    pub fn since(self, earlier: Self) -> Self {
        Self {
            cpu_ns: self.cpu_ns.saturating_sub(earlier.cpu_ns),
            switches: self.switches.saturating_sub(earlier.switches),
            writes: self.writes.zip(earlier.writes).map(|(now, then)| now.saturating_sub(then)),
        }
    }
}

/// Number of the process's existing threads.
pub(crate) fn thread_count(pid: u32) -> usize {
    threads(pid).count()
}

/// Resident memory, in KiB.
pub(crate) fn resident_kib(pid: u32) -> Option<u64> {
    number(&fs::read_to_string(format!("/proc/{pid}/status")).ok()?, "VmRSS:")
}

/// Memory of the process and its children that is neither file-backed nor shared with another process, in KiB.
pub(crate) fn private_kib(pid: u32) -> Option<u64> {
    let own = number(&fs::read_to_string(format!("/proc/{pid}/status")).ok()?, "RssAnon:")?;
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    let children = children.split_ascii_whitespace().filter_map(|child| private_kib(child.parse().ok()?));
    Some(own + children.sum::<u64>())
}

fn cpu_ns(pid: u32) -> Option<u64> {
    let clock = ClockId::pid_cpu_clock_id(Pid::from_raw(i32::try_from(pid).ok()?)).ok()?;
    let time = clock.now().ok()?;
    Some(u64::try_from(time.tv_sec()).ok()? * 1_000_000_000 + u64::try_from(time.tv_nsec()).ok()?)
}

/// The status of each thread.
fn threads(pid: u32) -> impl Iterator<Item = String> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    tasks.filter_map(|task| fs::read_to_string(task.path().join("status")).ok())
}

fn switches(status: &str) -> u64 {
    ["voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:"]
        .iter()
        .filter_map(|key| number(status, key))
        .sum()
}

/// Returns the number in the line that begins with `key`.
fn number(status: &str, key: &str) -> Option<u64> {
    let line = status.lines().find(|line| line.starts_with(key))?;
    line.split_ascii_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn switches_of_both_kinds_are_summed() {
        let status =
            "Name:\tx\nVmRSS:\t  120 kB\nvoluntary_ctxt_switches:\t5\nnonvoluntary_ctxt_switches:\t7\n";
        assert_eq!((switches(status), number(status, "VmRSS:")), (12, Some(120)));
    }

    #[test]
    fn process_that_works_has_costs_and_one_that_is_gone_has_none() {
        let own = std::process::id();
        let before = Cost::of(own);
        let mut sum = 0_u64;
        while Cost::of(own).since(before).cpu_ns < 1_000_000 {
            sum = std::hint::black_box(sum.wrapping_add(1));
        }
        assert!(thread_count(own) > 0 && resident_kib(own) > Some(0));
        assert!(private_kib(own) > Some(0) && private_kib(u32::MAX).is_none());
        assert_eq!((Cost::of(u32::MAX), thread_count(u32::MAX)), (Cost::default(), 0));
    }
}
