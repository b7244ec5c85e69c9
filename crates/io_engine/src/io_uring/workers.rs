//! How many threads the kernel may start for calls that block (`iou-wrk`).
//!
//! By itself io_uring has four for each CPU, for all disks of a worker: calls that hang on one disk, or one call on each of
//! several, would keep the flushes of all others waiting. With several disks there may be one for every call in flight.
//!
//! - The kernel starts a thread only when all it has are blocked, and ends it after some seconds without work: the limit
//!   costs nothing, a disk that hangs costs a thread per call that blocks. So the limit is raised with the number of disks
//!   and not lowered again.
//! - What the kernel orders by file (buffered writes) takes one thread per file, whatever the limit. It has 64 such queues,
//!   to which it assigns files by a hash: two files of one queue wait for each other.
//! - The limit belongs to the thread that submits; where several share a ring (placement `shared`), each has its own.
//!
//! Source: io_uring_register(2), `IORING_REGISTER_IOWQ_MAX_WORKERS` (Linux 5.15); io_uring/io-wq.c.
//! Not here: which CPUs they run on (`setup.rs`).

use io_uring::IoUring;

/// What the kernel allows by itself.
const USUAL_PER_CPU: u32 = 4;

#[derive(Debug, Default)]
pub(super) struct KernelWorkers {
    /// Calls that there are threads for, beside the usual ones.
    calls: u32,
}

impl KernelWorkers {
    /// Files of so many disks are there, with so many calls in flight at most.
    pub fn expect(&mut self, ring: &IoUring, disks: u32, calls: u32) {
        if disks < 2 || calls <= self.calls {
            return;
        }
        self.calls = calls;
        // 0 leaves the limit of calls that this engine does not make as it is.
        let mut limits = [usual().saturating_add(calls), 0];
        if let Err(error) = ring.submitter().register_iowq_max_workers(&mut limits) {
            tracing::warn!(
                %error,
                "io_uring's threads for calls that block stay as few as they are: a disk that hangs may stop others"
            );
        }
    }
}

fn usual() -> u32 {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    USUAL_PER_CPU.saturating_mul(u32::try_from(cpus).unwrap_or(u32::MAX))
}
