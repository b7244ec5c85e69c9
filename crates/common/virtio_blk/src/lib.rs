//! The meaning of a virtio block device's requests: from a descriptor chain to a typed request, and back to a
//! status byte. Also the device's description of itself: feature bits and configuration space.
//!
//! `Chain → parse → Request | RequestFault → (owner executes it) → ReplySlot::write → used length`
//!
//! - Header, data and status are bytes of the chain, wherever the driver split it (virtio 1.3 §2.7.4).
//! - Everything the driver wrote is read once; a [`Request`] refers to guest memory only for its data
//!   buffers.
//!
//! Spec: virtio 1.3 §5.2. See also: rings (`virtqueue`), the range of the image (`disk_image`), I/O.
#![forbid(unsafe_code)]

pub mod features;
mod request;

mod data;
mod ranges;
mod reply;

mod config;
mod driver;

pub use config::{
    CONFIG_BYTES, ConfigReadError, ConfigWriteError, DeviceConfig, MAX_CONFIG_BYTES, WRITEBACK_OFFSET_BYTES,
    seg_max,
};
pub use data::{Data, DataRanges};
pub use driver::{RequestHeader, encode_segments};
pub use features::{FeatureError, Negotiated, Offer, WriteCache, device_features, initial_write_cache};
pub use ranges::{MAX_SEGMENTS, SEGMENT_BYTES, Segment, SegmentBuffer, Segments};
pub use reply::{DEVICE_ID_BYTES, DeviceId, ReplySlot, Status};
pub use request::{HEADER_BYTES, NoStatusByte, Parsed, Request, RequestFault, kind, parse, reply_slot};

/// Bytes per sector: the unit of `sector` and of lengths, whatever the block size is (virtio 1.3 §5.2.6).
pub const SECTOR_BYTES: u64 = 512;

/// The example in README.md compiles and runs.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
#[derive(Debug)]
pub struct Readme;
