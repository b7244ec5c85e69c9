//! Lets workers wake the balancer, and measures whether a worker was busy.
//!
//! `busy worker → BusyWatch::check → BalancerWakeup::wake → the balancer's thread`

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};

use crate::host::signal::signal;

/// Time between two readings of the balancer, and between two checks of a worker.
pub(crate) const PERIOD: Duration = Duration::from_millis(100);
/// A worker is busy if it works for at least 1/`BUSY_FROM` of the period. The threshold is low, because a worker that
/// gets little processor time does little work even if it has much to do.
const BUSY_FROM: u32 = 50;

/// The event that wakes the balancer's thread.
#[derive(Debug)]
pub(crate) struct BalancerWakeup {
    pub(crate) origin: Instant,
    /// [`BalancerWakeup::wake`] has no effect until this many milliseconds after the origin.
    due_ms: AtomicU64,
    quit: AtomicBool,
    pub(crate) fd: OwnedFd,
}

impl BalancerWakeup {
    pub(crate) fn new() -> std::io::Result<Self> {
        // The eventfd is blocking: the balancer sleeps in a read. A write would block only after 2^64 - 2 unread
        // events.
        let fd = eventfd(0, EventfdFlags::CLOEXEC)?;
        Ok(Self { origin: Instant::now(), due_ms: AtomicU64::new(0), quit: AtomicBool::new(false), fd })
    }

    /// Wakes the balancer. Busy workers call this; only one of them per period makes a system call.
    pub(crate) fn wake(&self, now: Instant) {
        let now_ms = self.millis(now);
        let due_ms = self.due_ms.load(Ordering::Relaxed);
        let next_ms = now_ms.saturating_add(whole_millis(PERIOD));
        // Relaxed: the exchange alone decides which worker makes the call.
        let exchange =
            |from| self.due_ms.compare_exchange(from, next_ms, Ordering::Relaxed, Ordering::Relaxed);
        if now_ms >= due_ms && exchange(due_ms).is_ok() {
            signal(&self.fd);
        }
    }

    /// Makes [`BalancerWakeup::wake`] have no effect for `length` from `now`.
    pub(crate) fn pause(&self, now: Instant, length: Duration) {
        let due_ms = self.millis(now).saturating_add(whole_millis(length));
        self.due_ms.fetch_max(due_ms, Ordering::Relaxed);
    }

    /// Sleeps until a worker wakes the balancer. Returns false after [`BalancerWakeup::quit`].
    pub(crate) fn wait(&self) -> bool {
        let mut counter = [0u8; 8];
        while rustix::io::read(&self.fd, &mut counter) == Err(rustix::io::Errno::INTR) {}
        // Acquire: pairs with the release in `quit`.
        !self.quit.load(Ordering::Acquire)
    }

    /// Tells the balancer to end, and wakes it.
    pub(crate) fn quit(&self) {
        // Release: pairs with the acquire in `wait`; the eventfd is signalled afterwards.
        self.quit.store(true, Ordering::Release);
        signal(&self.fd);
    }

    pub(crate) fn is_quitting(&self) -> bool {
        // Relaxed: a balancer that sees the change late takes one more reading.
        self.quit.load(Ordering::Relaxed)
    }

    fn millis(&self, now: Instant) -> u64 {
        whole_millis(now.saturating_duration_since(self.origin))
    }
}

fn whole_millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Measures whether a worker is busy, and wakes the balancer if so.
#[derive(Debug)]
pub(crate) struct BusyWatch {
    wakeup: Arc<BalancerWakeup>,
    since: Instant,
    work: Duration,
}

impl BusyWatch {
    pub(crate) fn new(wakeup: Arc<BalancerWakeup>, now: Instant) -> Self {
        Self { wakeup, since: now, work: Duration::ZERO }
    }

    /// The time of the next call of [`BusyWatch::check`].
    pub(crate) fn next_check(&self) -> Instant {
        self.since + PERIOD
    }

    /// Wakes the balancer if the worker was busy since the last check. `work`: how long the worker has worked since its
    /// start.
    pub(crate) fn check(&mut self, now: Instant, work: Duration) {
        let worked = work.saturating_sub(self.work);
        let length = now.saturating_duration_since(self.since);
        if worked.saturating_mul(BUSY_FROM) >= length {
            self.wakeup.wake(now);
        }
        (self.since, self.work) = (now, work);
    }
}
