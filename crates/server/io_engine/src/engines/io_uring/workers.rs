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
//! - The limit belongs to the thread that submits, whichever ring it is set by: disks and calls are those of all engines of
//!   a thread. A kernel thread that submits (SQPOLL) has its own.
//! - Where several threads share a ring (placement `shared`), each has its own limit; the engine is counted where a file
//!   was attached last.
//!
//! Source: io_uring_register(2), `IORING_REGISTER_IOWQ_MAX_WORKERS` (Linux 5.15); io_uring/io-wq.c.
//! Not here: which CPUs they run on (`setup.rs`).

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use io_uring::IoUring;

/// What the kernel allows by itself.
const USUAL_PER_CPU: u32 = 4;

thread_local! {
    static OF_THREAD: Arc<Mutex<Sum>> = Arc::default();
}

/// Of all engines whose calls one thread submits.
#[derive(Debug, Default)]
struct Sum {
    disks: u32,
    calls: u32,
    /// What was set; 0: what the kernel has by itself.
    limit: u32,
}

/// One engine's part of it.
#[derive(Debug, Default)]
pub(super) struct KernelWorkers {
    /// Where it is counted.
    sum: Option<Arc<Mutex<Sum>>>,
    disks: u32,
    calls: u32,
    has_warned: bool,
}

impl KernelWorkers {
    /// Files of so many disks are there, with so many calls in flight at most. `own_thread`: of the kernel, for this ring.
    pub fn expect(&mut self, ring: &IoUring, disks: u32, calls: u32, own_thread: bool) {
        let sum = if own_thread { self.sum.clone().unwrap_or_default() } else { OF_THREAD.with(Arc::clone) };
        let set = |limit| {
            // 0 leaves the limit of calls that this engine does not make as it is.
            ring.submitter().register_iowq_max_workers(&mut [limit, 0])
        };
        if let Err(error) = self.count(sum, disks, calls, set)
            && !std::mem::replace(&mut self.has_warned, true)
        {
            tracing::warn!(
                %error,
                "io_uring's threads for calls that block stay as few as they are: a disk that hangs may stop others"
            );
        }
    }

    fn count(
        &mut self,
        sum: Arc<Mutex<Sum>>,
        disks: u32,
        calls: u32,
        set: impl FnOnce(u32) -> io::Result<()>,
    ) -> io::Result<()> {
        self.leave();
        (self.disks, self.calls) = (disks, if disks > 0 { calls } else { 0 });
        let sum = self.sum.insert(sum);
        let mut all = lock(sum);
        all.disks = all.disks.saturating_add(self.disks);
        all.calls = all.calls.saturating_add(self.calls);
        let wanted = usual().saturating_add(all.calls);
        if all.disks >= 2 && wanted > all.limit {
            set(wanted)?;
            all.limit = wanted;
        }
        Ok(())
    }

    fn leave(&mut self) {
        if let Some(sum) = self.sum.take() {
            let mut all = lock(&sum);
            all.disks = all.disks.saturating_sub(self.disks);
            all.calls = all.calls.saturating_sub(self.calls);
        }
    }
}

impl Drop for KernelWorkers {
    fn drop(&mut self) {
        self.leave();
    }
}

fn lock(sum: &Mutex<Sum>) -> MutexGuard<'_, Sum> {
    sum.lock().unwrap_or_else(PoisonError::into_inner)
}

fn usual() -> u32 {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    USUAL_PER_CPU.saturating_mul(u32::try_from(cpus).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The limit that is set for threads beside the usual ones, if one is.
    fn set_for(engine: &mut KernelWorkers, sum: &Arc<Mutex<Sum>>, disks: u32, calls: u32) -> Option<u32> {
        let mut limit = None;
        let set = |value| {
            limit = Some(value - usual());
            Ok(())
        };
        engine.count(Arc::clone(sum), disks, calls, set).unwrap();
        limit
    }

    #[test]
    fn disks_and_calls_are_those_of_all_engines_of_a_thread() {
        let sum = Arc::default();
        let mut engines: [KernelWorkers; 2] = Default::default();
        let [first, second] = &mut engines;
        assert_eq!([set_for(first, &sum, 1, 1024), set_for(second, &sum, 0, 64)], [None, None]);
        assert_eq!(set_for(second, &sum, 1, 64), Some(1088));
        assert_eq!(set_for(second, &sum, 2, 64), None, "never lowered, and not set again");
        assert_eq!(set_for(first, &sum, 3, 1500), Some(1564));
    }

    #[test]
    fn engine_that_ends_takes_its_part_out() {
        let sum = Arc::default();
        let mut first = KernelWorkers::default();
        assert_eq!(set_for(&mut first, &sum, 1, 1024), None);
        drop(first);
        assert_eq!(set_for(&mut KernelWorkers::default(), &sum, 1, 64), None);
        let all = lock(&sum);
        assert_eq!((all.disks, all.calls), (0, 0));
    }

    #[test]
    fn limit_that_was_refused_is_asked_for_again() {
        let sum = Arc::default();
        let mut engine = KernelWorkers::default();
        let refused = engine.count(Arc::clone(&sum), 2, 64, |_| Err(io::ErrorKind::PermissionDenied.into()));
        assert_eq!((refused.is_err(), set_for(&mut engine, &sum, 2, 64)), (true, Some(64)));
    }
}
