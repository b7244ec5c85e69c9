//! The in-flight log of a packed ring: what is in flight, and where the ring stands.
//!
//! ```text
//! features u64 | version u16, desc_num u16, free_head u16, old_free_head u16
//! used_idx u16, old_used_idx u16, used_wrap_counter u8, old_used_wrap_counter u8, padding 10 | per descriptor:
//! inflight u8, padding 1, next u16, last u16, num u16 | counter u64 | id u16, flags u16, len u32 | addr u64
//! ```
//!
//! - Entries are copies of descriptors: used ones overwrite those that are still in flight. A chain takes as many entries as
//!   it has descriptors, from the front of the list of free ones; its head has the length and the last.
//! - A chain is in the log from the store of `old_free_head` on. What is used goes back to the free list with its batch:
//!   new values first, the old ones when the ring shows the batch. Whoever dies in between has left both, and the
//!   ring tells which ones hold.
//! - Chains go back to the list in front of each other, the one used last first: those that are used in the order in which
//!   they were taken find their links as they are, and nothing is stored.
//! - A position's slot and wrap counter are one word, stored at once: in two steps, one batch per lap would not be told
//!   from the lap before.
//!
//! Spec: vhost-user, "Inflight I/O tracking". Not here: when what happens (`packed/device.rs`), what a successor makes of
//! it (`recovery.rs`).

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
    /// Version and number of entries, as they are stored.
    pub(super) kind: u64,
    /// Of the next request.
    pub(super) counter: u64,
    /// By entry: its first word but for `inflight`.
    pub(super) links: Box<[Links]>,
    pub(super) free_head: u16,
    /// How many there are.
    pub(super) free: u16,
    /// Heads of what is used and not visible yet.
    pub(super) batch: Box<[u16]>,
    pub(super) in_batch: u16,
    /// The chain that is being read: where its next descriptor goes, where its last one went, how many it has.
    pub(super) at: u16,
    pub(super) noted_last: u16,
    pub(super) noted: u16,
    /// Where the ring's next used descriptor goes.
    pub(super) used: Cursor,
}

/// An entry's first word but for `inflight`: the entry behind it, in its chain or in the list of free ones, which
/// `entries` ends; of a head, the last entry of its chain, and how many it has.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Links(u64);

#[allow(clippy::cast_possible_truncation)] // takes the fields apart
impl Links {
    /// Of an entry that is no head.
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

    /// As it is stored; with [`IN_FLIGHT`] for a head.
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

    /// A chain is read from the ring.
    #[inline]
    pub fn begin(&mut self) {
        (self.at, self.noted) = (self.free_head, 0);
    }

    /// One of its descriptors. There is [`PackedLog::room`].
    #[inline]
    pub fn note(&mut self, addr: u64, meta: Meta) {
        let at = place(self.at);
        // The ring has the length first, the log has it last.
        self.words.store(at + 2, meta.word().rotate_left(32), Relaxed);
        self.words.store(at + 3, addr, Relaxed);
        may_die_here();
        (self.noted_last, self.at) = (self.at, self.links[usize::from(self.at)].next());
        self.noted += 1;
    }

    /// It is whole, and taken: before anything is done for the request. Returns its head.
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

    /// A chain of one descriptor (an indirect table's) is taken: all of the above. There is [`PackedLog::room`].
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

    /// The chain taken last, from `head` on, is in the ring again.
    #[inline]
    pub fn given_back(&mut self, head: u16) {
        let links = self.links[usize::from(head)];
        self.free += links.num();
        self.counter = self.counter.wrapping_sub(1);
        self.free_head = head;
        self.store_list(head);
        release(&self.words, place(head), links.word());
    }

    /// The used descriptor of the chain from `head` on is stored, or held back: not visible.
    #[inline]
    pub fn used(&mut self, head: u16) {
        self.batch[usize::from(self.in_batch)] = head;
        self.in_batch += 1;
    }

    /// The batch is about to become visible; the ring is at `used` then.
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

    /// It is.
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

/// The half of [`LIST`] that never changes.
pub(super) fn kind(entries: u16) -> u64 {
    u64::from(VERSION) | u64::from(entries) << 16
}

/// Of the first of an entry's words.
#[inline]
pub(super) fn place(entry: u16) -> usize {
    PACKED_WORDS.0 + PACKED_WORDS.1 * usize::from(entry)
}
