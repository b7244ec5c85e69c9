//! What a user chooses before connecting, checked.
//!
//! Not here: what the device then offers (`negotiate.rs`).

use std::path::PathBuf;
use std::time::Duration;

use virtqueue::{MAX_QUEUE_SIZE, MIN_QUEUE_SIZE};

use super::ConnectError;
use crate::memory::PoolOptions;

/// What to connect to, and how.
#[derive(Clone, Debug)]
pub struct Options {
    /// The vhost-user socket.
    pub socket: PathBuf,
    /// Queues to use; more than the device has is an error that names both.
    pub queues: u16,
    /// Descriptors per queue, a power of two.
    pub queue_size: u16,
    /// `Some(true)`: packed rings, and an error if the device has none. `None` and `Some(false)`: split rings, which
    /// every device has.
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
    /// Have the back-end note what it has begun in memory that is kept here for its successor (INFLIGHT_SHMFD), who then
    /// goes on with the same rings. `Some(true)`: and an error if it cannot. `None`: if it can, and `reconnect` is not
    /// [`Reconnect::Never`]. `Some(false)`: no.
    pub in_flight_log: Option<bool>,
}

impl Options {
    /// One split queue of 256 with EVENT_IDX and indirect descriptors where offered, 16 MiB pool, 5 s, no reconnect.
    #[must_use]
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self {
            socket: socket.into(),
            queues: 1,
            queue_size: 256,
            packed: None,
            indirect: true,
            event_idx: true,
            pool: PoolOptions { size_bytes: 16 << 20, huge_pages: false },
            timeout: Duration::from_secs(5),
            reconnect: Reconnect::Never,
            in_flight_log: None,
        }
    }

    /// Whether a log is to be used where there can be one.
    pub(super) fn wants_log(&self) -> bool {
        self.in_flight_log.unwrap_or(self.reconnect != Reconnect::Never)
    }

    pub(super) fn check(&self) -> Result<(), ConnectError> {
        let (size, min, max) = (self.queue_size, MIN_QUEUE_SIZE, MAX_QUEUE_SIZE);
        if !size.is_power_of_two() || !(min..=max).contains(&size) {
            return Err(ConnectError::QueueSize { size, min, max });
        }
        if self.queues == 0 {
            return Err(ConnectError::NoQueues);
        }
        Ok(())
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
