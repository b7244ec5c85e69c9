//! Limits the threads that the kernel may start for calls that block (`iou-wrk`).
//!
//! By default, io_uring has four such threads per CPU, for all disks of a worker. Calls that hang on one disk, or one
//! call on each of several disks, would delay the flushes of all others. With several disks, this file therefore sets
//! the limit to one thread per call in flight.
//!
//! - The kernel starts a thread only when all its threads are blocked, and ends it after some seconds without work. A
//!   higher limit therefore costs nothing, and a disk that hangs costs one thread per blocked call. The engine raises
//!   the limit with the number of disks and never lowers it.
//! - The kernel orders buffered writes by file: one thread per file, whatever the limit. It has 64 such queues and
//!   assigns files to them by a hash, so two files of one queue wait for each other.
//! - The limit applies to the thread that submits, so the disks and calls of all engines of a thread are added up. A
//!   kernel thread that submits (SQPOLL) has its own limit.
//! - Where several threads share a ring (placement `shared`), each has its own limit. The engine raises only that of
//!   the thread that last attached a file.
//!
//! Source: io_uring_register(2), `IORING_REGISTER_IOWQ_MAX_WORKERS` (Linux 5.15); io_uring/io-wq.c.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use io_uring::IoUring;

/// The kernel's default.
const USUAL_PER_CPU: u32 = 4;

thread_local! {
    static OF_THREAD: Arc<Mutex<Sum>> = Arc::default();
}

/// The sum over all engines whose calls one thread submits.
#[derive(Debug, Default)]
struct Sum {
    disks: u32,
    calls: u32,
    /// The current limit; 0: the kernel's default.
    limit: u32,
}

/// One engine's part of the sum.
#[derive(Debug, Default)]
pub(super) struct KernelWorkers {
    /// The sum that includes this part.
    sum: Option<Arc<Mutex<Sum>>>,
    disks: u32,
    calls: u32,
    has_warned: bool,
}

impl KernelWorkers {
    /// Counts `disks` disks with at most `calls` calls in flight. `own_thread`: the ring has a kernel thread that
    /// submits.
    pub fn expect(&mut self, ring: &IoUring, disks: u32, calls: u32, own_thread: bool) {
        let sum = if own_thread { self.sum.clone().unwrap_or_default() } else { OF_THREAD.with(Arc::clone) };
        let set = |limit| {
            // 0 keeps the limit of the other class of threads, which this engine does not use.
            ring.submitter().register_iowq_max_workers(&mut [limit, 0])
        };
        if let Err(error) = self.count(sum, disks, calls, set)
            && !std::mem::replace(&mut self.has_warned, true)
        {
            tracing::warn!(
                %error,
                "cannot raise the limit on io_uring's threads for calls that block: a disk that hangs may delay others"
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

    /// How far the new limit exceeds the default, if a limit is set.
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
