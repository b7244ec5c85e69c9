//! The in-flight log of a packed ring: the chains in flight, and the ring's position.
//!
//! ```text
//! features u64 | version u16, desc_num u16, free_head u16, old_free_head u16
//! used_idx u16, old_used_idx u16, used_wrap_counter u8, old_used_wrap_counter u8, padding 10 | per descriptor:
//! inflight u8, padding 1, next u16, last u16, num u16 | counter u64 | id u16, flags u16, len u32 | addr u64
//! ```
//!
//! - Entries are copies of descriptors, because used descriptors overwrite those that are still in flight. A
//!   chain takes one entry per descriptor, from the front of the free list; its head entry records the length
//!   and the last entry.
//! - A chain is in the log from the store of `old_free_head` on. Used chains return to the free list with
//!   their batch: the log gets the new values first, and the old ones are replaced when the ring shows the
//!   batch. A device that dies in between leaves both, and the ring tells which ones are valid.
//! - The chains of a batch return to the front of the free list, the last one first. Chains that are used in the
//!   order in which they were taken are still linked in that order, so no link needs a store.
//! - A position's slot and wrap counter share one word, stored at once. With two stores, a device that dies
//!   between them in the batch that ends a lap would leave a position in the wrong lap.
//!
//! Spec: vhost-user, "Inflight I/O tracking".

use std::sync::atomic::Ordering::Relaxed;

use guest_mem::SharedSlice;

use super::cursor::Cursor;
use super::ring::Meta;
use crate::log::{PACKED_WORDS, VERSION, release};
use crate::step::may_die_here;

pub(super) const LIST: usize = 1;
pub(super) const POSITION: usize = 2;
pub(super) const IN_FLIGHT: u64 = 1;

#[derive(Debug)]
pub(super) struct PackedLog {
    pub(super) words: SharedSlice<u64>,
    pub(super) entries: u16,
    /// Version and number of entries, as stored in the log.
    pub(super) kind: u64,
    /// Counter value of the next request.
    pub(super) counter: u64,
    /// For each entry, its first word without `inflight`.
    pub(super) links: Box<[Links]>,
    pub(super) free_head: u16,
    /// Number of free entries.
    pub(super) free: u16,
    /// Heads of used chains that are not visible yet.
    pub(super) batch: Box<[u16]>,
    pub(super) in_batch: u16,
    /// The chain being read: the entry for its next descriptor, the entry of the descriptor recorded last, and
    /// the number of descriptors so far.
    pub(super) at: u16,
    pub(super) noted_last: u16,
    pub(super) noted: u16,
    /// The position of the ring's next used descriptor.
    pub(super) used: Cursor,
}

/// An entry's first word without `inflight`. It holds the next entry in the chain or in the free list (which
/// ends with the value `entries`). In a head, it also holds the chain's last entry and the chain's length.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Links(u64);

#[allow(clippy::cast_possible_truncation)] // extracts fields
impl Links {
    /// Links of an entry that is not a head.
    #[inline]
    pub fn free(next: u16) -> Self {
        Self(u64::from(next) << 16)
    }

    #[inline]
    pub fn chain(next: u16, last: u16, num: u16) -> Self {
        Self(u64::from(next) << 16 | u64::from(last) << 32 | u64::from(num) << 48)
    }

    #[inline]
    pub fn next(self) -> u16 {
        (self.0 >> 16) as u16
    }

    #[inline]
    pub fn last(self) -> u16 {
        (self.0 >> 32) as u16
    }

    #[inline]
    pub fn num(self) -> u16 {
        (self.0 >> 48) as u16
    }

    /// The word to store; a head in flight also needs [`IN_FLIGHT`].
    #[inline]
    pub fn word(self) -> u64 {
        self.0
    }

    #[inline]
    fn with_next(self, next: u16) -> Self {
        Self::chain(next, self.last(), self.num())
    }
}

impl PackedLog {
    /// How many descriptors the next chain may have.
    #[inline]
    pub fn room(&self) -> u16 {
        self.free
    }

    /// Starts to record a chain.
    #[inline]
    pub fn begin(&mut self) {
        (self.at, self.noted) = (self.free_head, 0);
    }

    /// Records one descriptor of the chain. The caller has checked [`PackedLog::room`].
    #[inline]
    pub fn note(&mut self, addr: u64, meta: Meta) {
        let at = place(self.at);
        // The length comes first in the ring's word and last in the log's.
        self.words.store(at + 2, meta.word().rotate_left(32), Relaxed);
        self.words.store(at + 3, addr, Relaxed);
        may_die_here();
        (self.noted_last, self.at) = (self.at, self.links[usize::from(self.at)].next());
        self.noted += 1;
    }

    /// Marks the complete chain as taken, before any work on the request starts. Returns its head.
    #[inline]
    pub fn taken(&mut self) -> u16 {
        let head = self.free_head;
        let links = &mut self.links[usize::from(head)];
        *links = Links::chain(links.next(), self.noted_last, self.noted);
        self.words.store(place(head) + 1, self.counter, Relaxed);
        self.counter = self.counter.wrapping_add(1);
        release(&self.words, place(head), links.word() | IN_FLIGHT);
        self.free -= self.noted;
        self.free_head = self.at;
        self.store_list(self.free_head);
        head
    }

    /// Records and takes a chain of one descriptor (an indirect table's). The caller has checked
    /// [`PackedLog::room`].
    #[inline]
    pub fn take_one(&mut self, addr: u64, meta: Meta) -> u16 {
        let head = self.free_head;
        let links = &mut self.links[usize::from(head)];
        let next = links.next();
        *links = Links::chain(next, head, 1);
        let (words, at) = (&self.words, place(head));
        words.store(at + 3, addr, Relaxed);
        words.store(at + 2, meta.word().rotate_left(32), Relaxed);
        words.store(at + 1, self.counter, Relaxed);
        may_die_here();
        self.counter = self.counter.wrapping_add(1);
        release(words, at, links.word() | IN_FLIGHT);
        (self.free_head, self.free) = (next, self.free - 1);
        self.store_list(next);
        head
    }

    /// Removes the chain taken last, with head `head`: it is in the ring again.
    #[inline]
    pub fn given_back(&mut self, head: u16) {
        let links = self.links[usize::from(head)];
        self.free += links.num();
        self.counter = self.counter.wrapping_sub(1);
        self.free_head = head;
        self.store_list(head);
        release(&self.words, place(head), links.word());
    }

    /// Adds the chain with head `head` to the batch. Its used descriptor is not visible yet, and may not be stored in
    /// the ring yet.
    #[inline]
    pub fn used(&mut self, head: u16) {
        self.batch[usize::from(self.in_batch)] = head;
        self.in_batch += 1;
    }

    /// Records the batch, just before it becomes visible; after the batch, the ring's position is `used`.
    #[inline]
    pub fn about_to_publish(&mut self, used: Cursor) {
        let (old_free_head, old_used) = (self.free_head, self.used);
        for &head in self.batch[..usize::from(self.in_batch)].iter().rev() {
            let links = self.links[usize::from(head)];
            let last = links.last();
            let end = if last == head { links } else { self.links[usize::from(last)] };
            if end.next() != self.free_head {
                let end = end.with_next(self.free_head);
                self.links[usize::from(last)] = end;
                let in_flight = if last == head { IN_FLIGHT } else { 0 };
                release(&self.words, place(last), end.word() | in_flight);
            }
            self.free_head = head;
            self.free += links.num();
        }
        self.used = used;
        self.store_list(old_free_head);
        self.store_position(old_used);
    }

    /// Clears the batch, which is visible now.
    #[inline]
    pub fn published(&mut self) {
        for &head in &self.batch[..usize::from(std::mem::take(&mut self.in_batch))] {
            release(&self.words, place(head), self.links[usize::from(head)].word());
        }
        self.store_list(self.free_head);
        self.store_position(self.used);
    }

    #[inline]
    pub(super) fn store_list(&self, old_free_head: u16) {
        let word = self.kind | u64::from(self.free_head) << 32 | u64::from(old_free_head) << 48;
        release(&self.words, LIST, word);
    }

    #[inline]
    pub(super) fn store_position(&self, old_used: Cursor) {
        let word = u64::from(self.used.slot())
            | u64::from(old_used.slot()) << 16
            | u64::from(self.used.wrap_counter()) << 32
            | u64::from(old_used.wrap_counter()) << 40;
        release(&self.words, POSITION, word);
    }
}

/// The half of the word at [`LIST`] that never changes.
pub(super) fn kind(entries: u16) -> u64 {
    u64::from(VERSION) | u64::from(entries) << 16
}

/// Index of an entry's first word.
#[inline]
pub(super) fn place(entry: u16) -> usize {
    PACKED_WORDS.0 + PACKED_WORDS.1 * usize::from(entry)
}
