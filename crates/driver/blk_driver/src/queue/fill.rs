//! Converts a user's request to a slot: checks it, then builds the chain of buffers.
//!
//! ```text
//! read    header | data …           | status        flush              header | status
//! write   header | data …           | status        discard, zeroes    header | segments | status
//! id      header | 20 bytes of data | status
//! ```
//!
//! Spec: virtio 1.3 §5.2.6, §5.2.6.1.

use guest_mem::GuestRange;
use virtio_blk::{DEVICE_ID_BYTES, MAX_SEGMENTS, SECTOR_BYTES, Segment, kind};

use super::area::{Area, DEFAULT_MAX_SEGMENTS};
use super::slots::{Phase, Slot};
use crate::error::PushError;
use crate::memory::OpenRanges;
use crate::request::{Durability, Request, Work};

/// Limit of data per request: a chain, including header and status, has less than 2³² bytes (virtio 1.3 §2.7.5.2).
pub(crate) const MAX_DATA_BYTES: u64 = (1 << 32) - SECTOR_BYTES;

#[allow(clippy::cast_possible_truncation)] // 20
const ID_BYTES: u32 = DEVICE_ID_BYTES as u32;

/// The device's limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Maximum number of buffers per request.
    pub max_segments: u16,
    /// The device has a cache to flush (`VIRTIO_BLK_F_FLUSH`).
    pub flush: bool,
    /// The device accepts no writes (`VIRTIO_BLK_F_RO`).
    pub read_only: bool,
    /// Limits of a discard; 0 segments if the device does not offer it (`VIRTIO_BLK_F_DISCARD`).
    pub discard: SegmentLimits,
    /// Limits of a write zeroes; 0 segments if the device does not offer it (`VIRTIO_BLK_F_WRITE_ZEROES`).
    pub write_zeroes: SegmentLimits,
}

/// Limits for discard, or for write zeroes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SegmentLimits {
    /// Maximum number of segments per request.
    pub segments: u32,
    /// Maximum number of sectors per segment.
    pub sectors: u32,
}

impl Limits {
    /// The limits of a device that supports all requests of the driver.
    pub(crate) fn all() -> Self {
        #[allow(clippy::cast_possible_truncation)] // 16
        let most = SegmentLimits { segments: MAX_SEGMENTS as u32, sectors: u32::MAX };
        Self {
            max_segments: DEFAULT_MAX_SEGMENTS,
            flush: true,
            read_only: false,
            discard: most,
            write_zeroes: most,
        }
    }
}

/// The next step for a valid request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Filled {
    /// Send it to the device.
    Send,
    /// Complete it at once: a flush on a device without a cache (virtio 1.3 §5.2.6.1 forbids sending it).
    Done,
}

/// Checks `request` and describes it in the free slot `slot`, whose index is `index`.
///
/// # Errors
/// [`PushError`]; after an error, the contents of `slot` are meaningless.
#[inline]
pub(crate) fn fill(
    slot: &mut Slot,
    index: u16,
    request: &Request<'_>,
    limits: &Limits,
    open: &mut OpenRanges,
    area: &Area,
) -> Result<Filled, PushError> {
    (slot.token, slot.deadline, slot.phase) = (request.token, request.deadline, Phase::Only);
    (slot.sector, slot.wanted_bytes, slot.stored_bytes) = (0, 0, 0);
    slot.chain.clear();
    slot.segments.clear();
    slot.chain.push(area.header(index));
    match request.work {
        Work::Read { sector, data } => {
            (slot.kind, slot.sector, slot.readable) = (kind::IN, sector, 1);
            slot.wanted_bytes = add_data(slot, data, limits, open)?;
        }
        Work::Write { sector, data, durability } => {
            check_writable(limits)?;
            (slot.kind, slot.sector, slot.readable) = (kind::OUT, sector, 1 + data.len());
            add_data(slot, data, limits, open)?;
            if durability == Durability::Durable && limits.flush {
                slot.phase = Phase::WriteBeforeFlush;
            }
        }
        Work::Flush => {
            (slot.kind, slot.readable) = (kind::FLUSH, 1);
            if !limits.flush {
                return Ok(Filled::Done);
            }
        }
        Work::Discard { segments } => {
            slot.kind = kind::DISCARD;
            add_segments(slot, index, "discard", segments, limits, limits.discard, area)?;
        }
        Work::WriteZeroes { segments } => {
            slot.kind = kind::WRITE_ZEROES;
            add_segments(slot, index, "write zeroes", segments, limits, limits.write_zeroes, area)?;
        }
        Work::GetId { data } => {
            (slot.kind, slot.readable, slot.wanted_bytes) = (kind::GET_ID, 1, ID_BYTES);
            add_id(slot, data, open)?;
        }
    }
    slot.chain.push(area.status(index));
    Ok(Filled::Send)
}

fn check_writable(limits: &Limits) -> Result<(), PushError> {
    if limits.read_only { Err(PushError::ReadOnly) } else { Ok(()) }
}

/// Adds the data buffers to the chain and returns their total length.
#[inline]
fn add_data(
    slot: &mut Slot,
    data: &[GuestRange],
    limits: &Limits,
    open: &mut OpenRanges,
) -> Result<u32, PushError> {
    let (buffers, max) = (data.len(), limits.max_segments);
    if buffers > usize::from(max) {
        return Err(PushError::TooManyBuffers { buffers, max });
    }
    let mut len_bytes = 0;
    for &range in data {
        check_buffer(range, open)?;
        len_bytes += u64::from(range.len_bytes);
        slot.chain.push(range);
    }
    let max_bytes = MAX_DATA_BYTES;
    let good = len_bytes != 0 && len_bytes.is_multiple_of(SECTOR_BYTES) && len_bytes <= max_bytes;
    let refused = PushError::DataLength { len_bytes, sector_bytes: SECTOR_BYTES, max_bytes };
    u32::try_from(len_bytes).ok().filter(|_| good).ok_or(refused)
}

#[inline]
fn check_buffer(range: GuestRange, open: &mut OpenRanges) -> Result<(), PushError> {
    let GuestRange { addr, len_bytes } = range;
    if len_bytes == 0 {
        return Err(PushError::EmptyBuffer { addr });
    }
    if open.hold(range) { Ok(()) } else { Err(PushError::NotRegistered { addr, len_bytes }) }
}

fn add_id(slot: &mut Slot, data: GuestRange, open: &mut OpenRanges) -> Result<(), PushError> {
    let (len_bytes, min_bytes) = (data.len_bytes, ID_BYTES);
    if len_bytes < min_bytes {
        return Err(PushError::IdLength { len_bytes, min_bytes });
    }
    let range = GuestRange { len_bytes: min_bytes, ..data };
    check_buffer(range, open)?;
    slot.chain.push(range);
    Ok(())
}

fn add_segments(
    slot: &mut Slot,
    index: u16,
    what: &'static str,
    segments: &[Segment],
    limits: &Limits,
    limit: SegmentLimits,
    area: &Area,
) -> Result<(), PushError> {
    check_writable(limits)?;
    if limit.segments == 0 {
        return Err(PushError::NotOffered { what });
    }
    let max = usize::try_from(limit.segments).unwrap_or(MAX_SEGMENTS).min(MAX_SEGMENTS);
    let count = segments.len();
    if count == 0 || count > max {
        return Err(PushError::SegmentCount { what, count, max });
    }
    if let Some(segment) = segments.iter().find(|segment| segment.sectors > limit.sectors) {
        return Err(PushError::SegmentLength { what, sectors: segment.sectors, max: limit.sectors });
    }
    slot.readable = 2;
    slot.chain.push(area.segments(index, count));
    slot.segments.extend_from_slice(segments);
    Ok(())
}
