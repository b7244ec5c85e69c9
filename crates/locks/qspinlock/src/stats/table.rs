//! Per-thread count tables, with a row for every source line that takes locks.
//!
//! ```text
//! TABLES[thread number] ─ rows: hashed by the caller's `Location`, claimed at first use, kept forever
//!                       ├ other: lines beyond the last row
//!                       └ unattributed: events outside of any `Profiled` operation
//! ```
//!
//! - Each table has one writer, so counting is a load and a store; readers see each count whole.
//! - An event goes to the row of the thread's current operation (`CURRENT`), which `Profiled` sets.
//! - A row begins with the cache line that every acquisition touches; the counts of slow paths follow.
//!
//! See also: merging rows (`profile.rs`), when to count what (`profiled.rs`).

use core::cell::Cell;
use core::panic::Location;
use core::ptr;
use core::sync::atomic::{
    AtomicPtr, AtomicU64, AtomicUsize,
    Ordering::{AcqRel, Acquire, Relaxed},
};
use core::time::Duration;
use std::time::Instant;

use super::mode::Recording;
use crate::Event;
use crate::thread_number::{self, MAX_THREADS};

/// How many source locations one thread counts separately, including those of ended threads whose table it took
/// over. Further locations share one row.
pub const SITES: usize = 1 << SITES_LOG2;
const SITES_LOG2: u32 = if cfg!(miri) { 4 } else { 7 };
/// Kinds of events.
pub(super) const KINDS: usize = Event::NoNode as usize + 1;

static TABLES: [Table; MAX_THREADS] = [const { Table::new() }; MAX_THREADS];
/// For threads without a number: they overwrite each other's counts.
static CROWD: Table = Table::new();
/// Number of tables that were ever used; they are the first ones.
static USED: AtomicUsize = AtomicUsize::new(0);
/// Threads that have counted in `CROWD`.
static CROWDED: AtomicUsize = AtomicUsize::new(0);

std::thread_local! {
    /// This thread's table, once it has one.
    static MINE: Cell<Option<&'static Table>> = const { Cell::new(None) };
    /// The row of this thread's current operation, in its own table.
    static CURRENT: Cell<Option<&'static Row>> = const { Cell::new(None) };
}

/// A count that one thread changes and any thread reads.
#[derive(Debug)]
pub(super) struct Counter(AtomicU64);

impl Counter {
    const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    pub(super) fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }

    /// Only the table's thread may call it. Relaxed: a count orders nothing.
    #[inline]
    pub(super) fn add(&self, n: u64) {
        self.set(self.0.load(Relaxed).wrapping_add(n));
    }

    #[inline]
    fn set(&self, n: u64) {
        self.0.store(n, Relaxed);
    }
}

/// One thread's counts for one line.
#[derive(Debug)]
#[repr(C, align(64))]
pub(super) struct Row {
    /// Null while the row is free, and for the rows without a line.
    site: AtomicPtr<Location<'static>>,
    pub(super) acquired: Counter,
    /// Number of acquisitions until the next timed one.
    until_timed: Counter,
    pub(super) contended: Counter,
    pub(super) refused: Counter,
    pub(super) timed: Counter,
    pub(super) waited_ns: Counter,
    pub(super) held_ns: Counter,
    /// Indexed by [`Event`].
    pub(super) events: [Counter; KINDS],
}

impl Row {
    const fn new() -> Self {
        Self {
            site: AtomicPtr::new(ptr::null_mut()),
            acquired: Counter::new(),
            until_timed: Counter::new(),
            contended: Counter::new(),
            refused: Counter::new(),
            timed: Counter::new(),
            waited_ns: Counter::new(),
            held_ns: Counter::new(),
            events: [const { Counter::new() }; KINDS],
        }
    }

    /// The row's line; `None` if the row has none.
    pub(super) fn site(&self) -> Option<&'static Location<'static>> {
        // SAFETY: it is null, or was stored by `claim` from a reference to a caller's location, which is static.
        unsafe { self.site.load(Relaxed).as_ref() }
    }

    #[inline]
    fn is_of(&self, site: &'static Location<'static>) -> bool {
        ptr::eq(self.site.load(Relaxed), site) || (cfg!(miri) && self.site() == Some(site))
    }

    /// Claims the row for `site`; returns whether it belongs to `site` now. Uses an exchange, because a signal
    /// handler may claim the row first.
    fn claim(&self, site: &'static Location<'static>) -> bool {
        let location = ptr::from_ref(site).cast_mut();
        match self.site.compare_exchange(ptr::null_mut(), location, Relaxed, Relaxed) {
            Ok(_) => true,
            Err(other) => ptr::eq(other, site),
        }
    }

    /// Counts an acquisition; returns whether to time it.
    #[inline]
    pub(super) fn count_acquisition(&self, recording: Recording) -> bool {
        self.acquired.add(1);
        recording.stride().is_some_and(|stride| self.is_turn(stride))
    }

    /// Whether to time this acquisition: true for one in `stride`, beginning with the first.
    #[inline]
    fn is_turn(&self, stride: u32) -> bool {
        // If the stride was longer before, the longer count must not delay the next timed acquisition.
        let left = self.until_timed.get().min(u64::from(stride));
        let turn = left <= 1;
        self.until_timed.set(if turn { u64::from(stride) } else { left - 1 });
        turn
    }

    pub(super) fn add_wait(&self, wait: Duration) {
        self.timed.add(1);
        self.waited_ns.add(nanoseconds(wait));
    }

    pub(super) fn add_hold(&self, since: Instant, until: Instant) {
        self.held_ns.add(nanoseconds(until.saturating_duration_since(since)));
    }

    fn note(&self, event: Event) {
        if let Some(counter) = self.events.get(event as usize) {
            counter.add(1);
        }
    }

    pub(super) fn time_outs(&self) -> u64 {
        self.events.get(Event::TimedOut as usize).map_or(0, Counter::get)
    }

    pub(super) fn set_time_outs(&self, n: u64) {
        if let Some(counter) = self.events.get(Event::TimedOut as usize) {
            counter.set(n);
        }
    }
}

fn nanoseconds(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}

/// One thread's counts.
#[derive(Debug)]
#[repr(C, align(64))]
pub(super) struct Table {
    pub(super) rows: [Row; SITES],
    pub(super) other: Row,
    pub(super) unattributed: Row,
}

impl Table {
    const fn new() -> Self {
        Self { rows: [const { Row::new() }; SITES], other: Row::new(), unattributed: Row::new() }
    }

    /// The row for a line, usually the one that its address hashes to.
    #[inline]
    pub(super) fn row(&'static self, site: &'static Location<'static>) -> &'static Row {
        let start = hash(site);
        match self.rows.get(start) {
            Some(row) if row.is_of(site) => row,
            _ => self.find_or_claim(start, site),
        }
    }

    #[inline(never)]
    fn find_or_claim(&'static self, start: usize, site: &'static Location<'static>) -> &'static Row {
        let (before, from) = self.rows.split_at(start);
        let mut rows = from.iter().chain(before);
        rows.find(|row| row.is_of(site) || row.claim(site)).unwrap_or(&self.other)
    }

    /// This table's row for the same line as `row`, which may be in another table.
    #[inline]
    fn own(&'static self, row: &'static Row) -> &'static Row {
        let table = ptr::from_ref(self).addr();
        if ptr::from_ref(row).addr().wrapping_sub(table) < size_of::<Self>() {
            return row;
        }
        row.site().map_or(&self.other, |site| self.row(site))
    }
}

/// Fibonacci hashing: locations are neighbours in read-only data. (Under Miri each call creates a new
/// location.)
#[inline]
fn hash(site: &'static Location<'static>) -> usize {
    let addr = if cfg!(miri) { 0 } else { ptr::from_ref(site).addr() as u64 };
    let hash = addr.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> (u64::BITS - SITES_LOG2);
    usize::try_from(hash).unwrap_or(0)
}

/// The calling thread's table.
#[inline]
pub(super) fn mine() -> &'static Table {
    match MINE.get() {
        Some(table) => table,
        None => register(),
    }
}

/// Registers a thread on its first use.
#[cold]
#[inline(never)]
fn register() -> &'static Table {
    let own = thread_number::claim().and_then(|number| Some((number, TABLES.get(number)?)));
    let table = match own {
        Some((number, table)) => {
            // Release pairs with the acquire in `used`.
            USED.fetch_max(number + 1, AcqRel);
            table
        }
        None => {
            CROWDED.fetch_add(1, Relaxed);
            &CROWD
        }
    };
    MINE.set(Some(table));
    table
}

/// All tables that have counts.
pub(super) fn used() -> impl Iterator<Item = &'static Table> {
    let used = USED.load(Acquire);
    TABLES.iter().take(used).chain(core::iter::once(&CROWD))
}

/// How many threads so far had to share one table.
pub(super) fn crowded() -> usize {
    CROWDED.load(Relaxed)
}

/// Receives the platform's events.
#[inline]
pub(crate) fn note(event: Event) {
    if !Recording::now().is_off() {
        CURRENT.get().unwrap_or_else(|| &mine().unattributed).note(event);
    }
}

/// While this value lives, this thread's events belong to one row. May be nested (signal handlers).
#[derive(Debug)]
pub(super) struct Attribution {
    before: Option<&'static Row>,
}

impl Attribution {
    /// `row` is one of this thread's rows.
    #[inline]
    pub(super) fn to_own(row: &'static Row) -> Self {
        Self { before: CURRENT.replace(Some(row)) }
    }

    /// `row` may be another thread's (if the guard was sent); this thread's row for the same line is used then.
    #[inline]
    pub(super) fn to_same_line(row: &'static Row) -> (Self, &'static Row) {
        let row = mine().own(row);
        (Self::to_own(row), row)
    }
}

impl Drop for Attribution {
    #[inline]
    fn drop(&mut self) {
        CURRENT.set(self.before);
    }
}
