//! Whether threads wait for each other.
//!
//! `me ─wants─▶ lock ─held by─▶ thread ─wants─▶ lock … ─held by─▶ me`
//!
//! A thread waits for one lock and a lock has one holder, so there is one way to go. It is a deadlock if all records on
//! the way were there at the same time: each holder then lets go only after its own wait, and none of them ends.
//!
//! Not here: the records (`holders.rs`).

use core::fmt;
use core::ptr;

use super::holders::{Holder, Record, Word, who_holds};

/// Threads of the longest cycle that is looked for.
pub const MAX_CYCLE: usize = 64;

/// One thread waits for what another holds.
#[derive(Debug, Clone, Copy)]
struct Wait {
    waiter: &'static Holder,
    wanted: Seen,
    held: Seen,
}

/// A record, and what it was.
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

/// A deadlock, from the one who found it on. Displayed as one line.
#[derive(Debug)]
pub(super) struct Cycle {
    waits: [Option<Wait>; MAX_CYCLE],
}

impl Cycle {
    fn waits(&self) -> impl Iterator<Item = &Wait> {
        self.waits.iter().flatten()
    }
}

/// A cycle that `me`, which waits, is part of, and the first of in the table: of several that find it, one reports.
pub(super) fn find(me: &'static Holder) -> Option<Cycle> {
    let cycle = walk(me)?;
    // The second look; the first was the walk.
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
            return None; // let go just now
        }
        *place = Some(Wait { waiter, wanted, held });
        if ptr::eq(holder, me) {
            return Some(cycle);
        }
        waiter = holder;
    }
    None // too long, or a cycle of others, which they will report
}

impl fmt::Display for Cycle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = self.waits().count();
        write!(f, "{count} threads wait for each other: this one")?;
        for (number, Wait { wanted, held, .. }) in self.waits().enumerate() {
            let (addr, asked, taken) = (wanted.record.addr(), wanted.record.site(), held.record.site());
            let holder = if number + 1 == count { "this one" } else { "one which" };
            write!(f, " asks at {asked} for lock {addr:#x}, taken at {taken} by {holder}")?;
        }
        Ok(())
    }
}
