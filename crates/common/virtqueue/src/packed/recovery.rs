//! Reads and checks a dead device's in-flight log: the ring's position, and the chains to redo.
//!
//! `log → the ring decides whether the last batch is valid → free list → chains in flight, in the order they
//! were taken`
//!
//! - The log may hold anything and change at any moment. It is read once, into a [`Snapshot`]; every link is
//!   checked, every entry is visited at most once, and every entry must be found.
//! - The stores back to the log preserve this information: whenever this device dies, its successor can recover it.
//!
//! Spec: vhost-user, "Inflight I/O tracking", "When reconnecting".

use std::sync::atomic::Ordering::{Acquire, Relaxed};

use guest_mem::SharedSlice;

use super::cursor::Cursor;
use super::log::{self, IN_FLIGHT, LIST, Links, POSITION, PackedLog, place};
use super::resume;
use super::ring::{Meta, Ring};
use crate::log::{LogArea, LogFault, PACKED_WORDS, Snapshot, release};
use crate::step::may_die_here;

/// A chain that was in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct RedoChain {
    pub id: u16,
    /// The chain's head entry in the log.
    pub head: u16,
    /// Index of the chain's first descriptor in [`RedoList::descriptors`].
    pub first: usize,
    pub count: u16,
}

/// The chains to redo.
#[derive(Debug, Default)]
pub(super) struct RedoList {
    pub chains: Vec<RedoChain>,
    pub descriptors: Vec<(u64, Meta)>,
    /// Index in `chains` of the next chain to redo.
    pub at: usize,
}

impl RedoList {
    #[allow(clippy::cast_possible_truncation)] // at most the queue size
    pub fn left(&self) -> u16 {
        (self.chains.len() - self.at) as u16
    }

    /// Total number of descriptors.
    pub fn descriptors(&self) -> u16 {
        self.chains.iter().map(|chain| chain.count).sum()
    }
}

/// The result of reading a log.
#[derive(Debug)]
pub(super) enum Recovered {
    /// The log with the ring's position, and the chains to redo.
    Both(Box<(PackedLog, RedoList)>),
    /// The log was never written, or it belongs to another ring. The queue overwrites it.
    Neither {
        /** The words of the log. */
        words: SharedSlice<u64>,
        was_foreign: bool,
    },
}

pub(super) fn recover(area: &LogArea, ring: &Ring, queue_size: u16) -> Result<Recovered, LogFault> {
    let (words, snapshot) = area.open(queue_size, PACKED_WORDS)?;
    let Some(found) = snapshot else { return Ok(Recovered::Neither { words, was_foreign: false }) };
    let kept = Kept::read(&found, ring, queue_size)?;
    if resume::belongs_to_previous_ring(ring, kept.used, queue_size) {
        return Ok(Recovered::Neither { words, was_foreign: true });
    }
    let both = Reader::new(words, found, area.entries(), kept).read(queue_size)?;
    Ok(Recovered::Both(both.into()))
}

/// Marks as unused the used descriptors of a batch that the dead device did not publish. Otherwise the driver would
/// see them as soon as this device stores a used descriptor at the first position of that batch. The chains that were
/// available in these slots are in the log.
pub(super) fn hide_unpublished(ring: &Ring, used: Cursor, descriptors: u16) {
    for at in (0..descriptors).map(|distance| used.forward(distance)) {
        let meta = ring.meta(at.slot(), Relaxed);
        if at.is_used(meta.flags()) {
            let unused = Meta::new(meta.len_bytes(), meta.id(), at.avail_flags());
            ring.set_meta(at.slot(), unused, Relaxed);
            may_die_here();
        }
    }
}

/// Overwrites the log with that of a ring with nothing in flight.
pub(super) fn write_anew(words: SharedSlice<u64>, entries: u16, used: Cursor) -> PackedLog {
    release(&words, LIST, 0); // not valid until everything is stored
    words.store(0, 0, Relaxed);
    let mut log = empty(words, entries, used);
    for entry in 0..entries {
        let links = Links::free(entry + 1);
        log.links[usize::from(entry)] = links;
        log.words.store(place(entry), links.word(), Relaxed);
    }
    log.free = entries;
    log.store_position(used);
    log.store_list(0);
    log
}

fn empty(words: SharedSlice<u64>, entries: u16, used: Cursor) -> PackedLog {
    let zeroes = || vec![0; usize::from(entries)].into();
    PackedLog {
        words,
        entries,
        kind: log::kind(entries),
        counter: 0,
        links: vec![Links::default(); usize::from(entries)].into(),
        free_head: 0,
        free: 0,
        batch: zeroes(),
        in_batch: 0,
        at: 0,
        noted_last: 0,
        noted: 0,
        used,
    }
}

/// The valid free list and position: the values from before or after the last batch.
#[derive(Clone, Copy, Debug)]
struct Kept {
    free_head: u16,
    used: Cursor,
}

impl Kept {
    #[allow(clippy::cast_possible_truncation)] // extracts fields
    fn read(found: &Snapshot, ring: &Ring, queue_size: u16) -> Result<Self, LogFault> {
        let (list, position) = (found.word(LIST), found.word(POSITION));
        let cursor = |slot: u16, wrap: u64| {
            let wrap_bit = if wrap & 0xff == 0 { 0 } else { 1 << 15 };
            let known = Cursor::from_bits(slot | wrap_bit, queue_size).filter(|_| slot < queue_size);
            known.ok_or(LogFault::Position { slot, queue_size })
        };
        let new = Self { free_head: (list >> 32) as u16, used: cursor(position as u16, position >> 32)? };
        let old =
            Self { free_head: (list >> 48) as u16, used: cursor((position >> 16) as u16, position >> 40)? };
        // Compares slot and wrap counter: a batch of a whole lap ends in the slot where it began.
        if new.used == old.used {
            return Ok(old);
        }
        // Acquire: pairs with the release that made the batch visible, which follows the log's new values.
        let flags = ring.meta(old.used.slot(), Acquire).flags();
        Ok(if old.used.is_available(flags) { old } else { new })
    }
}

/// Walks a log's lists.
struct Reader {
    log: PackedLog,
    found: Snapshot,
    /// For each entry, whether it was visited.
    seen: Vec<bool>,
    /// Number of entries visited.
    seen_entries: u16,
}

impl Reader {
    fn new(words: SharedSlice<u64>, found: Snapshot, entries: u16, kept: Kept) -> Self {
        let mut log = empty(words, entries, kept.used);
        log.free_head = kept.free_head;
        Self { log, found, seen: vec![false; usize::from(entries)], seen_entries: 0 }
    }

    fn read(mut self, queue_size: u16) -> Result<(PackedLog, RedoList), LogFault> {
        self.read_free_list()?;
        let redo = self.read_chains(queue_size)?;
        let (found, entries) = (self.seen_entries, self.log.entries);
        if found != entries {
            return Err(LogFault::Lost { found, entries });
        }
        let log = self.log;
        log.store_list(log.free_head);
        log.store_position(log.used);
        let mut entry = log.free_head;
        while entry < entries {
            let links = log.links[usize::from(entry)];
            release(&log.words, place(entry), links.word());
            entry = links.next();
        }
        Ok((log, redo))
    }

    fn visit(&mut self, entry: u16) -> Result<(), LogFault> {
        let entries = self.log.entries;
        let seen = self.seen.get_mut(usize::from(entry)).ok_or(LogFault::NoSuchEntry { entry, entries })?;
        if std::mem::replace(seen, true) {
            return Err(LogFault::EntryTwice { entry });
        }
        self.seen_entries += 1;
        Ok(())
    }

    #[allow(clippy::cast_possible_truncation)] // extracts fields
    fn link(&mut self, entry: u16) -> u16 {
        let next = (self.found.word(place(entry)) >> 16) as u16;
        self.log.links[usize::from(entry)] = Links::free(next);
        next
    }

    fn read_free_list(&mut self) -> Result<(), LogFault> {
        let mut entry = self.log.free_head;
        while entry != self.log.entries {
            self.visit(entry)?;
            entry = self.link(entry);
        }
        self.log.free = self.seen_entries;
        Ok(())
    }

    fn read_chains(&mut self, queue_size: u16) -> Result<RedoList, LogFault> {
        let found = &self.found;
        let is_head =
            |&entry: &u16| !self.seen[usize::from(entry)] && found.word(place(entry)) & 0xff == IN_FLIGHT;
        let counted = (0..self.log.entries).filter(is_head);
        let mut heads: Vec<_> = counted.map(|head| (found.word(place(head) + 1), head)).collect();
        heads.sort_unstable();
        self.log.counter = heads.last().map_or(0, |&(counter, _)| counter.wrapping_add(1));
        let (mut redo, mut has_id) = (RedoList::default(), vec![false; usize::from(queue_size)]);
        for (_, head) in heads {
            let chain = self.read_chain(head, &mut redo.descriptors)?;
            let id = chain.id;
            let known = has_id.get_mut(usize::from(id)).is_some_and(|known| !std::mem::replace(known, true));
            if !known {
                return Err(LogFault::BufferId { id, queue_size });
            }
            redo.chains.push(chain);
        }
        let descriptors = redo.descriptors();
        if descriptors > queue_size { Err(LogFault::TooMany { descriptors, queue_size }) } else { Ok(redo) }
    }

    #[allow(clippy::cast_possible_truncation)] // extracts fields
    fn read_chain(&mut self, head: u16, descriptors: &mut Vec<(u64, Meta)>) -> Result<RedoChain, LogFault> {
        let word = self.found.word(place(head));
        let (last, num, first) = ((word >> 32) as u16, (word >> 48) as u16, descriptors.len());
        let (mut entry, mut ends_at, mut id) = (head, None, 0);
        for _ in 0..num {
            self.visit(entry)?;
            let meta = Meta::from_word(self.found.word(place(entry) + 2).rotate_right(32));
            descriptors.push((self.found.word(place(entry) + 3), meta));
            (ends_at, id) = (Some(entry), meta.id());
            entry = self.link(entry);
        }
        if ends_at != Some(last) {
            return Err(LogFault::ChainEnd { entry: head, num, last });
        }
        let links = &mut self.log.links[usize::from(head)];
        *links = Links::chain(links.next(), last, num);
        Ok(RedoChain { id, head, first, count: num })
    }
}
