//! A device's properties, and its later events.

use std::time::Duration;

/// The device's description of itself (virtio 1.3 §5.2.4), in the named units.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Capacity in sectors of 512 bytes.
    pub capacity_sectors: u64,
    /// Logical block size.
    pub block_size_bytes: u32,
    /// Usable queues of the device.
    pub num_queues: u16,
    /// Maximum number of buffers per request.
    pub max_segments: u32,
    /// The device accepts no writes.
    pub read_only: bool,
    /// The device has a cache to flush.
    pub flush: bool,
    /// Maximum number of segments of a discard; 0: no discard.
    pub max_discard_segments: u32,
    /// Per segment.
    pub max_discard_sectors: u32,
    /// Maximum number of segments of a write zeroes; 0: no write zeroes.
    pub max_write_zeroes_segments: u32,
    /// Per segment.
    pub max_write_zeroes_sectors: u32,
    /// Virtio features that both sides agreed on.
    pub features: u64,
    /// vhost-user protocol features that both sides agreed on.
    pub protocol_features: u64,
}

/// An event outside the queues.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The configuration changed (for example by a resize); this is the new one.
    ConfigChanged(DeviceInfo),
    /// The back-end went away.
    Disconnected,
    /// The back-end is back; the report says what the reconnect did.
    Reconnected(ReconnectReport),
    /// The back-end did not come back in time, came back different, or was not waited for. This is the last
    /// event.
    GaveUp {
        /// The error of the last attempt, with its causes.
        reason: String,
    },
}

/// The result of a reconnect.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReconnectReport {
    /// Number of attempts.
    pub attempts: u32,
    /// How long the back-end was away.
    pub away: Duration,
    /// Requests that were sent again. 0 if `kept_rings`.
    pub resubmitted: u64,
    /// Requests found completed in the old ring. 0 if `kept_rings`.
    pub completed: u64,
    /// Queues whose owners had not called within a second after the back-end was back. Their requests are not
    /// in the two counts above; they are sent again when the owner calls.
    pub owners_waited_for: u16,
    /// The queues continue with the rings that they had: the old back-end's unfinished requests are in its
    /// in-flight log, and its successor redoes them.
    pub kept_rings: bool,
}
