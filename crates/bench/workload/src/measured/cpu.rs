//! CPU time of the calling thread, and of a local server's process.
//!
//! - The kernel measures threads to the microsecond. It measures another process in ticks of 10 ms, summed over all its
//!   threads, including ended ones.
//! - A thread's figures exclude kernel threads that work for it (io_uring's workers), because these belong to the
//!   process.
//!
//! Facts: getrusage(2), proc_pid_stat(5).

use std::time::Duration;

use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;

/// CPU time and events of threads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuTime {
    /// In user space.
    pub user: Duration,
    /// In the kernel.
    pub system: Duration,
    /// Voluntary and involuntary context switches.
    pub context_switches: u64,
    /// Page faults with I/O.
    pub major_faults: u64,
    /// Page faults without I/O.
    pub minor_faults: u64,
}

impl CpuTime {
    /// Returns the usage of the calling thread since its start.
    #[must_use]
    pub fn of_thread() -> Self {
        let Ok(usage) = getrusage(UsageWho::RUSAGE_THREAD) else { return Self::default() };
        let micros = |us: i64| Duration::from_micros(u64::try_from(us).unwrap_or(0));
        let count = |number: i64| u64::try_from(number).unwrap_or(0);
        let switches = usage.voluntary_context_switches() + usage.involuntary_context_switches();
        Self {
            user: micros(usage.user_time().num_microseconds()),
            system: micros(usage.system_time().num_microseconds()),
            context_switches: count(switches),
            major_faults: count(usage.major_page_faults()),
            minor_faults: count(usage.minor_page_faults()),
        }
    }

    /// The difference from `earlier`.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            user: self.user.saturating_sub(earlier.user),
            system: self.system.saturating_sub(earlier.system),
            context_switches: self.context_switches.saturating_sub(earlier.context_switches),
            major_faults: self.major_faults.saturating_sub(earlier.major_faults),
            minor_faults: self.minor_faults.saturating_sub(earlier.minor_faults),
        }
    }

    /// Adds the counts of `other`.
    pub fn merge(&mut self, other: &Self) {
        self.user += other.user;
        self.system += other.system;
        self.context_switches += other.context_switches;
        self.major_faults += other.major_faults;
        self.minor_faults += other.minor_faults;
    }
}

/// CPU time of another process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessTime {
    /// In user space.
    pub user: Duration,
    /// In the kernel.
    pub system: Duration,
}

impl ProcessTime {
    /// CPU time of `pid` since its start; `None` if the process has ended or is not visible.
    #[must_use]
    pub fn of(pid: i32) -> Option<Self> {
        let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let (user, system) = ticks(&text)?;
        let per_second = rustix::param::clock_ticks_per_second().max(1);
        let time = |ticks: u64| Duration::from_millis(ticks.saturating_mul(1000) / per_second);
        Some(Self { user: time(user), system: time(system) })
    }

    /// The difference from `earlier`.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            user: self.user.saturating_sub(earlier.user),
            system: self.system.saturating_sub(earlier.system),
        }
    }
}

/// Fields 14 and 15. The second field, the command, may contain any text, but ends at the last closing bracket.
fn ticks(stat: &str) -> Option<(u64, u64)> {
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_ascii_whitespace().skip(11);
    Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_found_behind_a_name_with_brackets_and_spaces() {
        let stat = "7 (a) b (c) S 1 7 7 0 -1 4194304 100 0 0 0 21 43 0 0 20 0 1 0 5";
        assert_eq!(ticks(stat), Some((21, 43)));
        assert_eq!(ticks("nothing"), None);
    }

    #[test]
    fn own_process_has_a_time_and_a_process_that_is_not_has_none() {
        let own = i32::try_from(std::process::id()).unwrap();
        assert!(ProcessTime::of(own).is_some());
        assert_eq!(ProcessTime::of(-1), None);
    }

    #[test]
    fn work_of_the_thread_is_counted() {
        let before = CpuTime::of_thread();
        let mut sum = 0_u64;
        while CpuTime::of_thread().since(&before).user + CpuTime::of_thread().since(&before).system
            == Duration::ZERO
        {
            sum = std::hint::black_box(sum.wrapping_add(1));
        }
        assert!(CpuTime::of_thread() != before);
    }
}
