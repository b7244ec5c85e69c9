//! The in-flight log of vhost-user: what a device had begun, in memory that outlives it.
//!
//! `pop → entry, then I/O … push_used → publish: batch noted → visible in the ring → entries cleared`
//!
//! The front-end keeps the memory and gives it to the device's successor, who does again what was begun and is not
//! visible in the ring, in the order in which it was taken from there.
//!
//! - Kept by the halves themselves: what is noted in which order decides what a crash at any instant leaves behind.
//! - Kept *for* a peer that may write it, at any moment: everything is kept in private, too. Only a queue that starts reads
//!   the log, each word once, into a [`Snapshot`]. That is checked (nothing outside the log or the ring is named, nothing
//!   twice), and that alone is used; the shared words are only stored to from then on.
//! - An entry's fields lie in words of 64 bits, stored whole. A store that must not be seen before another one is a
//!   release: who reads is another process, after this one's death.
//! - No lock, no system call, no allocation after the start.
//!
//! Spec: vhost-user, "Inflight I/O tracking". Not here: the two layouts (`split/log.rs`, `packed/log.rs`), the shared
//! memory and its messages (`blk_server`).

use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Release};

use guest_mem::{AccessError, GuestAddress, GuestMemory, SharedSlice};

use crate::step;

/// Words before the entries, and words of an entry.
pub(crate) const SPLIT_WORDS: (usize, usize) = (2, 2);
pub(crate) const PACKED_WORDS: (usize, usize) = (4, 4);
/// The log of each queue begins at a multiple of this, as other back-ends have it.
const ALIGN_BYTES: u64 = 64;
/// The only version there is; 0: nothing was written yet.
pub(crate) const VERSION: u16 = 1;

/// Why a log cannot be used. The queue must not start: nobody knows what was in flight.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LogFault {
    /// The shared memory does not hold it.
    #[error("in-flight log of queue {queue} lies outside the memory that the front-end passed for it")]
    Place {
        /** Its index. */
        queue: u16,
        /** Why. */
        #[source]
        source: AccessError,
    },
    /// Flags of a later specification.
    #[error("in-flight log has feature flags {features:#x}, 0 is known")]
    Features {
        /** As read. */
        features: u64,
    },
    /// A later layout.
    #[error("in-flight log has version {version}, {VERSION} is known")]
    Version {
        /** As read. */
        version: u16,
    },
    /// Made for another number of descriptors than was said.
    #[error("in-flight log says that it has {entries} entries, the front-end says {announced}")]
    Entries {
        /** As read. */
        entries: u16,
        /** As received. */
        announced: u16,
    },
    /// The ring can have more in flight than the log can hold.
    #[error("in-flight log with {entries} entries for a queue of {queue_size}: it needs as many")]
    TooSmall {
        /** As received. */
        entries: u16,
        /** In descriptors. */
        queue_size: u16,
    },
    /// A link leads out of the log.
    #[error("in-flight log names entry {entry}, it has {entries}")]
    NoSuchEntry {
        /** As read. */
        entry: u16,
        /** How many there are. */
        entries: u16,
    },
    /// Two lists meet, or one has no end.
    #[error("in-flight log has entry {entry} in two places")]
    EntryTwice {
        /** Its index. */
        entry: u16,
    },
    /// A chain that is not as long as it says.
    #[error(
        "in-flight log has a chain from entry {entry} on with {num} descriptors, which does not end at {last}"
    )]
    ChainEnd {
        /** Its head. */
        entry: u16,
        /** As read. */
        num: u16,
        /** As read. */
        last: u16,
    },
    /// More than the ring holds.
    #[error("in-flight log has {descriptors} descriptors in flight, the ring has {queue_size}")]
    TooMany {
        /** Of all chains. */
        descriptors: u16,
        /** In descriptors. */
        queue_size: u16,
    },
    /// Entries that are neither free nor in flight.
    #[error("in-flight log has {found} of its {entries} entries in its lists")]
    Lost {
        /** Free or in flight. */
        found: u16,
        /** How many there are. */
        entries: u16,
    },
    /// A buffer id that the ring does not have, or has twice.
    #[error(
        "in-flight log has buffer id {id} in flight twice, or it is not below the queue size {queue_size}"
    )]
    BufferId {
        /** As read. */
        id: u16,
        /** In descriptors. */
        queue_size: u16,
    },
    /// No such slot.
    #[error("in-flight log says that slot {slot} is used next, the ring has {queue_size}")]
    Position {
        /** As read. */
        slot: u16,
        /** In descriptors. */
        queue_size: u16,
    },
}

/// Where the log of one queue lies: in memory that is shared with the front-end, and with nobody else.
#[derive(Clone, Debug)]
pub struct LogArea {
    memory: Arc<GuestMemory>,
    queue: u16,
    entries: u16,
}

impl LogArea {
    /// `memory`: the shared memory, from address 0 on, with the logs of all queues. `entries`: of each of them; at least
    /// the size of the queue.
    #[must_use]
    pub fn new(memory: Arc<GuestMemory>, queue: u16, entries: u16) -> Self {
        Self { memory, queue, entries }
    }

    /// How much room `queues` logs of `entries` entries need.
    #[must_use]
    pub fn bytes(queues: u16, entries: u16, packed: bool) -> u64 {
        u64::from(queues) * queue_bytes(entries, if packed { PACKED_WORDS } else { SPLIT_WORDS })
    }

    /// How many requests, or descriptors of a packed ring, it can hold.
    #[must_use]
    pub fn entries(&self) -> u16 {
        self.entries
    }

    /// Where it is.
    #[must_use]
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// The log's words, to be stored to, and what they say; `None` if nothing was ever written to them.
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

    #[allow(clippy::cast_possible_truncation)] // takes the fields apart
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

/// A log's words as a queue found them: a private copy, of which each word was read once.
///
/// It is as large as the log, which is bounded by its number of entries and by the memory that was passed for it.
#[derive(Debug)]
pub(crate) struct Snapshot(Box<[u64]>);

impl Snapshot {
    fn read(words: &SharedSlice<u64>) -> Self {
        let read_once = |at| {
            // Acquire: pairs with the releases of the device before; it is gone, and all that it stored is there.
            let word = words.load(at, Acquire);
            step::may_change_here();
            word
        };
        Self((0..words.len()).map(read_once).collect())
    }

    /// `at`: below what the log has, as the caller made sure.
    pub(crate) fn word(&self, at: usize) -> u64 {
        self.0[at]
    }

    /// What a queue that starts has stored in the log meanwhile.
    pub(crate) fn set(&mut self, at: usize, word: u64) {
        self.0[at] = word;
    }
}

/// After all stores before it: pairs with the acquire of a successor that opens the log.
#[inline]
pub(crate) fn release(words: &SharedSlice<u64>, at: usize, word: u64) {
    words.store(at, word, Release);
    step::may_die_here();
}

/// What a queue finds in its log when it starts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recovery {
    /// Requests that are done again.
    pub redone: u16,
    /// The log is not of this ring: whoever made a new ring kept an old log. It is written anew.
    pub was_foreign: bool,
}
