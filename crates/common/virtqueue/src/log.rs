//! The in-flight log of vhost-user: a device's unfinished requests, in memory that outlives it.
//!
//! `pop → entry, then I/O … push_used → publish: batch noted → visible in the ring → entries cleared`
//!
//! The front-end keeps the memory and passes it to the device's successor. The successor redoes the requests
//! that the dead device took and did not publish, in the order in which it took them.
//!
//! - The ring halves write the log themselves, because the order of stores decides what a crash leaves behind at any
//!   instant.
//! - A hostile peer may write the log at any moment, so a queue keeps all of this state in private memory as
//!   well. A queue reads the log only when it starts: each word once, into a [`Snapshot`]. It checks the
//!   snapshot (no entry refers to anything outside the log or the ring, none appears twice) and uses only
//!   that; afterwards it only stores to the shared words.
//! - An entry's fields share 64-bit words, which are stored whole. A store that must not become visible
//!   before an earlier one is a release store: the reader is another process, which runs after this one's death.
//! - After the start, the log needs no lock, no system call and no allocation.
//!
//! Spec: vhost-user, "Inflight I/O tracking".

use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Release};

use guest_mem::{AccessError, GuestAddress, GuestMemory, SharedSlice};

use crate::step;

/// Header words of the log, and words per entry.
pub(crate) const SPLIT_WORDS: (usize, usize) = (2, 2);
pub(crate) const PACKED_WORDS: (usize, usize) = (4, 4);
/// Each queue's log starts at a multiple of this, as in other back-ends.
const ALIGN_BYTES: u64 = 64;
/// The only version; 0 means that nothing was written yet.
pub(crate) const VERSION: u16 = 1;

/// Why a log cannot be used. The queue must not start, because the requests in flight are unknown.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LogFault {
    /// The shared memory does not contain the whole log.
    #[error("in-flight log of queue {queue} lies outside the memory that the front-end passed for it")]
    Place {
        /** The queue's index. */
        queue: u16,
        /** The reason. */
        #[source]
        source: AccessError,
    },
    /// The log has feature flags of a later specification.
    #[error("in-flight log has feature flags {features:#x}; only 0 is supported")]
    Features {
        /** The log's feature flags. */
        features: u64,
    },
    /// The log has a later layout.
    #[error("in-flight log has version {version}; only {VERSION} is supported")]
    Version {
        /** The log's version. */
        version: u16,
    },
    /// The number of entries in the log's header is not the number that the front-end announced.
    #[error("in-flight log has {entries} entries, but the front-end announced {announced}")]
    Entries {
        /** The number of entries in the log's header. */
        entries: u16,
        /** The number of entries that the front-end announced. */
        announced: u16,
    },
    /// The ring can have more requests in flight than the log can hold.
    #[error("in-flight log has {entries} entries, but a queue of {queue_size} needs {queue_size}")]
    TooSmall {
        /** The number of entries that the front-end announced. */
        entries: u16,
        /** The queue size, in descriptors. */
        queue_size: u16,
    },
    /// A link leads out of the log.
    #[error("in-flight log refers to entry {entry}, but has only {entries} entries")]
    NoSuchEntry {
        /** The entry's index in the link. */
        entry: u16,
        /** Number of entries in the log. */
        entries: u16,
    },
    /// Two lists share an entry, or one list has no end.
    #[error("in-flight log links to entry {entry} twice")]
    EntryTwice {
        /** The entry's index. */
        entry: u16,
    },
    /// A chain's recorded length or last entry is wrong.
    #[error(
        "in-flight log has a chain of {num} descriptors that starts at entry {entry} but does not end at {last}"
    )]
    ChainEnd {
        /** The chain's head entry. */
        entry: u16,
        /** The chain's recorded number of descriptors. */
        num: u16,
        /** The chain's recorded last entry. */
        last: u16,
    },
    /// More descriptors are in flight than the ring holds.
    #[error("in-flight log has {descriptors} descriptors in flight, but the ring has {queue_size}")]
    TooMany {
        /** Number of descriptors of all chains. */
        descriptors: u16,
        /** The queue size, in descriptors. */
        queue_size: u16,
    },
    /// Some entries are neither free nor in flight.
    #[error("in-flight log has {entries} entries, but only {found} of them are free or in flight")]
    Lost {
        /** Number of entries that are free or in flight. */
        found: u16,
        /** Number of entries in the log. */
        entries: u16,
    },
    /// A buffer id is outside the ring, or occurs twice.
    #[error("buffer id {id} in the in-flight log occurs twice or is not below the queue size {queue_size}")]
    BufferId {
        /** The buffer id in the log. */
        id: u16,
        /** The queue size, in descriptors. */
        queue_size: u16,
    },
    /// The ring has no such slot.
    #[error(
        "in-flight log records slot {slot} as the ring's position, but the ring has only {queue_size} slots"
    )]
    Position {
        /** The slot in the log. */
        slot: u16,
        /** The queue size, in descriptors. */
        queue_size: u16,
    },
}

/// The location of one queue's log, in memory that only this process and the front-end share.
#[derive(Clone, Debug)]
pub struct LogArea {
    memory: Arc<GuestMemory>,
    queue: u16,
    entries: u16,
}

impl LogArea {
    /// `memory`: the shared memory with the logs of all queues, from address 0 on. `entries`: entries per
    /// log; at least the queue size.
    #[must_use]
    pub fn new(memory: Arc<GuestMemory>, queue: u16, entries: u16) -> Self {
        Self { memory, queue, entries }
    }

    /// Bytes needed for the logs of `queues` queues with `entries` entries each.
    #[must_use]
    pub fn bytes(queues: u16, entries: u16, packed: bool) -> u64 {
        u64::from(queues) * queue_bytes(entries, if packed { PACKED_WORDS } else { SPLIT_WORDS })
    }

    /// How many requests (or, in a packed ring, descriptors) the log can hold.
    #[must_use]
    pub fn entries(&self) -> u16 {
        self.entries
    }

    /// The memory that holds the log.
    #[must_use]
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// The log's words, for stores, and a snapshot of them. The snapshot is `None` if the log was never written.
    pub(crate) fn open(
        &self,
        queue_size: u16,
        (head, each): (usize, usize),
    ) -> Result<(SharedSlice<u64>, Option<Snapshot>), LogFault> {
        let entries = self.entries;
        if entries < queue_size {
            return Err(LogFault::TooSmall { entries, queue_size });
        }
        let addr = GuestAddress(u64::from(self.queue) * queue_bytes(entries, (head, each)));
        let words = self.memory.shared_slice(addr, head + each * usize::from(entries));
        let words = words.map_err(|source| LogFault::Place { queue: self.queue, source })?;
        let snapshot = Snapshot::read(&words);
        let is_written = self.check_head(&snapshot)?;
        Ok((words, is_written.then_some(snapshot)))
    }

    #[allow(clippy::cast_possible_truncation)] // extracts fields
    fn check_head(&self, snapshot: &Snapshot) -> Result<bool, LogFault> {
        let (head, features) = (snapshot.word(1), snapshot.word(0));
        let (version, entries, announced) = (head as u16, (head >> 16) as u16, self.entries);
        match (version, features) {
            (0, _) => Ok(false),
            (VERSION, 0) if entries == announced => Ok(true),
            (VERSION, 0) => Err(LogFault::Entries { entries, announced }),
            (VERSION, _) => Err(LogFault::Features { features }),
            _ => Err(LogFault::Version { version }),
        }
    }
}

fn queue_bytes(entries: u16, (head, each): (usize, usize)) -> u64 {
    (8 * (head + each * usize::from(entries)) as u64).next_multiple_of(ALIGN_BYTES)
}

/// A private copy of a log's words, as a queue found them; each word was read once.
///
/// The copy is as large as the log; the number of entries and the passed memory limit the log's size.
#[derive(Debug)]
pub(crate) struct Snapshot(Box<[u64]>);

impl Snapshot {
    fn read(words: &SharedSlice<u64>) -> Self {
        let read_once = |at| {
            // Acquire: pairs with the release stores of the previous device. That device has ended, so all of
            // its stores have been made.
            let word = words.load(at, Acquire);
            step::may_change_here();
            word
        };
        Self((0..words.len()).map(read_once).collect())
    }

    /// `at` must be inside the log; the caller has checked it.
    pub(crate) fn word(&self, at: usize) -> u64 {
        self.0[at]
    }

    /// Records a word that a starting queue has since stored in the log.
    pub(crate) fn set(&mut self, at: usize, word: u64) {
        self.0[at] = word;
    }
}

/// Stores a word, after all earlier stores. Pairs with the acquire of a successor that opens the log.
#[inline]
pub(crate) fn release(words: &SharedSlice<u64>, at: usize, word: u64) {
    words.store(at, word, Release);
    step::may_die_here();
}

/// The requests that a starting queue found in its log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recovery {
    /// Requests to redo.
    pub redone: u16,
    /// The log belongs to another ring: the front-end created a new ring and kept the old log. The queue
    /// overwrites the log.
    pub was_foreign: bool,
}
