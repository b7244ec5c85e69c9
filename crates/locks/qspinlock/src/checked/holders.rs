//! Records which locks each thread holds and waits for. All threads can read the records.
//!
//! ```text
//! HOLDERS[thread number] ─ held: up to MAX_HELD records
//!                        └ wanted: one                      record: lock's number | how often it was changed
//! ```
//!
//! - A record is one word, so it is never torn. If two reads return the same word, the record did not change in between
//!   (unless it changed exactly 2^32 times). Address and location are for reports only.
//! - A record is made after its lock is acquired and removed before the lock is released.
//!
//! See also: who waits for whom (`cycle.rs`).

use core::cell::Cell;
use core::panic::Location;
use core::ptr;
use core::sync::atomic::{
    AtomicPtr, AtomicU64, AtomicUsize,
    Ordering::{AcqRel, Acquire, Relaxed, SeqCst},
};

use crate::thread_number::{self, MAX_THREADS};

/// How many locks held by one thread are checked: as many as the kernel's resilient spinlock tracks.
pub const MAX_HELD: usize = 31;

static HOLDERS: [Holder; MAX_THREADS] = [const { Holder::new() }; MAX_THREADS];
/// Number of tables that were ever used; they are the first ones in the array.
static USED: AtomicUsize = AtomicUsize::new(0);

std::thread_local! {
    /// Set once this thread has a table.
    static MINE: Cell<Option<Me>> = const { Cell::new(None) };
}

/// The calling thread.
#[derive(Debug, Clone, Copy)]
pub(super) struct Me {
    pub(super) table: &'static Holder,
    /// Unique to this thread, unlike its table, which may have belonged to another thread before.
    serial: u64,
}

/// A lock's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LockId(u32);

impl LockId {
    pub(super) fn new(number: u32) -> Option<Self> {
        (number != 0).then_some(Self(number))
    }
}

/// A record's value: the lock's number, or 0 for none, in the upper half; the count of changes in the lower.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Word(u64);

impl Word {
    pub(super) fn lock(self) -> Option<LockId> {
        u32::try_from(self.0 >> 32).ok().and_then(LockId::new)
    }

    fn next(self, lock: Option<LockId>) -> Self {
        let number = lock.map_or(0, |lock| lock.0);
        let changes = (self.0 & u64::from(u32::MAX)).wrapping_add(1) & u64::from(u32::MAX);
        Self(u64::from(number) << 32 | changes)
    }
}

/// A record that a lock is held, or wanted.
#[derive(Debug)]
pub(super) struct Record {
    word: AtomicU64,
    addr: AtomicUsize,
    site: AtomicPtr<Location<'static>>,
}

impl Record {
    const fn new() -> Self {
        Self { word: AtomicU64::new(0), addr: AtomicUsize::new(0), site: AtomicPtr::new(ptr::null_mut()) }
    }

    /// Loads the word. Every access to these words is sequentially consistent, so reads of several records have one
    /// order: a word that is the same in the first and the last read had that value at some moment in between.
    pub(super) fn word(&self) -> Word {
        Word(self.word.load(SeqCst))
    }

    /// Changes the word from `from` to its successor for `lock`; returns the new word if the word was `from`.
    fn change(&self, from: Word, lock: Option<LockId>) -> Option<Word> {
        let to = from.next(lock);
        self.word.compare_exchange(from.0, to.0, SeqCst, SeqCst).is_ok().then_some(to)
    }

    fn describe(&self, addr: usize, site: &'static Location<'static>) {
        // Relaxed: read only for a report, which first reads words that change after these stores.
        self.addr.store(addr, Relaxed);
        self.site.store(ptr::from_ref(site).cast_mut(), Relaxed);
    }

    pub(super) fn addr(&self) -> usize {
        self.addr.load(Relaxed)
    }

    pub(super) fn site(&self) -> &'static Location<'static> {
        // SAFETY: it is null, or was stored by `describe` from a reference to a caller's location, which is static.
        let site = unsafe { self.site.load(Relaxed).as_ref() };
        site.unwrap_or_else(|| Location::caller())
    }
}

/// One thread's table.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Holder {
    pub(super) wanted: Record,
    held: [Record; MAX_HELD],
}

/// An acquisition's record.
#[derive(Debug)]
pub(super) struct Taken {
    record: &'static Record,
    word: Word,
    /// The thread's serial number.
    serial: u64,
}

impl Taken {
    /// Whether the calling thread made this acquisition.
    pub(super) fn is_by_this_thread(&self) -> bool {
        MINE.get().is_some_and(|me| me.serial == self.serial)
    }

    pub(super) fn is_of(&self, lock: LockId) -> bool {
        self.word.lock() == Some(lock)
    }

    pub(super) fn site(&self) -> &'static Location<'static> {
        self.record.site()
    }

    /// Removes the record. Returns false if it was removed before, or if another thread has taken over an ended
    /// thread's table.
    pub(super) fn take_out(&self) -> bool {
        self.record.change(self.word, None).is_some()
    }
}

/// The lock that a thread waits for.
#[derive(Debug)]
pub(super) struct Wanted {
    record: &'static Record,
    /// The lock that the interrupted code waits for, if this code runs in a signal handler.
    before: (Option<LockId>, usize, &'static Location<'static>),
}

impl Holder {
    const fn new() -> Self {
        Self { wanted: Record::new(), held: [const { Record::new() }; MAX_HELD] }
    }

    /// The record of a held lock.
    pub(super) fn find(&'static self, lock: LockId) -> Option<&'static Record> {
        self.held.iter().find(|record| record.word().lock() == Some(lock))
    }
}

impl Me {
    /// Records an acquisition; `None` if there is no room. Uses an exchange, because a signal handler may claim
    /// the record first.
    pub(super) fn take(self, lock: LockId, addr: usize, site: &'static Location<'static>) -> Option<Taken> {
        let claim = |record: &'static Record| {
            let free = record.word();
            let word = if free.lock().is_none() { record.change(free, Some(lock)) } else { None };
            word.map(|word| Taken { record, word, serial: self.serial })
        };
        let taken = self.table.held.iter().find_map(claim)?;
        taken.record.describe(addr, site);
        Some(taken)
    }

    pub(super) fn want(self, lock: LockId, addr: usize, site: &'static Location<'static>) -> Wanted {
        let record = &self.table.wanted;
        let before = (record.word().lock(), record.addr(), record.site());
        record.describe(addr, site);
        // Only this thread changes the record, and signal handlers restore what they find: this cannot fail.
        record.change(record.word(), Some(lock));
        Wanted { record, before }
    }
}

impl Drop for Wanted {
    fn drop(&mut self) {
        let (lock, addr, site) = self.before;
        self.record.describe(addr, site);
        self.record.change(self.record.word(), lock);
    }
}

/// The calling thread; `None` if too many threads are alive.
pub(super) fn me() -> Option<Me> {
    MINE.get().or_else(register)
}

#[cold]
fn register() -> Option<Me> {
    static NEXT_SERIAL: AtomicU64 = AtomicU64::new(1);
    let number = thread_number::claim()?;
    let table = HOLDERS.get(number)?;
    // Removes the records of locks that an ended thread never unlocked, because their guards were forgotten.
    for record in table.held.iter().filter(|record| record.word().lock().is_some()) {
        record.change(record.word(), None);
    }
    // Release pairs with the acquire in `who_holds`.
    USED.fetch_max(number + 1, AcqRel);
    let me = Me { table, serial: NEXT_SERIAL.fetch_add(1, Relaxed) };
    MINE.set(Some(me));
    Some(me)
}

/// The thread whose record says that it holds the lock, and that record.
pub(super) fn who_holds(lock: LockId) -> Option<(&'static Holder, &'static Record)> {
    let used = USED.load(Acquire);
    HOLDERS.iter().take(used).find_map(|holder| holder.find(lock).map(|record| (holder, record)))
}
