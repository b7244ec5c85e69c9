//! Detects whether threads wait for each other.
//!
//! `me ─wants─▶ lock ─held by─▶ thread ─wants─▶ lock … ─held by─▶ me`
//!
//! A thread waits for one lock and a lock has one holder, so the walk never branches. The cycle is a deadlock
//! if all its records existed at the same time: each holder releases only after its own wait ends, so none of
//! the waits ends.
//!
//! See also: the records (`holders.rs`).

use core::fmt;
use core::ptr;

use super::holders::{Holder, Record, Word, who_holds};

/// The longest cycle that the search finds, in threads.
pub const MAX_CYCLE: usize = 64;

/// One thread waits for a lock that another thread holds.
#[derive(Debug, Clone, Copy)]
struct Wait {
    waiter: &'static Holder,
    wanted: Seen,
    held: Seen,
}

/// A record and the value that was read from it.
#[derive(Debug, Clone, Copy)]
struct Seen {
    record: &'static Record,
    word: Word,
}

impl Seen {
    fn now(record: &'static Record) -> Self {
        Self { record, word: record.word() }
    }

    fn is_unchanged(&self) -> bool {
        self.record.word() == self.word
    }
}

/// A deadlock, starting with the thread that found it. Displays as one line.
#[derive(Debug)]
pub(super) struct Cycle {
    waits: [Option<Wait>; MAX_CYCLE],
}

impl Cycle {
    fn waits(&self) -> impl Iterator<Item = &Wait> {
        self.waits.iter().flatten()
    }
}

/// Finds a cycle that contains `me`, which is waiting. Returns it only if `me` is the cycle's first thread in the
/// table, so that only one of the threads reports the cycle.
pub(super) fn find(me: &'static Holder) -> Option<Cycle> {
    let cycle = walk(me)?;
    // The second read of each record; the walk made the first.
    let is_stable = cycle.waits().all(|wait| wait.wanted.is_unchanged() && wait.held.is_unchanged());
    let is_first = cycle.waits().all(|wait| ptr::from_ref(me) <= ptr::from_ref(wait.waiter));
    (is_stable && is_first).then_some(cycle)
}

fn walk(me: &'static Holder) -> Option<Cycle> {
    let mut cycle = Cycle { waits: [None; MAX_CYCLE] };
    let mut waiter = me;
    for place in &mut cycle.waits {
        let wanted = Seen::now(&waiter.wanted);
        let lock = wanted.word.lock()?;
        let (holder, record) = who_holds(lock)?;
        let held = Seen::now(record);
        if held.word.lock() != Some(lock) {
            return None; // released just now
        }
        *place = Some(Wait { waiter, wanted, held });
        if ptr::eq(holder, me) {
            return Some(cycle);
        }
        waiter = holder;
    }
    None // too long, or a cycle of other threads, which they will report
}

impl fmt::Display for Cycle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = self.waits().count();
        write!(f, "deadlock: {count} threads wait for each other: this one")?;
        for (number, Wait { wanted, held, .. }) in self.waits().enumerate() {
            let (addr, asked, taken) = (wanted.record.addr(), wanted.record.site(), held.record.site());
            let holder = if number + 1 == count { "this one" } else { "a thread that" };
            write!(f, " waits at {asked} for lock {addr:#x}, taken at {taken} by {holder}")?;
        }
        Ok(())
    }
}
