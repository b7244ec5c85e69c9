//! Models of the ticket lock: all interleavings, and all values that its orderings let a thread read.
//!
//! See also: the queued lock (`two.rs`, `three.rs`).

use loom::cell::UnsafeCell;
use loom::model::Builder;
use loom::sync::Arc;
use loom::thread;

use crate::TicketLock;

/// A number behind a ticket lock. Loom fails the model if two threads access the number at the same time.
struct Guarded {
    lock: TicketLock,
    number: UnsafeCell<u32>,
}

// SAFETY: only the lock's holder accesses the number; loom checks exactly that.
unsafe impl Sync for Guarded {}
// SAFETY: nothing in it is bound to a thread.
unsafe impl Send for Guarded {}

impl Guarded {
    fn new(next: u16) -> Arc<Self> {
        Arc::new(Self { lock: TicketLock::starting_at(next), number: UnsafeCell::new(0) })
    }

    /// Only for the lock's holder.
    fn add_one(&self) {
        // SAFETY: the pointer is the cell's; loom panics if another thread accesses it without an order
        // between them.
        self.number.with_mut(|number| unsafe { *number += 1 });
    }

    fn locked_add_one(&self) {
        let ticket = self.lock.lock();
        self.add_one();
        self.lock.unlock(ticket);
    }

    fn try_add_one(&self) -> bool {
        let Some(ticket) = self.lock.try_lock() else { return false };
        self.add_one();
        self.lock.unlock(ticket);
        true
    }

    fn sum(&self) -> u32 {
        let ticket = self.lock.lock();
        // SAFETY: as in `add_one`.
        let sum = self.number.with(|number| unsafe { *number });
        self.lock.unlock(ticket);
        sum
    }
}

#[test]
fn two_threads_that_lock_twice_never_meet() {
    loom::model(|| {
        let guarded = Guarded::new(u16::MAX - 1); // the tickets wrap on the way
        let theirs = Arc::clone(&guarded);
        let other = thread::spawn(move || {
            theirs.locked_add_one();
            theirs.locked_add_one();
        });
        guarded.locked_add_one();
        guarded.locked_add_one();
        other.join().unwrap();
        assert_eq!(guarded.sum(), 4);
    });
}

#[test]
fn try_lock_beside_lock_never_meets_it_and_counts_what_it_did() {
    loom::model(|| {
        let guarded = Guarded::new(u16::MAX);
        let theirs = Arc::clone(&guarded);
        let other = thread::spawn(move || theirs.locked_add_one());
        let tried = u32::from(guarded.try_add_one()) + u32::from(guarded.try_add_one());
        other.join().unwrap();
        assert_eq!(guarded.sum(), 1 + tried);
    });
}

/// Two threads that wait in a spin loop at once would keep loom busy forever; so the third thread only tries.
#[test]
fn third_thread_that_tries_never_meets_two_that_lock_with_up_to_two_preemptions() {
    let mut model = Builder::new();
    model.preemption_bound = Some(2);
    model.check(|| {
        let guarded = Guarded::new(u16::MAX - 1);
        let (second, third) = (Arc::clone(&guarded), Arc::clone(&guarded));
        let other = thread::spawn(move || second.locked_add_one());
        let tries = thread::spawn(move || u32::from(third.try_add_one()));
        guarded.locked_add_one();
        other.join().unwrap();
        let tried = tries.join().unwrap();
        assert_eq!(guarded.sum(), 2 + tried);
    });
}
