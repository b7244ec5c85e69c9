//! A device's properties and events.

use std::time::Duration;

/// The device's description of itself (virtio 1.3 §5.2.4).
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
    /// Maximum number of segments of a discard; 0 if the device does not offer it.
    pub max_discard_segments: u32,
    /// Maximum number of sectors per segment of a discard.
    pub max_discard_sectors: u32,
    /// Maximum number of segments of a write zeroes; 0 if the device does not offer it.
    pub max_write_zeroes_segments: u32,
    /// Maximum number of sectors per segment of a write zeroes.
    pub max_write_zeroes_sectors: u32,
    /// Virtio features that both sides agreed on.
    pub features: u64,
    /// vhost-user protocol features that both sides agreed on.
    pub protocol_features: u64,
}

/// An event outside the queues.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The configuration changed, for example by a resize. The event has the new configuration.
    ConfigChanged(DeviceInfo),
    /// The back-end disconnected.
    Disconnected,
    /// A back-end is connected again; the report says what the reconnect did.
    Reconnected(ReconnectReport),
    /// The driver no longer tries to reconnect: the options exclude it, or no matching back-end was available in time.
    /// This is the last event.
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
    /// How long no back-end was connected.
    pub away: Duration,
    /// Requests that were sent again. 0 if `kept_rings`.
    pub resubmitted: u64,
    /// Requests found completed in the old ring. 0 if `kept_rings`.
    pub completed: u64,
    /// Queues whose owners had not called within a second after the reconnect. Their requests are not in the two counts
    /// above; each owner sends them again in its next call.
    pub owners_waited_for: u16,
    /// The queues continue with the rings that they had: the old back-end's unfinished requests are in its
    /// in-flight log, and its successor redoes them.
    pub kept_rings: bool,
}
