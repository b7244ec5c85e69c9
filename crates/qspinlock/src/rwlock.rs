//! A fair lock for readers and writers in eight bytes: a word that counts who is inside, and a queued lock to wait in.
//!
//! ```text
//! newcomer ── word free for it: one read-modify-write ────────────────────────────▶ inside
//!     └─ else: queue (first in, first out) ─▶ first in line ─ looks, then sleeps on the word ─▶ inside
//! ```
//!
//! - Who holds the queue's lock is *first in line*, and the only one that waits for the word to change. A reader first
//!   in line is counted at once, so that no other writer gets in, waits for the writer inside to leave, and lets the
//!   next one come forward as soon as it is inside. A writer sets `WAITING`, which sends newcomers to the queue,
//!   waits until nobody is inside, and keeps the queue until it unlocks: whoever stands next sleeps on till then.
//! - Nobody passes who is first in line and runs. Newcomers may enter while the next one in line is being woken, which
//!   is what keeps the lock busy on a machine with too few cores; not after an unlock that is asked to be fair.
//! - A reader that may be inside already must not wait for a writer that waits for it: [`QueueRwLock::read_recursive`]
//!   passes writers in line. A stream of such readers keeps writers out for as long as it lasts.
//! - An unlock touches the lock's memory no more once another thread can have it. After that it only wakes by address.
//! - The queue, and with it a lock that somebody waited for at a fork, is of no use in the child.
//!
//! Why no wake-up is lost: everything that is waited for, and the flag that says that somebody sleeps, is in one word.
//! First in line sets `ASLEEP` by an exchange with a value under which it must wait. An unlock is a change of the same
//! word: if it comes before, the exchange fails and first in line looks again; if it comes after, it sees the flag and
//! wakes. Between the exchange and the sleep the system compares the word once more.
//!
//! Not here: the bits (`rwlock/counts.rs`), the queue (`queue.rs`), `lock_api` (`rwlock/raw.rs`).

mod counts;
#[cfg(not(all(test, loom)))]
mod raw;
#[cfg(all(feature = "lock_api_04", feature = "std", not(all(test, loom))))]
mod raw_04;
#[cfg(not(all(test, loom)))]
mod recursive;
#[cfg(all(test, feature = "std", not(loom)))]
mod tests;

pub use counts::MAX_READERS;
#[cfg(not(all(test, loom)))]
pub use recursive::RecursiveQueueRwLock;

use core::sync::atomic::Ordering::{self, Acquire, Relaxed, Release};

use crate::atomic::AtomicU32;
use crate::{Deadline, Event, Platform, QueueLock};
use counts::{ASLEEP, FULL, QUEUED, READER, WAITING, WRITER, is_empty, lets_a_sleeper_in, readers};

/// Strictly in order: who finds the lock idle enters on the fast path, without a place in line.
#[cfg(not(all(test, loom)))]
type Line = crate::Fifo;
/// The same without looks, which models cannot afford.
#[cfg(all(test, loom))]
type Line = crate::model::SleepyFifo;

/// Looks at the word before who is first in line sleeps.
const LOOKS: u32 = if cfg!(loom) { 0 } else { 400 };
/// So many readers are guards that were forgotten, and nobody wakes us when they become fewer.
const FULL_SLEEP_NS: u64 = 1_000_000;
/// Looks between two readings of the clock.
const LOOKS_PER_READING: u32 = 64;

/// See the file's head. Mostly used as `RwLock<T>`, which is `lock_api::RwLock<QRwLock, T>`.
pub struct QueueRwLock<S> {
    counts: AtomicU32,
    queue: QueueLock<Line, S>,
}

#[cfg(not(all(test, loom)))]
const _: () = assert!(size_of::<QueueRwLock<()>>() == 8, "a reader/writer lock is two words of four bytes");

/// What is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Access {
    Read,
    Write,
}

/// How long it is waited for.
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
    /// A lock that nobody holds.
    #[cfg(not(all(test, loom)))]
    #[must_use]
    pub const fn new() -> Self {
        Self { counts: AtomicU32::new(0), queue: QueueLock::new() }
    }

    /// A lock that nobody holds.
    #[cfg(all(test, loom))]
    pub(crate) fn new() -> Self {
        Self { counts: AtomicU32::new(0), queue: QueueLock::new() }
    }

    /// Whether somebody holds it: a snapshot.
    #[must_use]
    pub fn is_held(&self) -> bool {
        !is_empty(self.counts.load(Relaxed))
    }

    /// Whether a writer holds it: a snapshot.
    #[must_use]
    pub fn is_held_exclusively(&self) -> bool {
        self.counts.load(Relaxed) & WRITER != 0
    }
}

/// Readers.
impl<S: Platform> QueueRwLock<S> {
    /// Takes the lock together with other readers, however long it takes. Not for a thread that holds it.
    #[inline]
    pub fn read(&self) {
        if !self.enter_unless(WRITER | WAITING) {
            self.wait_for(Access::Read, Patience::Endless);
        }
    }

    /// Takes the lock together with other readers if no writer holds it or is to have it first.
    #[inline]
    #[must_use]
    pub fn try_read(&self) -> bool {
        self.enter_unless(WRITER | WAITING) || self.try_past_a_mark(Access::Read)
    }

    /// Takes the lock together with other readers unless the deadline passes first; false if it did.
    #[inline]
    #[must_use]
    pub fn read_before(&self, deadline: Deadline) -> bool {
        self.enter_unless(WRITER | WAITING) || self.wait_for(Access::Read, Patience::Until(deadline))
    }

    /// As [`read`](Self::read), for a thread that may have the lock for reading already: it waits for the writer that
    /// holds the lock (then this thread does not), but for none that stands in line.
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

    /// As [`read_recursive`](Self::read_recursive), unless the deadline passes first; false if it did.
    #[inline]
    #[must_use]
    pub fn read_recursive_before(&self, deadline: Deadline) -> bool {
        self.enter_unless(WRITER) || self.wait_for(Access::Read, Patience::Until(deadline))
    }

    /// Counts the caller as a reader unless one of the flags `barring` is set. A look first, so that those who come in
    /// vain do not disturb those who wait for the count to become zero.
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
        // Acquire pairs with the releases in `release_write` and `downgrade`. Not a loop: readers do not make each
        // other try again.
        if self.counts.fetch_add(READER, Acquire) & (barring | FULL) == 0 {
            return true;
        }
        self.uncount(Relaxed); // a reader that was not inside, and has read nothing
        false
    }

    /// A recursive reader, and a writer in line that has been told that the lock is free. Its wake is on the way,
    /// so the flag is done with: our unlock is not to wake it a second time if it is still not running by then.
    #[cold]
    fn enter_before_a_sleeper(&self, seen: u32) -> bool {
        // Acquire as in `count_unless`.
        self.counts.compare_exchange(seen, (seen & !ASLEEP) + READER, Acquire, Relaxed).is_ok()
    }

    /// Gives up one reader's access.
    ///
    /// # Safety
    /// The caller has access for reading: it was acquired, by whichever thread, and has not been released since.
    ///
    /// # Panics
    /// With debug assertions, if no reader holds the lock. Without them such a call has no effect.
    #[inline]
    pub unsafe fn release_read(&self) {
        // Release pairs with the acquire of the writer that finds no reader left (`take`, `try_write`).
        self.uncount(Release);
    }

    /// As [`release_read`](Self::release_read), and no newcomer passes those that stand in line.
    ///
    /// # Safety
    /// As for [`release_read`](Self::release_read).
    pub unsafe fn release_read_fairly(&self) {
        self.mark_for_next();
        self.uncount(Release);
    }

    /// Lets those in who wait already, if there are any, and then takes the lock again.
    ///
    /// # Safety
    /// As for [`release_read`](Self::release_read); afterwards the caller has access again.
    pub unsafe fn bump_read(&self) {
        if self.queue.is_held() {
            // SAFETY: the caller's promise is the same.
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
        // A reader that sleeps first in line is counted itself, and waits for a writer, not for us.
        if lets_a_sleeper_in(before - READER) {
            S::note(Event::Kicked);
            S::wake_one(&self.counts);
        }
    }

    /// The count went below zero, which showed others a lock full of readers: they waited, nobody was let in.
    fn put_back(&self) {
        let before = self.counts.fetch_add(READER, Relaxed);
        if lets_a_sleeper_in(before.wrapping_add(READER)) {
            S::wake_one(&self.counts); // it may have gone to sleep because of what it saw
        }
        debug_assert!(
            false,
            "a reader/writer lock is unlocked by a reader, and has 0 readers, at least 1 expected"
        );
    }
}

/// Writers.
impl<S: Platform> QueueRwLock<S> {
    /// Takes the lock alone, however long it takes. Not for a thread that holds it.
    #[inline]
    pub fn write(&self) {
        if !self.take_if_free() {
            self.wait_for(Access::Write, Patience::Endless);
        }
    }

    /// Takes the lock alone if nobody holds it or is to have it first.
    #[inline]
    #[must_use]
    pub fn try_write(&self) -> bool {
        self.take_if_free() || self.try_past_a_mark(Access::Write)
    }

    /// Takes the lock alone unless the deadline passes first; false if it did.
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

    /// Gives up a writer's access.
    ///
    /// # Safety
    /// The caller has access for writing: it was acquired, by whichever thread, and has not been released since.
    ///
    /// # Panics
    /// With debug assertions, if no writer holds the lock. Without them such a call has no effect.
    #[inline]
    pub unsafe fn release_write(&self) {
        // Release pairs with the acquires of whoever comes next.
        if self.counts.compare_exchange(WRITER, 0, Release, Relaxed).is_err() {
            self.release_write_in_line(false);
        }
    }

    /// As [`release_write`](Self::release_write), and no newcomer passes those that stand in line.
    ///
    /// # Safety
    /// As for [`release_write`](Self::release_write).
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
        // Release as in `release_write`. A reader may be woken by it or a writer; the latter in vain, if a reader
        // came in vain at this very moment: then that one wakes the writer again.
        let before = self.counts.fetch_and(!(WRITER | QUEUED | ASLEEP), Release);
        if before & ASLEEP != 0 {
            S::note(Event::Kicked);
            S::wake_one(&self.counts);
        }
    }

    /// Lets those in who wait already, if there are any, and then takes the lock again.
    ///
    /// # Safety
    /// As for [`release_write`](Self::release_write); afterwards the caller has access again.
    pub unsafe fn bump_write(&self) {
        let is_wanted = if self.is_queued() { self.queue.is_wanted() } else { self.queue.is_held() };
        if is_wanted {
            // SAFETY: the caller's promise is the same.
            unsafe { self.release_write_fairly() };
            self.write();
        }
    }

    /// Makes a writer's access a reader's: no other writer gets in between.
    ///
    /// # Safety
    /// As for [`release_write`](Self::release_write); afterwards the caller has access for reading.
    ///
    /// # Panics
    /// With debug assertions, if no writer holds the lock. Without them such a call has no effect.
    pub unsafe fn downgrade(&self) {
        if !self.has_writer_that_unlocks() {
            return;
        }
        let is_queued = self.is_queued();
        let queued = if is_queued { QUEUED } else { 0 };
        // Release pairs with the acquires of readers, who see what we wrote.
        let before = self.counts.fetch_add(READER - WRITER - queued, Release);
        if before & ASLEEP != 0 {
            S::note(Event::Kicked);
            S::wake_one(&self.counts); // in vain if it is a writer
        }
        if is_queued {
            // SAFETY: `QUEUED` said that our acquisition of the queue has not been released, and nobody can do so now.
            unsafe { self.queue.release() };
        }
    }

    /// A writer that came through the queue leaves it, while the lock is still its own.
    fn leave_queue(&self) {
        if self.is_queued() {
            // SAFETY: a writer inside with `QUEUED` has the queue, and only its unlock, which this is, releases it.
            unsafe { self.queue.release() };
        }
    }

    /// Only for a writer inside: nobody changes the answer.
    fn is_queued(&self) -> bool {
        self.counts.load(Relaxed) & QUEUED != 0
    }

    fn has_writer_that_unlocks(&self) -> bool {
        let has_writer = self.is_held_exclusively();
        debug_assert!(
            has_writer,
            "a reader/writer lock is unlocked by a writer, and has 0 writers, 1 expected"
        );
        has_writer
    }
}

/// The line.
impl<S: Platform> QueueRwLock<S> {
    /// Stands in line, then waits until the word allows to enter. False if patience ended.
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

    /// The way into the queue.
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
            self.counts.fetch_sub(READER, Relaxed); // nobody to wake: only we wait for the word
        }
        self.forget_marks();
        entered
    }

    /// Adds us to the readers, so that no writer enters any more.
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
            self.forget_marks(); // whom it held up comes forward by our leaving the queue
        }
        entered
    }

    /// Looks for a while, then sleeps.
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

    /// Enters if the word allows it; else says what the word was.
    fn look(&self, access: Access) -> Result<(), u32> {
        match access {
            Access::Read => {
                // Acquire pairs with the release in `release_write`: this is the acquisition, and final, because we
                // are counted and no writer can have come after.
                let seen = self.counts.load(Acquire);
                if seen & WRITER == 0 { Ok(()) } else { Err(seen) }
            }
            Access::Write => self.take(self.counts.load(Relaxed)),
        }
    }

    /// A writer first in line enters an empty lock, and keeps its place. If it does not, the lock was not empty: it
    /// must not sleep because an exchange failed, whoever was in the way may be gone and have woken it already.
    fn take(&self, mut seen: u32) -> Result<(), u32> {
        while is_empty(seen) {
            // Acquire pairs with the releases in `release_read` and `release_write`; it must be on the exchange,
            // because recursive readers may have been inside since the look.
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

    /// Leaves no trace of us as first in line. Nobody else waits for the word, so no sleeper is forgotten.
    fn forget_marks(&self) {
        if self.counts.load(Relaxed) & (WAITING | ASLEEP) != 0 {
            self.counts.fetch_and(!(WAITING | ASLEEP), Relaxed);
        }
    }

    /// For a fair unlock: sends newcomers to the queue if somebody is there already. If it has left it meanwhile, the
    /// mark stays behind, and the next one who comes through the queue removes it. The caller is inside.
    fn mark_for_next(&self) {
        if self.queue.is_held() {
            self.counts.fetch_or(WAITING, Relaxed);
        }
    }

    /// What trying does about a mark that nobody is behind (see [`mark_for_next`](Self::mark_for_next)).
    #[inline]
    fn try_past_a_mark(&self, access: Access) -> bool {
        let is_marked = self.counts.load(Relaxed) & (WAITING | WRITER) == WAITING;
        is_marked && !self.queue.is_held() && self.wait_for(access, Patience::None)
    }
}
