//! A fair reader/writer lock in eight bytes: a word that counts threads inside, and a queued lock to wait in.
//!
//! ```text
//! newcomer ── the word lets it in: one read-modify-write ─────────────────────────▶ inside
//!     └─ else: queue (first in, first out) ─▶ first in line ─ polls, then sleeps on the word ─▶ inside
//! ```
//!
//! - The thread that holds the queue's lock is *first in line*; only this thread waits for the word to change. A
//!   reader first in line is counted at once, so that no other writer gets in. It waits for the writer inside
//!   to leave, and releases the queue as soon as it is inside. A writer first in line sets `WAITING`, which
//!   sends newcomers to the queue, waits until the lock is empty, and keeps the queue until it unlocks: the
//!   next thread in line sleeps until then.
//! - No thread passes a thread that is first in line and running. Newcomers may enter while the next thread
//!   in line is being woken, which keeps the lock busy on a machine with too few cores; a fair unlock
//!   prevents this.
//! - A reader that may already be inside must not wait for a writer that waits for it to leave:
//!   [`QueueRwLock::read_recursive`] passes writers in line. A steady stream of such readers keeps writers
//!   out.
//! - Once another thread can have the lock, an unlock no longer touches the lock's memory. From then on it uses
//!   only the address, to wake a thread.
//! - A forked child can use neither the queue nor a lock that threads waited for at the fork.
//!
//! Why no wake is lost: one word holds everything that threads wait for and the flag that a thread sleeps. The
//! thread first in line sets `ASLEEP` with an exchange whose new value still makes that thread wait. An unlock
//! changes the same word. If the unlock comes first, the exchange fails and the waiter reads the word again; if
//! the unlock comes later, it sees the flag and wakes the waiter. Between the exchange and the sleep the kernel
//! compares the word once more.
//!
//! See also: the bits (`rwlock/counts.rs`), the queue (`queue.rs`), `lock_api` (`rwlock/raw.rs`).

mod counts;
#[cfg(not(all(test, loom)))]
mod raw;
#[cfg(all(feature = "lock_api_04", feature = "std", not(all(test, loom))))]
mod raw_04;
#[cfg(not(all(test, loom)))]
pub(crate) mod recursive;
#[cfg(all(test, feature = "std", not(loom)))]
mod tests;

pub use counts::MAX_READERS;

use core::sync::atomic::Ordering::{self, Acquire, Relaxed, Release};

use crate::atomic::AtomicU32;
use crate::{Deadline, Event, Platform, QueueLock};
use counts::{ASLEEP, FULL, QUEUED, READER, WAITING, WRITER, is_empty, lets_a_sleeper_in, readers};

/// Strictly in order: a thread that finds the lock idle enters on the fast path, without queueing.
#[cfg(not(all(test, loom)))]
type Line = crate::Fifo;
/// Like `Fifo`, but waiters sleep at once: polling would make the models too large.
#[cfg(all(test, loom))]
type Line = crate::model::SleepyFifo;

/// How often the thread first in line polls the word before it sleeps.
const LOOKS: u32 = if cfg!(loom) { 0 } else { 400 };
/// Sleep between two polls when the reader count is full. That many readers must be forgotten guards, and no thread
/// wakes the waiter when the count drops.
const FULL_SLEEP_NS: u64 = 1_000_000;
/// Number of polls between two readings of the clock.
const LOOKS_PER_READING: u32 = 64;

/// A fair reader/writer lock. Mostly used as `RwLock<T>`, which is `lock_api::RwLock<QRwLock, T>`.
pub struct QueueRwLock<S> {
    counts: AtomicU32,
    queue: QueueLock<Line, S>,
}

#[cfg(not(all(test, loom)))]
const _: () = assert!(size_of::<QueueRwLock<()>>() == 8, "a reader/writer lock is two words of four bytes");

/// The kind of access that a caller requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Access {
    Read,
    Write,
}

/// How long a caller waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Patience {
    None,
    Until(Deadline),
    Endless,
}

impl Patience {
    fn deadline(self) -> Option<Deadline> {
        match self {
            Self::Until(deadline) => Some(deadline),
            Self::None | Self::Endless => None,
        }
    }

    fn is_over<S: Platform>(self) -> bool {
        match self {
            Self::None => true,
            Self::Until(deadline) => S::is_past(deadline),
            Self::Endless => false,
        }
    }
}

impl<S> core::fmt::Debug for QueueRwLock<S> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let word = self.counts.load(Relaxed);
        f.debug_struct("QueueRwLock")
            .field("readers", &readers(word))
            .field("written", &(word & WRITER != 0))
            .field("writer_waits", &(word & WAITING != 0))
            .finish_non_exhaustive()
    }
}

#[cfg(not(all(test, loom)))]
impl<S> Default for QueueRwLock<S> {
    fn default() -> Self {
        Self::new()
    }
}

impl<S> QueueRwLock<S> {
    /// An unlocked lock.
    #[cfg(not(all(test, loom)))]
    #[must_use]
    pub const fn new() -> Self {
        Self { counts: AtomicU32::new(0), queue: QueueLock::new() }
    }

    /// An unlocked lock.
    #[cfg(all(test, loom))]
    pub(crate) fn new() -> Self {
        Self { counts: AtomicU32::new(0), queue: QueueLock::new() }
    }

    /// Whether a thread holds the lock; a snapshot.
    #[must_use]
    pub fn is_held(&self) -> bool {
        !is_empty(self.counts.load(Relaxed))
    }

    /// Whether a writer holds the lock; a snapshot.
    #[must_use]
    pub fn is_held_exclusively(&self) -> bool {
        self.counts.load(Relaxed) & WRITER != 0
    }
}

/// Readers.
impl<S: Platform> QueueRwLock<S> {
    /// Takes the lock together with other readers; waits without a time limit. The calling thread must not hold
    /// the lock already.
    #[inline]
    pub fn read(&self) {
        if !self.enter_unless(WRITER | WAITING) {
            self.wait_for(Access::Read, Patience::Endless);
        }
    }

    /// Takes the lock together with other readers, unless a writer holds it or it is reserved for a waiter.
    #[inline]
    #[must_use]
    pub fn try_read(&self) -> bool {
        self.enter_unless(WRITER | WAITING) || self.try_past_a_mark(Access::Read)
    }

    /// Takes the lock together with other readers unless the deadline passes first; returns false in that case.
    #[inline]
    #[must_use]
    pub fn read_before(&self, deadline: Deadline) -> bool {
        self.enter_unless(WRITER | WAITING) || self.wait_for(Access::Read, Patience::Until(deadline))
    }

    /// Like [`read`](Self::read), for a thread that may already hold the lock for reading. It waits for a writer
    /// that holds the lock (in that case this thread does not hold it), but not for writers in line.
    #[inline]
    pub fn read_recursive(&self) {
        if !self.enter_unless(WRITER) {
            self.wait_for(Access::Read, Patience::Endless);
        }
    }

    /// Takes the lock together with other readers if no writer holds it.
    #[inline]
    #[must_use]
    pub fn try_read_recursive(&self) -> bool {
        self.enter_unless(WRITER)
    }

    /// Like [`read_recursive`](Self::read_recursive), but returns false if the deadline passes first.
    #[inline]
    #[must_use]
    pub fn read_recursive_before(&self, deadline: Deadline) -> bool {
        self.enter_unless(WRITER) || self.wait_for(Access::Read, Patience::Until(deadline))
    }

    /// Counts the caller as a reader unless one of the flags in `barring` is set. Reads the word first, so that readers
    /// that cannot enter do not disturb a thread that waits for the count to become zero.
    #[inline]
    fn enter_unless(&self, barring: u32) -> bool {
        let seen = self.counts.load(Relaxed); // only a guess: the addition decides
        if seen & (barring | FULL) != 0 {
            return false;
        }
        (lets_a_sleeper_in(seen) && self.enter_before_a_sleeper(seen)) || self.count_unless(barring)
    }

    #[inline]
    fn count_unless(&self, barring: u32) -> bool {
        // Acquire pairs with the releases in `release_write` and `downgrade`. Not a compare-exchange loop:
        // readers do not make each other retry.
        if self.counts.fetch_add(READER, Acquire) & (barring | FULL) == 0 {
            return true;
        }
        self.uncount(Relaxed); // this reader was not inside and has read nothing
        false
    }

    /// Lets a recursive reader in while the writer first in line is still asleep although the lock is free, because
    /// its wake is on the way. Clears `ASLEEP`, so that this reader's unlock does not wake the writer a second time
    /// if the writer is not running by then.
    #[cold]
    fn enter_before_a_sleeper(&self, seen: u32) -> bool {
        // Acquire as in `count_unless`.
        self.counts.compare_exchange(seen, (seen & !ASLEEP) + READER, Acquire, Relaxed).is_ok()
    }

    /// Releases the access of one reader.
    ///
    /// # Safety
    /// The caller has access for reading: some thread acquired the access, and it has not been released since.
    ///
    /// # Panics
    /// With debug assertions, if no reader holds the lock. Without them such a call has no effect.
    #[inline]
    pub unsafe fn release_read(&self) {
        // Release pairs with the acquire of the writer that finds no reader left (`take`, `try_write`).
        self.uncount(Release);
    }

    /// Like [`release_read`](Self::release_read), but newcomers do not pass the threads in line.
    ///
    /// # Safety
    /// The contract of [`release_read`](Self::release_read) applies.
    pub unsafe fn release_read_fairly(&self) {
        self.mark_for_next();
        self.uncount(Release);
    }

    /// Lets in the threads that already wait, if there are any, and then takes the lock again.
    ///
    /// # Safety
    /// The contract of [`release_read`](Self::release_read) applies; afterwards the caller has access again.
    pub unsafe fn bump_read(&self) {
        if self.queue.is_held() {
            // SAFETY: the caller keeps this function's contract, which is that of the call.
            unsafe { self.release_read_fairly() };
            self.read();
        }
    }

    #[inline]
    fn uncount(&self, order: Ordering) {
        let before = self.counts.fetch_sub(READER, order);
        if before & ASLEEP != 0 || before < READER {
            self.uncounted(before);
        }
    }

    #[cold]
    fn uncounted(&self, before: u32) {
        if before < READER {
            return self.put_back();
        }
        // A sleeping reader that is first in line is counted itself, and waits for a writer, not for us.
        if lets_a_sleeper_in(before - READER) {
            S::note(Event::Kicked);
            S::wake_one(&self.counts);
        }
    }

    /// Undoes a count below zero. Meanwhile other threads saw a full lock: they waited, and none got in.
    fn put_back(&self) {
        let before = self.counts.fetch_add(READER, Relaxed);
        if lets_a_sleeper_in(before.wrapping_add(READER)) {
            S::wake_one(&self.counts); // the sleeper may have gone to sleep because of the wrong count
        }
        debug_assert!(
            false,
            "a reader unlocked a reader/writer lock that has 0 readers; at least 1 reader was expected"
        );
    }
}

/// Writers.
impl<S: Platform> QueueRwLock<S> {
    /// Takes the lock exclusively; waits without a time limit. The calling thread must not hold the lock already.
    #[inline]
    pub fn write(&self) {
        if !self.take_if_free() {
            self.wait_for(Access::Write, Patience::Endless);
        }
    }

    /// Takes the lock exclusively if it is free and is not reserved for a waiter.
    #[inline]
    #[must_use]
    pub fn try_write(&self) -> bool {
        self.take_if_free() || self.try_past_a_mark(Access::Write)
    }

    /// Takes the lock exclusively unless the deadline passes first; returns false in that case.
    #[inline]
    #[must_use]
    pub fn write_before(&self, deadline: Deadline) -> bool {
        self.take_if_free() || self.wait_for(Access::Write, Patience::Until(deadline))
    }

    #[inline]
    fn take_if_free(&self) -> bool {
        // Acquire pairs with the releases in `release_write` and `release_read`.
        self.counts.compare_exchange(0, WRITER, Acquire, Relaxed).is_ok()
    }

    /// Releases a writer's access.
    ///
    /// # Safety
    /// The caller has access for writing: some thread acquired the access, and it has not been released since.
    ///
    /// # Panics
    /// With debug assertions, if no writer holds the lock. Without them such a call has no effect.
    #[inline]
    pub unsafe fn release_write(&self) {
        // Release pairs with the acquires of the next reader or writer.
        if self.counts.compare_exchange(WRITER, 0, Release, Relaxed).is_err() {
            self.release_write_in_line(false);
        }
    }

    /// Like [`release_write`](Self::release_write), but newcomers do not pass the threads in line.
    ///
    /// # Safety
    /// The contract of [`release_write`](Self::release_write) applies.
    pub unsafe fn release_write_fairly(&self) {
        self.release_write_in_line(true);
    }

    #[cold]
    fn release_write_in_line(&self, fairly: bool) {
        if !self.has_writer_that_unlocks() {
            return;
        }
        self.leave_queue();
        if fairly {
            self.mark_for_next();
        }
        // Release as in `release_write`. This may wake a reader or a writer. The wake of a writer is in vain if a
        // reader that cannot enter is counted just now; when that reader uncounts itself, it wakes the writer
        // again.
        let before = self.counts.fetch_and(!(WRITER | QUEUED | ASLEEP), Release);
        if before & ASLEEP != 0 {
            S::note(Event::Kicked);
            S::wake_one(&self.counts);
        }
    }

    /// Lets in the threads that already wait, if there are any, and then takes the lock again.
    ///
    /// # Safety
    /// The contract of [`release_write`](Self::release_write) applies; afterwards the caller has access again.
    pub unsafe fn bump_write(&self) {
        let is_wanted = if self.is_queued() { self.queue.is_wanted() } else { self.queue.is_held() };
        if is_wanted {
            // SAFETY: the caller keeps this function's contract, which is that of the call.
            unsafe { self.release_write_fairly() };
            self.write();
        }
    }

    /// Turns a writer's access into a reader's: no other writer gets in between.
    ///
    /// # Safety
    /// The contract of [`release_write`](Self::release_write) applies; afterwards the caller has access for reading.
    ///
    /// # Panics
    /// With debug assertions, if no writer holds the lock. Without them such a call has no effect.
    pub unsafe fn downgrade(&self) {
        if !self.has_writer_that_unlocks() {
            return;
        }
        let is_queued = self.is_queued();
        let queued = if is_queued { QUEUED } else { 0 };
        // Release pairs with the acquires of readers, which see what we wrote.
        let before = self.counts.fetch_add(READER - WRITER - queued, Release);
        if before & ASLEEP != 0 {
            S::note(Event::Kicked);
            S::wake_one(&self.counts); // in vain if the sleeper is a writer
        }
        if is_queued {
            // SAFETY: `QUEUED` said that our acquisition of the queue has not been released, and no other
            // thread can release it now.
            unsafe { self.queue.release() };
        }
    }

    /// Releases the queue, if this writer came through it; the writer still has the lock.
    fn leave_queue(&self) {
        if self.is_queued() {
            // SAFETY: a writer inside with `QUEUED` holds the queue's lock, and only that writer's unlock, which
            // is this call, releases it.
            unsafe { self.queue.release() };
        }
    }

    /// Only for the writer inside: no other thread changes the answer.
    fn is_queued(&self) -> bool {
        self.counts.load(Relaxed) & QUEUED != 0
    }

    fn has_writer_that_unlocks(&self) -> bool {
        let has_writer = self.is_held_exclusively();
        debug_assert!(
            has_writer,
            "a writer unlocked a reader/writer lock that has 0 writers; 1 writer was expected"
        );
        has_writer
    }
}

/// Waiting in line.
impl<S: Platform> QueueRwLock<S> {
    /// Queues, then waits until the word lets the caller in. Returns false if the caller's patience ends first.
    #[cold]
    fn wait_for(&self, access: Access, patience: Patience) -> bool {
        if !self.come_forward(patience) {
            return false;
        }
        let entered = match access {
            Access::Read => self.read_first_in_line(patience),
            Access::Write => self.write_first_in_line(patience),
        };
        if access == Access::Read || !entered {
            // SAFETY: `come_forward` acquired the queue's lock for us; only a writer inside keeps it.
            unsafe { self.queue.release() };
        }
        entered
    }

    /// Becomes first in line: takes the queue's lock.
    fn come_forward(&self, patience: Patience) -> bool {
        match patience {
            Patience::None => self.queue.try_acquire(),
            Patience::Until(deadline) => self.queue.acquire_before(deadline),
            Patience::Endless => {
                self.queue.acquire();
                true
            }
        }
    }

    fn read_first_in_line(&self, patience: Patience) -> bool {
        if !self.count_first_in_line(patience) {
            return false;
        }
        let entered = self.wait_first_in_line(Access::Read, patience);
        if !entered {
            self.counts.fetch_sub(READER, Relaxed); // wakes no thread: only we wait for the word
        }
        self.forget_marks();
        entered
    }

    /// Counts us as a reader, so that no more writers enter.
    fn count_first_in_line(&self, patience: Patience) -> bool {
        while self.counts.fetch_add(READER, Relaxed) & FULL != 0 {
            self.counts.fetch_sub(READER, Relaxed);
            if patience.is_over::<S>() {
                return false;
            }
            S::sleep_ns(FULL_SLEEP_NS, patience.deadline());
        }
        true
    }

    fn write_first_in_line(&self, patience: Patience) -> bool {
        if self.look(Access::Write).is_ok() {
            return true;
        }
        if patience != Patience::None {
            self.counts.fetch_or(WAITING, Relaxed);
        }
        let entered = self.wait_first_in_line(Access::Write, patience);
        if !entered {
            self.forget_marks(); // releasing the queue lets the threads behind us come forward
        }
        entered
    }

    /// Polls for a while, then sleeps.
    fn wait_first_in_line(&self, access: Access, patience: Patience) -> bool {
        let mut looks = 0_u32;
        loop {
            let Err(seen) = self.look(access) else { return true };
            if looks > LOOKS {
                S::note(Event::WokenForNothing);
            }
            let reads_clock = looks >= LOOKS || looks.is_multiple_of(LOOKS_PER_READING);
            if reads_clock && patience.is_over::<S>() {
                S::note(Event::TimedOut);
                return false;
            }
            if looks < LOOKS {
                S::relax();
            } else {
                self.sleep_while(seen, patience.deadline());
            }
            looks = looks.saturating_add(1);
        }
    }

    /// Enters if the word allows it; otherwise returns the word.
    fn look(&self, access: Access) -> Result<(), u32> {
        match access {
            Access::Read => {
                // Acquire pairs with the release in `release_write`: this is the acquisition, and it is
                // final, because we are counted and no writer can have entered since.
                let seen = self.counts.load(Acquire);
                if seen & WRITER == 0 { Ok(()) } else { Err(seen) }
            }
            Access::Write => self.take(self.counts.load(Relaxed)),
        }
    }

    /// A writer first in line enters an empty lock, and keeps the queue. An error means that the lock was not
    /// empty. A failed exchange alone must not send the writer to sleep: the thread that changed the word may
    /// have left and woken it already.
    fn take(&self, mut seen: u32) -> Result<(), u32> {
        while is_empty(seen) {
            // Acquire pairs with the releases in `release_read` and `release_write`; it must be on the
            // exchange, because recursive readers may have been inside since the word was read.
            match self.counts.compare_exchange(seen, WRITER | QUEUED, Acquire, Relaxed) {
                Ok(_) => return Ok(()),
                Err(now) => seen = now,
            }
        }
        Err(seen)
    }

    /// See the file's head for why no wake is lost.
    fn sleep_while(&self, seen: u32, deadline: Option<Deadline>) {
        let asleep = seen | ASLEEP;
        if seen != asleep && self.counts.compare_exchange(seen, asleep, Relaxed, Relaxed).is_err() {
            return;
        }
        S::note(Event::Halted);
        S::wait(&self.counts, asleep, deadline);
    }

    /// Clears the marks that this thread set while first in line. Only this thread waits for the word, so no other
    /// sleeper is forgotten.
    fn forget_marks(&self) {
        if self.counts.load(Relaxed) & (WAITING | ASLEEP) != 0 {
            self.counts.fetch_and(!(WAITING | ASLEEP), Relaxed);
        }
    }

    /// For a fair unlock: sends newcomers to the queue if a thread is already there. If that thread leaves
    /// meanwhile, the mark stays, and the next thread that comes through the queue removes it. The caller holds
    /// the lock.
    fn mark_for_next(&self) {
        if self.queue.is_held() {
            self.counts.fetch_or(WAITING, Relaxed);
        }
    }

    /// Lets an attempt succeed although the lock is marked, if the mark has no thread behind it (see
    /// [`mark_for_next`](Self::mark_for_next)).
    #[inline]
    fn try_past_a_mark(&self, access: Access) -> bool {
        let is_marked = self.counts.load(Relaxed) & (WAITING | WRITER) == WAITING;
        is_marked && !self.queue.is_held() && self.wait_for(access, Patience::None)
    }
}
