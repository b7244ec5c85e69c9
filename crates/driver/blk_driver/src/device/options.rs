//! The user's options for a connection, and their checks.

use std::path::PathBuf;
use std::time::Duration;

use virtqueue::{MAX_QUEUE_SIZE, MIN_QUEUE_SIZE};

use crate::error::ConnectError;
use crate::memory::PoolOptions;

/// The socket to connect to, and the connection's settings.
#[derive(Clone, Debug)]
pub struct Options {
    /// The vhost-user socket.
    pub socket: PathBuf,
    /// Queues to use. If the device has fewer, the error shows both numbers.
    pub queues: u16,
    /// Descriptors per queue, a power of two.
    pub queue_size: u16,
    /// `Some(true)`: packed rings, or an error if the device has none. `None` and `Some(false)`: split rings,
    /// which every device has.
    pub packed: Option<bool>,
    /// Use indirect descriptors if the device offers them.
    pub indirect: bool,
    /// Use EVENT_IDX if the device offers it.
    pub event_idx: bool,
    /// The pool of memory for buffers.
    pub pool: PoolOptions,
    /// Time limit for connecting, and for each message.
    pub timeout: Duration,
    /// The driver's reaction to a lost connection.
    pub reconnect: Reconnect,
    /// Lets the back-end log its unfinished requests in memory that the driver keeps for the next back-end
    /// (INFLIGHT_SHMFD). The next back-end then continues with the same rings. `Some(true)`: use a log, or fail if the
    /// back-end does not support one. `None`: use a log if the back-end supports it and `reconnect` is not
    /// [`Reconnect::Never`]. `Some(false)`: no log.
    pub in_flight_log: Option<bool>,
}

impl Options {
    /// The defaults: one split queue of 256 descriptors, EVENT_IDX and indirect descriptors if offered, a pool of 16
    /// MiB, a time limit of 5 s, and no reconnect.
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

    /// Whether to use a log if the back-end supports it.
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

/// The driver's reaction to a lost connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reconnect {
    /// Do not reconnect: everything in flight ends with `Lost`.
    Never,
    /// Try to reconnect for this long; after that, everything in flight ends as with `Never`.
    For(Duration),
}
