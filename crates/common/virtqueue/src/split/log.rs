//! The in-flight log of a split ring.
//!
//! ```text
//! features u64 | version u16, desc_num u16, last_batch_head u16, used_idx u16 | per descriptor:
//! inflight u8, padding 5, next u16 | counter u64
//! ```
//!
//! - One entry per head. `next` links the heads used in the last batch. If a device dies after the batch
//!   became visible and before it cleared the entries, its successor clears them. The difference between the
//!   log's `used_idx` and the ring's is the size of the batch.
//! - A request without an entry was never taken: its head is still in the available ring, after the heads in
//!   flight.
//!
//! Spec: vhost-user, "Inflight I/O tracking".

use std::sync::atomic::Ordering::Relaxed;

use guest_mem::SharedSlice;

use crate::log::{LogArea, LogFault, SPLIT_WORDS, Snapshot, VERSION, release};
use crate::step::may_die_here;

const HEAD: usize = 1;
const IN_FLIGHT: u64 = 1;
/// `inflight` is a byte.
const IN_FLIGHT_MASK: u64 = 0xff;

#[derive(Debug)]
pub(super) struct SplitLog {
    words: SharedSlice<u64>,
    entries: u16,
    /// Counter value of the next request.
    counter: u64,
    last_taken: u16,
    /// For each head, the head used before it.
    next: Box<[u16]>,
    /// The head used last.
    last_used: u16,
    /// How many used heads are not visible yet.
    batch: u16,
    /// The ring's `used.idx` as recorded in the log.
    used_idx: u16,
}

/// The log of a starting queue, and the heads to redo.
#[derive(Debug)]
pub(super) struct Opened {
    pub log: SplitLog,
    /// Heads, in the order in which they were taken.
    pub redo: Vec<u16>,
    pub was_foreign: bool,
}

impl SplitLog {
    /// `used_idx`: the ring's current value.
    pub fn open(area: &LogArea, queue_size: u16, used_idx: u16) -> Result<Opened, LogFault> {
        let (words, snapshot) = area.open(queue_size, SPLIT_WORDS)?;
        let is_written = snapshot.is_some();
        let next = vec![0; usize::from(area.entries())].into();
        let (entries, last_used) = (area.entries(), 0);
        let mut log = Self { words, entries, counter: 0, last_taken: 0, next, last_used, batch: 0, used_idx };
        // `None`: never written, or the log of another ring.
        let redo = match snapshot {
            Some(mut found) => {
                log.finish_batch(&mut found, queue_size)?.then(|| log.in_flight(&found, queue_size))
            }
            None => None,
        };
        if redo.is_none() {
            (0..entries).for_each(|entry| log.set(entry, 0));
        }
        if !is_written {
            log.words.store(0, 0, Relaxed);
        }
        log.store_head();
        let was_foreign = is_written && redo.is_none();
        Ok(Opened { log, redo: redo.unwrap_or_default(), was_foreign })
    }

    /// Clears entries of requests that became visible but were not cleared. Returns `false` if the log
    /// belongs to another ring.
    #[allow(clippy::cast_possible_truncation)] // extracts fields
    fn finish_batch(&mut self, found: &mut Snapshot, queue_size: u16) -> Result<bool, LogFault> {
        let head = found.word(HEAD);
        let (last_used, logged_idx) = ((head >> 32) as u16, (head >> 48) as u16);
        let batch = self.used_idx.wrapping_sub(logged_idx);
        if batch > queue_size || (queue_size..self.entries).any(|entry| is_in_flight(found, entry)) {
            return Ok(false);
        }
        let mut entry = last_used;
        for _ in 0..batch {
            if entry >= self.entries {
                return Err(LogFault::NoSuchEntry { entry, entries: self.entries });
            }
            if entry >= queue_size {
                return Ok(false); // the log belongs to a longer ring
            }
            let before = (found.word(place(entry)) >> 48) as u16;
            let cleared = u64::from(before) << 48; // keeps the link: if this device dies here, its successor needs it
            found.set(place(entry), cleared);
            self.set(entry, cleared);
            entry = before;
        }
        self.last_used = last_used;
        Ok(true)
    }

    /// Heads in flight, in the order of their counters; also sets the next counter.
    fn in_flight(&mut self, found: &Snapshot, queue_size: u16) -> Vec<u16> {
        let counted = (0..queue_size).filter(|&entry| is_in_flight(found, entry));
        let mut found: Vec<_> = counted.map(|entry| (found.word(place(entry) + 1), entry)).collect();
        found.sort_unstable();
        self.counter = found.last().map_or(0, |&(counter, _)| counter.wrapping_add(1));
        found.into_iter().map(|(_, entry)| entry).collect()
    }

    /// Records a taken request, before any work on it starts.
    #[inline]
    pub fn taken(&mut self, head: u16) {
        self.words.store(place(head) + 1, self.counter, Relaxed);
        may_die_here();
        self.counter = self.counter.wrapping_add(1);
        self.last_taken = head;
        self.set(head, IN_FLIGHT);
    }

    /// Removes the request taken last: it is in the available ring again.
    #[inline]
    pub fn given_back(&mut self) {
        self.counter = self.counter.wrapping_sub(1);
        self.set(self.last_taken, 0);
    }

    /// Records that a used entry is stored but not visible yet.
    #[inline]
    pub fn used(&mut self, head: u16) {
        let before = std::mem::replace(&mut self.last_used, head);
        self.next[usize::from(head)] = before;
        self.batch += 1;
        self.set(head, IN_FLIGHT | u64::from(before) << 48);
    }

    /// Records the batch, just before it becomes visible.
    #[inline]
    pub fn about_to_publish(&self) {
        self.store_head();
    }

    /// Clears the batch, which is now visible; the ring's index is `used_idx`.
    #[inline]
    pub fn published(&mut self, used_idx: u16) {
        let mut entry = self.last_used;
        // Bounded by the count: a driver that offers a head again too early turns this list into a loop.
        for _ in 0..std::mem::take(&mut self.batch) {
            let before = self.next[usize::from(entry)];
            // The list stays whole: if this device dies here, its successor clears it from the start.
            self.set(entry, u64::from(before) << 48);
            entry = before;
        }
        self.used_idx = used_idx;
        self.store_head();
    }

    #[inline]
    fn set(&self, entry: u16, word: u64) {
        release(&self.words, place(entry), word);
    }

    #[inline]
    fn store_head(&self) {
        let head = u64::from(VERSION)
            | u64::from(self.entries) << 16
            | u64::from(self.last_used) << 32
            | u64::from(self.used_idx) << 48;
        release(&self.words, HEAD, head);
    }
}

fn is_in_flight(found: &Snapshot, entry: u16) -> bool {
    found.word(place(entry)) & IN_FLIGHT_MASK != 0
}

/// Index of an entry's first word.
#[inline]
fn place(entry: u16) -> usize {
    SPLIT_WORDS.0 + SPLIT_WORDS.1 * usize::from(entry)
}
