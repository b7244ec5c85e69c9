//! Processor time of the process and of the calling thread.
//!
//! Not here: what it is divided by.

use rustix::time::{ClockId, clock_gettime};

/// Of all threads, those the kernel runs for io_uring included, in ns.
pub(crate) fn process_ns() -> u64 {
    read(ClockId::ProcessCPUTime)
}

/// Of the calling thread, in ns.
pub(crate) fn thread_ns() -> u64 {
    read(ClockId::ThreadCPUTime)
}

fn read(clock: ClockId) -> u64 {
    let time = clock_gettime(clock);
    u64::try_from(time.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0)
}
