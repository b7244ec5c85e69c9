//! The right to sleep on the device's signal: a mutex without data, with a time limit for waiting.
//!
//! - The thread that releases the turn wakes one waiter. One is enough: the waiter takes the turn, or finds that a
//!   newcomer has it, and that newcomer will release it too. While any thread waits, some thread therefore has the turn
//!   or is about to take it.
//! - A waiter at its time limit leaves only after it has seen, under the mutex, that the turn is taken. It may have
//!   consumed a wake-up, but the thread with the turn will send another one.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// See the module documentation.
#[derive(Debug, Default)]
pub(crate) struct Turn {
    taken: Mutex<bool>,
    given_back: Condvar,
}

/// The turn; released when dropped.
#[derive(Debug)]
pub(crate) struct MyTurn<'t>(&'t Turn);

impl Turn {
    /// Waits for the turn. Returns `None` if another thread still has it at `until`.
    pub(crate) fn take(&self, until: Option<Instant>) -> Option<MyTurn<'_>> {
        let mut taken = self.lock();
        while *taken {
            taken = self.wait(taken, until)?;
        }
        *taken = true;
        Some(MyTurn(self))
    }

    /// Returns `None` if no time is left.
    fn wait<'t>(
        &'t self,
        taken: MutexGuard<'t, bool>,
        until: Option<Instant>,
    ) -> Option<MutexGuard<'t, bool>> {
        let Some(until) = until else {
            return Some(self.given_back.wait(taken).unwrap_or_else(PoisonError::into_inner));
        };
        let left = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())?;
        let waited = self.given_back.wait_timeout(taken, left);
        Some(waited.unwrap_or_else(PoisonError::into_inner).0)
    }

    fn lock(&self) -> MutexGuard<'_, bool> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for MyTurn<'_> {
    fn drop(&mut self) {
        *self.0.lock() = false;
        self.0.given_back.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::thread;
    use std::time::Duration;

    use super::*;

    fn in_ms(ms: u64) -> Option<Instant> {
        Some(Instant::now() + Duration::from_millis(ms))
    }

    #[test]
    fn turn_that_is_taken_is_waited_for_until_the_time_is_up() {
        let turn = Turn::default();
        let mine = turn.take(None);
        assert!(turn.take(in_ms(5)).is_none() && turn.take(in_ms(0)).is_none());
        drop(mine);
        assert!(turn.take(in_ms(0)).is_some());
    }

    #[test]
    fn all_who_wait_get_their_turn_one_after_the_other() {
        let (turn, inside) = (Turn::default(), AtomicU32::new(0));
        let mine = turn.take(None);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let _turn = turn.take(None);
                    assert_eq!(inside.fetch_add(1, Ordering::Relaxed), 0);
                    thread::yield_now();
                    inside.fetch_sub(1, Ordering::Relaxed);
                });
            }
            drop(mine);
        });
        assert!(turn.take(in_ms(0)).is_some());
    }

    #[test]
    fn waiters_who_give_up_take_no_wake_up_with_them() {
        let (turn, got) = (Turn::default(), AtomicU32::new(0));
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| (0..200).for_each(|_| drop(turn.take(in_ms(0)))));
            }
            for _ in 0..2 {
                scope.spawn(|| {
                    (0..200).for_each(|_| {
                        let _turn = turn.take(None);
                        got.fetch_add(1, Ordering::Relaxed);
                    });
                });
            }
        });
        assert_eq!(got.load(Ordering::Relaxed), 400);
    }
}
