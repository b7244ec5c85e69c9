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
    /// Of the next request.
    pub(super) counter: u64,
    /// By entry: the one behind it, in its chain or in the list of free ones; `entries` ends that.
    pub(super) next: Box<[u16]>,
    /// By head: the last entry of its chain, and how many it has.
    pub(super) last: Box<[u16]>,
    pub(super) num: Box<[u16]>,
    /// By buffer id: the chain's head.
    pub(super) heads: Box<[u16]>,
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
        (self.noted_last, self.at) = (self.at, self.next[usize::from(self.at)]);
        self.noted += 1;
    }

    /// It is whole, and taken: before anything is done for the request.
    #[inline]
    pub fn taken(&mut self, id: u16) {
        let head = self.free_head;
        self.heads[usize::from(id)] = head;
        (self.last[usize::from(head)], self.num[usize::from(head)]) = (self.noted_last, self.noted);
        self.words.store(place(head) + 1, self.counter, Relaxed);
        self.counter = self.counter.wrapping_add(1);
        self.store_head_of_chain(head, IN_FLIGHT);
        self.free -= self.noted;
        self.free_head = self.at;
        self.store_list(self.free_head);
    }

    /// The chain taken last is in the ring again.
    #[inline]
    pub fn given_back(&mut self, id: u16) {
        let head = self.heads[usize::from(id)];
        self.free += self.num[usize::from(head)];
        self.counter = self.counter.wrapping_sub(1);
        self.free_head = head;
        self.store_list(head);
        self.store_head_of_chain(head, 0);
    }

    /// Its used descriptor is stored, or held back: not visible.
    #[inline]
    pub fn used(&mut self, id: u16) {
        self.batch[usize::from(self.in_batch)] = self.heads[usize::from(id)];
        self.in_batch += 1;
    }

    /// The batch is about to become visible; the ring is at `used` then.
    #[inline]
    pub fn about_to_publish(&mut self, used: Cursor) {
        let (old_free_head, old_used) = (self.free_head, self.used);
        for at in 0..self.in_batch {
            let head = self.batch[usize::from(at)];
            let last = self.last[usize::from(head)];
            self.next[usize::from(last)] = self.free_head;
            if last == head {
                self.store_head_of_chain(head, IN_FLIGHT);
            } else {
                release(&self.words, place(last), u64::from(self.free_head) << 16);
            }
            self.free_head = head;
            self.free += self.num[usize::from(head)];
        }
        self.used = used;
        self.store_list(old_free_head);
        self.store_position(old_used);
    }

    /// It is.
    #[inline]
    pub fn published(&mut self) {
        for at in 0..std::mem::take(&mut self.in_batch) {
            self.store_head_of_chain(self.batch[usize::from(at)], 0);
        }
        self.store_list(self.free_head);
        self.store_position(self.used);
    }

    #[inline]
    fn store_head_of_chain(&self, head: u16, in_flight: u64) {
        let at = usize::from(head);
        let word = in_flight
            | u64::from(self.next[at]) << 16
            | u64::from(self.last[at]) << 32
            | u64::from(self.num[at]) << 48;
        release(&self.words, place(head), word);
    }

    #[inline]
    pub(super) fn store_list(&self, old_free_head: u16) {
        let word = u64::from(VERSION)
            | u64::from(self.entries) << 16
            | u64::from(self.free_head) << 32
            | u64::from(old_free_head) << 48;
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

/// Of the first of an entry's words.
#[inline]
pub(super) fn place(entry: u16) -> usize {
    PACKED_WORDS.0 + PACKED_WORDS.1 * usize::from(entry)
}
