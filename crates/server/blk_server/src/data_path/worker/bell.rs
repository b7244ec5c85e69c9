//! Lets workers wake the balancer, and measures whether a worker was busy.
//!
//! `busy worker → BusyWatch::look → Bell::ring → the balancer's thread`

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};

use crate::host::signal::signal;

/// Time between two readings of the balancer, and between two checks of a worker.
pub(crate) const PERIOD: Duration = Duration::from_millis(100);
/// A worker that works for less than 1/n of the period does not ring. The threshold is low, because a worker that gets
/// little processor time does little work even if it has much to do.
const RINGS_FROM: u32 = 50;
/// An event that wakes the balancer.
#[derive(Debug)]
pub(crate) struct Bell {
    pub(crate) origin: Instant,
    /// The bell ignores rings until this many milliseconds after the origin.
    due_ms: AtomicU64,
    quit: AtomicBool,
    pub(crate) fd: OwnedFd,
}

impl Bell {
    pub(crate) fn new() -> std::io::Result<Self> {
        // The eventfd is blocking: the balancer sleeps in a read of it. A write would block only after 2^64 - 2 unread
        // events.
        let fd = eventfd(0, EventfdFlags::CLOEXEC)?;
        Ok(Self { origin: Instant::now(), due_ms: AtomicU64::new(0), quit: AtomicBool::new(false), fd })
    }

    /// Busy workers call this. One of them per period makes a system call.
    pub(crate) fn ring(&self, now: Instant) {
        let now_ms = self.millis(now);
        let due_ms = self.due_ms.load(Ordering::Relaxed);
        let next_ms = now_ms.saturating_add(whole_millis(PERIOD));
        // Relaxed: the exchange alone orders the rings.
        let exchange =
            |from| self.due_ms.compare_exchange(from, next_ms, Ordering::Relaxed, Ordering::Relaxed);
        if now_ms >= due_ms && exchange(due_ms).is_ok() {
            signal(&self.fd);
        }
    }

    /// Makes the bell ignore rings for this long.
    pub(crate) fn pause(&self, now: Instant, length: Duration) {
        let due_ms = self.millis(now).saturating_add(whole_millis(length));
        self.due_ms.fetch_max(due_ms, Ordering::Relaxed);
    }

    /// Sleeps until a worker rings. Returns false after [`Bell::quit`].
    pub(crate) fn wait(&self) -> bool {
        let mut counter = [0u8; 8];
        while rustix::io::read(&self.fd, &mut counter) == Err(rustix::io::Errno::INTR) {}
        // Acquire: pairs with the release in `quit`.
        !self.quit.load(Ordering::Acquire)
    }

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

/// Whether a worker was busy enough to ring.
#[derive(Debug)]
pub(crate) struct BusyWatch {
    bell: Arc<Bell>,
    since: Instant,
    work: Duration,
}

impl BusyWatch {
    pub(crate) fn new(bell: Arc<Bell>, now: Instant) -> Self {
        Self { bell, since: now, work: Duration::ZERO }
    }

    /// The time of the next call of [`BusyWatch::look`].
    pub(crate) fn next_look(&self) -> Instant {
        self.since + PERIOD
    }

    /// `work`: how long the worker has worked since its start.
    pub(crate) fn look(&mut self, now: Instant, work: Duration) {
        let worked = work.saturating_sub(self.work);
        let length = now.saturating_duration_since(self.since);
        if worked.saturating_mul(RINGS_FROM) >= length {
            self.bell.ring(now);
        }
        (self.since, self.work) = (now, work);
    }
}
