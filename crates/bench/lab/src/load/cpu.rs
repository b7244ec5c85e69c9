//! CPU time, context switches and page faults of the process and of the calling thread.

use std::time::Duration;

use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeVal;
use rustix::time::{ClockId, clock_gettime};

/// CPU time of all threads in ns, including kernel threads for io_uring.
pub(crate) fn process_ns() -> u64 {
    read(ClockId::ProcessCPUTime)
}

/// CPU time of the calling thread in ns.
pub(crate) fn thread_ns() -> u64 {
    read(ClockId::ThreadCPUTime)
}

fn read(clock: ClockId) -> u64 {
    let time = clock_gettime(clock);
    u64::try_from(time.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0)
}

/// The result of `getrusage`, as far as fio prints it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub user: Duration,
    pub system: Duration,
    /// Voluntary context switches: the thread waited.
    pub voluntary_switches: u64,
    /// Involuntary context switches: the thread was preempted.
    pub involuntary_switches: u64,
    pub major_faults: u64,
    pub minor_faults: u64,
}

impl Usage {
    /// Returns the usage of the calling thread since it started.
    pub fn of_this_thread() -> Self {
        Self::of(UsageWho::RUSAGE_THREAD)
    }

    /// Returns the usage of all threads of this process, including threads that have ended.
    pub fn of_this_process() -> Self {
        Self::of(UsageWho::RUSAGE_SELF)
    }

    /// Returns the usage of child processes that have ended and were waited for.
    pub fn of_children() -> Self {
        Self::of(UsageWho::RUSAGE_CHILDREN)
    }

    fn of(who: UsageWho) -> Self {
        let Ok(usage) = getrusage(who) else { return Self::default() };
        let count = |count: i64| u64::try_from(count).unwrap_or(0);
        Self {
            user: duration(usage.user_time()),
            system: duration(usage.system_time()),
            voluntary_switches: count(usage.voluntary_context_switches()),
            involuntary_switches: count(usage.involuntary_context_switches()),
            major_faults: count(usage.major_page_faults()),
            minor_faults: count(usage.minor_page_faults()),
        }
    }

    /// Voluntary and involuntary context switches together.
    pub fn switches(&self) -> u64 {
        self.voluntary_switches + self.involuntary_switches
    }

    #[must_use]
    pub fn since(self, earlier: Self) -> Self {
        Self {
            user: self.user.saturating_sub(earlier.user),
            system: self.system.saturating_sub(earlier.system),
            voluntary_switches: self.voluntary_switches.saturating_sub(earlier.voluntary_switches),
            involuntary_switches: self.involuntary_switches.saturating_sub(earlier.involuntary_switches),
            major_faults: self.major_faults.saturating_sub(earlier.major_faults),
            minor_faults: self.minor_faults.saturating_sub(earlier.minor_faults),
        }
    }

    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            user: self.user + other.user,
            system: self.system + other.system,
            voluntary_switches: self.voluntary_switches + other.voluntary_switches,
            involuntary_switches: self.involuntary_switches + other.involuntary_switches,
            major_faults: self.major_faults + other.major_faults,
            minor_faults: self.minor_faults + other.minor_faults,
        }
    }
}

fn duration(time: TimeVal) -> Duration {
    let part = |value: i64| u64::try_from(value).unwrap_or(0);
    Duration::from_secs(part(time.tv_sec())) + Duration::from_micros(part(time.tv_usec()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thread_that_worked_has_used_processor_time_and_memory() {
        let before = Usage::of_this_thread();
        // Larger than any freed block that the C library would reuse (mallopt(3): 32 MiB).
        let mut pages = vec![0_u8; 40 << 20];
        pages.iter_mut().step_by(4096).for_each(|byte| *byte = std::hint::black_box(1));
        let busy = std::time::Instant::now();
        while thread_ns() < 30_000_000 && busy.elapsed() < Duration::from_secs(30) {
            std::hint::black_box(&pages);
        }
        let used = Usage::of_this_thread().since(before);
        assert!(used.user + used.system > Duration::ZERO, "{used:?}");
        assert!(used.minor_faults > 0, "{used:?}");
    }
}
