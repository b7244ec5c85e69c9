//! A connected device: features, configuration, memory, queues, and what happens to it later.
//!
//! Not here: the queues themselves (`queue.rs`).

use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::time::Duration;

use crate::memory::{MemoryError, Pool, PoolOptions, UserMemory};
use crate::queue::Queue;

/// What to connect to, and how.
#[derive(Clone, Debug)]
pub struct Options {
    /// The vhost-user socket.
    pub socket: PathBuf,
    /// Queues to use; more than the device has is an error that names both.
    pub queues: u16,
    /// Descriptors per queue, a power of two.
    pub queue_size: u16,
    /// Use packed rings if the device offers them; `Some(true)` insists.
    pub packed: Option<bool>,
    /// Use indirect descriptors if offered.
    pub indirect: bool,
    /// Use EVENT_IDX if offered.
    pub event_idx: bool,
    /// Memory for buffers.
    pub pool: PoolOptions,
    /// How long connecting, and each message, may take.
    pub timeout: Duration,
    /// What to do when the back-end goes away.
    pub reconnect: Reconnect,
}

impl Options {
    /// One queue of 256, split or packed as the device has it (split preferred), 16 MiB pool, 5 s, no reconnect.
    #[must_use]
    pub fn new(_socket: impl Into<PathBuf>) -> Self {
        todo!()
    }
}

/// What to do when the back-end goes away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reconnect {
    /// Everything in flight ends with `Lost`.
    Never,
    /// Try again for so long; then as `Never`.
    For(Duration),
}

/// What the device says about itself (virtio 1.3 §5.2.4). Units as named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Of 512 bytes.
    pub capacity_sectors: u64,
    /// Logical block.
    pub block_size_bytes: u32,
    /// Queues it has.
    pub num_queues: u16,
    /// Buffers per request.
    pub max_segments: u32,
    /// Accepts no writes.
    pub read_only: bool,
    /// Has a cache to flush.
    pub flush: bool,
    /// 0: no discard.
    pub max_discard_segments: u32,
    /// Per segment.
    pub max_discard_sectors: u32,
    /// 0: no write zeroes.
    pub max_write_zeroes_segments: u32,
    /// Per segment.
    pub max_write_zeroes_sectors: u32,
    /// Virtio features both sides agreed on.
    pub features: u64,
    /// vhost-user protocol features both sides agreed on.
    pub protocol_features: u64,
}

/// Something that happened outside the queues.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The configuration changed (a resize, say): the new one.
    ConfigChanged(DeviceInfo),
    /// The back-end went away.
    Disconnected,
    /// It is back, and this is what was done.
    Reconnected(ReconnectReport),
    /// It did not come back in time.
    GaveUp,
}

/// What a reconnect did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReconnectReport {
    /// How often it was tried.
    pub attempts: u32,
    /// How long the device was away.
    pub away: Duration,
    /// Requests that were sent again.
    pub resubmitted: u64,
    /// Requests found completed in the old ring.
    pub completed: u64,
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// Memory for rings or buffers.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// A session with a back-end. Dropping it stops the queues: what is in flight ends with `Lost`.
#[derive(Debug)]
pub struct Device {}

impl Device {
    /// Connects, negotiates, shares memory and starts the queues, which the caller may move to other threads.
    ///
    /// # Errors
    /// [`ConnectError`].
    pub fn connect(_options: &Options) -> Result<(Self, Vec<Queue>), ConnectError> {
        todo!()
    }
    /// As last read.
    #[must_use]
    pub fn info(&self) -> DeviceInfo {
        todo!()
    }
    /// The pool that was asked for.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        todo!()
    }
    /// Lets requests use memory of the user's own.
    ///
    /// # Errors
    /// [`MemoryError`].
    pub fn register(&mut self, _memory: UserMemory) -> Result<(), MemoryError> {
        todo!()
    }
    /// Takes it back; no request may use it any more.
    ///
    /// # Errors
    /// [`MemoryError`].
    pub fn unregister(&mut self, _addr: u64) -> Result<(), MemoryError> {
        todo!()
    }
    /// The next event, waiting up to `limit`.
    pub fn next_event(&self, _limit: Duration) -> Option<Event> {
        todo!()
    }
    /// Readable while there are events: to poll together with other things.
    #[must_use]
    pub fn event_fd(&self) -> BorrowedFd<'_> {
        todo!()
    }
    /// Process of the back-end, from the socket's credentials (`SO_PEERCRED`); `None` if it has none here.
    #[must_use]
    pub fn peer_pid(&self) -> Option<i32> {
        todo!()
    }
}
