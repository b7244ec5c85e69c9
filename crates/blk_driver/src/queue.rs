//! One queue with one owner: requests in, completions out, no lock.
//!
//! `push (slot, header, chain) → prepare_kick (publish, ask) → Kick::notify … completions (used ring → status)`
//!
//! Not here: several owners (`shared.rs`), the session (`device.rs`).

use std::os::fd::BorrowedFd;
use std::time::Duration;

use virtqueue::split::{AddError, DriverFault};

use crate::kick::Kick;
use crate::request::{Completion, Request};

/// Why a request was not taken; the queue is as it was.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PushError {
    /// As many requests are in flight as the queue holds: take completions first.
    #[error("the queue is full: {in_flight} requests are in flight")]
    Full {
        /** Requests. */
        in_flight: usize,
    },
    /// The ring does not take it.
    #[error("the ring does not take the request")]
    Ring(#[source] AddError),
    /// A buffer that is not in registered memory.
    #[error("buffer of {len_bytes} bytes at {addr:#x} is not in registered memory")]
    NotRegistered {
        /** As given. */
        addr: u64,
        /** As given. */
        len_bytes: u32,
    },
}

/// The queue cannot go on; everything in flight has ended with [`crate::RequestError::Lost`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QueueError {
    /// The device broke the ring.
    #[error("queue {queue}: the device broke the ring")]
    Device {
        /** Its index. */
        queue: u16,
        /** What it did. */
        #[source]
        fault: DriverFault,
    },
    /// The back-end is gone and will not be waited for.
    #[error("queue {queue}: the back-end is gone")]
    Disconnected {
        /** Its index. */
        queue: u16,
    },
    /// The kernel refused to poll.
    #[error("queue {queue}: cannot wait for completions: {errno}")]
    Wait {
        /** Its index. */
        queue: u16,
        /** From the kernel. */
        errno: rustix::io::Errno,
    },
}

/// Counters since the queue was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueStats {
    /// Requests taken.
    pub pushed: u64,
    /// Requests ended, [`crate::RequestError::Returned`] not counted.
    pub completed: u64,
    /// Notifications that the device wanted.
    pub kicks: u64,
    /// Batches made visible to the device.
    pub publications: u64,
    /// Times the owner went to sleep for a completion.
    pub sleeps: u64,
}

/// See the file's head.
#[derive(Debug)]
pub struct Queue {}

impl Queue {
    /// Its index at the device.
    #[must_use]
    pub fn index(&self) -> u16 {
        todo!()
    }
    /// In descriptors, as negotiated.
    #[must_use]
    pub fn queue_size(&self) -> u16 {
        todo!()
    }
    /// Requests taken and not yet ended (a request that ended but is with the device counts).
    #[must_use]
    pub fn in_flight(&self) -> usize {
        todo!()
    }
    /// Requests of `buffers` buffers each that can be pushed now.
    #[must_use]
    pub fn room(&self, _buffers: usize) -> usize {
        todo!()
    }
    /// Takes a request; the device sees it after the next [`Queue::prepare_kick`] or [`Queue::submit`].
    ///
    /// # Errors
    /// [`PushError`].
    pub fn push(&mut self, _request: &Request<'_>) -> Result<(), PushError> {
        todo!()
    }
    /// Makes everything pushed visible to the device; `Some` if the device wants to be notified.
    #[must_use]
    pub fn prepare_kick(&mut self) -> Option<Kick> {
        todo!()
    }
    /// [`Queue::prepare_kick`] and [`Kick::notify`] in one: for an owner without a lock.
    pub fn submit(&mut self) {
        todo!()
    }
    /// Takes what has ended, up to `out.len()`; never waits. Also ends requests whose deadline has passed.
    ///
    /// # Errors
    /// [`QueueError`], after everything in flight was handed out.
    pub fn completions(&mut self, _out: &mut [Completion]) -> Result<usize, QueueError> {
        todo!()
    }
    /// Like [`Queue::completions`], but sleeps up to `limit` if there is nothing; 0 when the time is up.
    ///
    /// # Errors
    /// As [`Queue::completions`].
    pub fn wait(&mut self, _out: &mut [Completion], _limit: Duration) -> Result<usize, QueueError> {
        todo!()
    }
    /// Asks the device to signal [`Queue::completion_fd`] at the next completion; `true` if there is one already,
    /// for which no signal may come. The owner reads the descriptor empty ([`Queue::clear_signal`]) when it woke.
    ///
    /// # Errors
    /// [`QueueError`].
    pub fn arm(&mut self) -> Result<bool, QueueError> {
        todo!()
    }
    /// The descriptor to poll (or epoll) for completions, after [`Queue::arm`]. It stays the same for the queue's life.
    #[must_use]
    pub fn completion_fd(&self) -> BorrowedFd<'_> {
        todo!()
    }
    /// Takes the signal off [`Queue::completion_fd`].
    pub fn clear_signal(&mut self) {
        todo!()
    }
    /// Ends the request(s) with this token now, with [`crate::RequestError::Cancelled`]; the device is not asked
    /// (virtio-blk knows no cancellation), so the buffers come back later. Returns whether there was one.
    pub fn cancel(&mut self, _token: u64) -> bool {
        todo!()
    }
    /// Counters.
    #[must_use]
    pub fn stats(&self) -> QueueStats {
        todo!()
    }
    /// Reads `out.len()` bytes (a multiple of 512) from `sector`, copied through the pool; sleeps meanwhile.
    /// Only on a queue without other requests in flight.
    ///
    /// # Errors
    /// [`BlockingError`].
    pub fn read_blocking(
        &mut self,
        _sector: u64,
        _out: &mut [u8],
        _limit: Duration,
    ) -> Result<(), BlockingError> {
        todo!()
    }
    // write_blocking(sector, &[u8], Durability, limit), flush_blocking(limit), discard_blocking, write_zeroes_blocking,
    // get_id_blocking(limit) -> [u8; 20]
}

/// Why a blocking call failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BlockingError {
    /// The request was not taken.
    #[error(transparent)]
    Push(#[from] PushError),
    /// The queue cannot go on.
    #[error(transparent)]
    Queue(#[from] QueueError),
    /// The request failed.
    #[error(transparent)]
    Request(#[from] crate::RequestError),
}
