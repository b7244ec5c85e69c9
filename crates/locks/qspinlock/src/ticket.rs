//! A ticket lock: a thread draws a number and waits until that number is called. Fair, four bytes, never sleeps.
//!
//! ```text
//! word:   31            16 15             0
//!        | next to be drawn | now called  |     free: both are equal
//! lock:   next += 1 (its old value is our ticket), wait until called == ticket
//! unlock: called += 1, without a carry into `next`
//! ```
//!
//! - The lock uses one `AtomicU32` and whole-word operations only: mixed-size atomic accesses are undefined
//!   behaviour in Rust.
//! - The ticket is the acquisition's state (`lock_api` 0.5 keeps it in the guard): unlocking reads nothing.
//! - Tickets wrap after 65,536. A word can tell at most 65,535 outstanding tickets apart (with one more it
//!   would look free), so the lock aborts the process once 32,768 threads want one lock: no schedule can lead
//!   from that state to a wrap.
//!
//! Waiters never sleep. With more threads than cores this lock is hundreds of times slower than a sleeping lock.

#[cfg(not(all(test, loom)))]
use core::{hint::spin_loop, sync::atomic::AtomicU32};
#[cfg(all(test, loom))]
use loom::{hint::spin_loop, sync::atomic::AtomicU32};

use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};

const ONE_NEXT: u32 = 1 << 16;
/// With more holders and waiters of one lock than this, the process aborts.
const MAX_OUTSTANDING: u16 = 1 << 15;
/// Spin hints between two polls of the word, per waiter ahead: about the length of a short critical section.
const SPINS_PER_WAITER: u32 = 16;
/// Upper limit of spin hints, so that waiters still poll a lock that is held for long.
const MAX_SPINS: u32 = 512;

/// A ticket lock. Used through [`TicketMutex`](crate::TicketMutex) or `lock_api::Mutex`.
#[derive(Debug)]
pub struct TicketLock {
    word: AtomicU32,
}

/// One acquisition of a [`TicketLock`]. May be released by a different thread from the one that acquired it.
#[derive(Debug)]
pub struct Ticket(u16);

impl TicketLock {
    /// Draws a ticket and waits for it to be called.
    fn acquire(&self) -> Ticket {
        // Acquire: if the lock is free, this is the acquisition. Pairs with the release in `release`, through
        // the draws of other threads in between, which are read-modify-writes and so part of its release
        // sequence.
        let (ticket, called) = split(self.word.fetch_add(ONE_NEXT, Acquire));
        if ticket != called {
            self.wait_for(ticket, called);
        }
        Ticket(ticket)
    }

    #[cold]
    fn wait_for(&self, ticket: u16, mut called: u16) {
        assert_not_crowded(ticket, called);
        while called != ticket {
            back_off(ticket.wrapping_sub(called));
            // Pairs with the release in `release` by the previous holder.
            (_, called) = split(self.word.load(Acquire));
        }
    }

    /// Draws a ticket only if it would be called at once.
    fn try_acquire(&self) -> Option<Ticket> {
        let word = self.word.load(Relaxed); // only a guess: the exchange decides
        let (next, called) = split(word);
        if next != called {
            return None;
        }
        // Acquire pairs with the last holder's release in `release`.
        let drawn = self.word.compare_exchange(word, word.wrapping_add(ONE_NEXT), Acquire, Relaxed);
        drawn.ok().map(|_| Ticket(next))
    }

    /// Calls the next ticket.
    fn release(&self, ticket: Ticket) {
        // Only the holder changes the lower half, which equals the holder's ticket. After the last ticket it
        // returns to 0 instead of carrying into the upper half, where other threads may be drawing tickets.
        let call_next = if ticket.0 == u16::MAX { u32::from(ticket.0).wrapping_neg() } else { 1 };
        // Release pairs with the acquires in `acquire`, `wait_for` and `try_acquire`.
        self.word.fetch_add(call_next, Release);
    }

    /// The number of holders and waiters.
    #[cfg(not(all(test, loom)))]
    fn outstanding(&self) -> u16 {
        let (next, called) = split(self.word.load(Relaxed)); // a snapshot; no other read depends on it
        next.wrapping_sub(called)
    }
}

/// Splits `word` into the next ticket to draw and the ticket that is called.
const fn split(word: u32) -> (u16, u16) {
    let [next_hi, next_lo, called_hi, called_lo] = word.to_be_bytes();
    (u16::from_be_bytes([next_hi, next_lo]), u16::from_be_bytes([called_hi, called_lo]))
}

/// Waiters further behind poll less often, so that their reads do not delay the holder's release.
fn back_off(ahead: u16) {
    let spins = if cfg!(all(test, loom)) { 1 } else { MAX_SPINS.min(SPINS_PER_WAITER * u32::from(ahead)) };
    for _ in 0..spins {
        spin_loop();
    }
}

/// Aborts, because our ticket is already drawn: after an unwind no thread would pass the lock on, and the
/// next wrap would let two threads in.
fn assert_not_crowded(ticket: u16, called: u16) {
    extern "C" fn abort() -> ! {
        panic!("more than {MAX_OUTSTANDING} threads hold or wait for one ticket lock");
    }
    if ticket.wrapping_sub(called) > MAX_OUTSTANDING {
        abort();
    }
}

// SAFETY: 1. exclusion: only one thread draws each ticket (`fetch_add`, or a compare-exchange that
// succeeded), and at most 32,768 are outstanding, so no two of them are equal, and a thread continues only
// when its own is called; 2. only `release` calls the next ticket, once per acquisition, because it consumes
// the ticket; 3. orderings: acquire on each path that returns a ticket, release in `release`; 4. moving or
// dropping a locked lock touches only its own memory; 5. no operation unwinds.
#[cfg(not(all(test, loom)))]
unsafe impl lock_api::RawMutex for TicketLock {
    const INIT: Self = Self { word: AtomicU32::new(0) };

    type Guard = Ticket;

    #[inline]
    fn lock(&self) -> Ticket {
        self.acquire()
    }

    #[inline]
    fn try_lock(&self) -> Option<Ticket> {
        self.try_acquire()
    }

    #[inline]
    unsafe fn unlock(&self, ticket: Ticket) {
        self.release(ticket);
    }

    fn is_locked(&self) -> bool {
        self.outstanding() > 0
    }
}

// SAFETY: 1. as above; 2. `unlock` calls the ticket after ours, and so hands over to the next in line, if
// there is one; 3. `bump` gives up its ticket only when another thread waits, and then acquires again;
// neither unwinds.
#[cfg(not(all(test, loom)))]
unsafe impl lock_api::RawMutexFair for TicketLock {
    #[inline]
    unsafe fn unlock_fair(&self, ticket: Ticket) {
        self.release(ticket);
    }

    #[inline]
    unsafe fn bump(&self, ticket: &mut Ticket) {
        if self.outstanding() > 1 {
            self.release(Ticket(ticket.0));
            *ticket = self.acquire();
        }
    }
}

/// For the models and the tests.
#[cfg(test)]
impl TicketLock {
    /// A free lock whose next ticket is `next`.
    pub(crate) fn starting_at(next: u16) -> Self {
        Self { word: AtomicU32::new(u32::from(next) << 16 | u32::from(next)) }
    }
}

#[cfg(all(test, loom))]
impl TicketLock {
    pub(crate) fn lock(&self) -> Ticket {
        self.acquire()
    }

    pub(crate) fn try_lock(&self) -> Option<Ticket> {
        self.try_acquire()
    }

    pub(crate) fn unlock(&self, ticket: Ticket) {
        self.release(ticket);
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
