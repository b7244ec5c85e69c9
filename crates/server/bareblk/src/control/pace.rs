//! Limits how much processor time the clients of the monitor socket use together, however many there are and however
//! often they connect.
//!
//! Each connection and each answer postpones the next one by ten times the processor time that it took.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// The clients together may use one part in this many of one processor's time.
const PARTS: u32 = 10;
/// Minimum charge of a connection or an answer, which also cost time in the kernel; and `health` wakes the workers.
const LEAST: Duration = Duration::from_millis(1);
/// How far answers may be postponed before clients have to wait. A tenth of this is processor time.
const CREDIT: Duration = Duration::from_secs(1);

/// The pace of one monitor socket.
#[derive(Debug)]
pub struct Pace {
    /// When the next answer would be due without credit.
    due: Mutex<Instant>,
}

impl Pace {
    pub fn new() -> Self {
        Self { due: Mutex::new(Instant::now()) }
    }

    fn due(&self) -> MutexGuard<'_, Instant> {
        self.due.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How long the next answer or connection has to wait.
    pub fn wait(&self) -> Duration {
        self.wait_at(Instant::now())
    }

    fn wait_at(&self, now: Instant) -> Duration {
        self.due().saturating_duration_since(now + CREDIT)
    }

    /// Runs `work`, and charges the processor time that this thread uses in it.
    pub fn charge<T>(&self, work: impl FnOnce() -> T) -> T {
        let before = thread_time();
        let done = work();
        self.charge_at(Instant::now(), thread_time().saturating_sub(before));
        done
    }

    fn charge_at(&self, now: Instant, used: Duration) {
        let mut due = self.due();
        *due = now.max(*due) + used.max(LEAST) * PARTS;
    }
}

fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_clients_do_not_wait_and_a_flood_gets_a_tenth_of_a_processor() {
        let (pace, now) = (Pace::new(), Instant::now());
        (0..100).for_each(|_| pace.charge_at(now, Duration::ZERO));
        assert_eq!(pace.wait_at(now), Duration::ZERO);
        pace.charge_at(now, Duration::from_millis(500));
        assert_eq!(pace.wait_at(now), Duration::from_secs(5));
        assert_eq!(pace.wait_at(now + Duration::from_secs(5)), Duration::ZERO);
    }

    #[test]
    fn time_without_clients_is_no_credit_beyond_the_usual() {
        let (pace, later) = (Pace::new(), Instant::now() + Duration::from_secs(60));
        pace.charge_at(later, Duration::from_secs(1));
        assert_eq!(pace.wait_at(later), Duration::from_secs(9));
    }

    #[test]
    fn work_is_charged_by_the_time_of_its_thread() {
        let pace = Pace::new();
        pace.charge(|| while thread_time() < Duration::from_millis(200) {});
        assert!(pace.wait() > Duration::ZERO);
    }
}
