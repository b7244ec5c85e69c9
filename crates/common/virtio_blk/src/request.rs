//! A descriptor chain as a typed request: header, data, status (`struct virtio_blk_req`).
//!
//! ```text
//! readable  kind u32 | reserved u32 | sector u64 | data of OUT, DISCARD, WRITE_ZEROES
//! writable  data of IN, GET_ID | status u8 (the last byte of all)
//! ```
//!
//! - The status byte is located first, so that every later fault can be answered.
//! - A request of an unknown type is [`Request::Unsupported`]; a malformed one is a [`RequestFault`].
//!
//! Spec: virtio 1.3 §5.2.6.

use guest_mem::{AccessError, MemoryView};
use virtqueue::Chain;

use crate::SECTOR_BYTES;
use crate::data::Data;
use crate::ranges::{self, MAX_SEGMENTS, SEGMENT_BYTES, SegmentBuffer, Segments};
use crate::reply::{ReplySlot, Status};

/// Length of a request's header.
pub const HEADER_BYTES: usize = 16;

/// Values of the header's `type` field (virtio 1.3 §5.2.6).
pub mod kind {
    /// `VIRTIO_BLK_T_IN`: read.
    pub const IN: u32 = 0;
    /// `VIRTIO_BLK_T_OUT`: write.
    pub const OUT: u32 = 1;
    /// `VIRTIO_BLK_T_FLUSH`.
    pub const FLUSH: u32 = 4;
    /// `VIRTIO_BLK_T_GET_ID`.
    pub const GET_ID: u32 = 8;
    /// `VIRTIO_BLK_T_DISCARD`.
    pub const DISCARD: u32 = 11;
    /// `VIRTIO_BLK_T_WRITE_ZEROES`.
    pub const WRITE_ZEROES: u32 = 13;
}

/// A chain that can be answered.
#[derive(Clone, Debug)]
pub struct Parsed<'c> {
    /// Where the answer is stored.
    pub reply: ReplySlot,
    /// The parsed request; a fault is answered with its [`RequestFault::status`].
    pub request: Result<Request<'c>, RequestFault>,
}

/// A request of the driver, by type.
#[derive(Clone, Debug)]
pub enum Request<'c> {
    /// Read from the image into `data`; a length of zero is legal.
    Read {
        /** First sector of 512 bytes: not yet checked. */
        sector: u64,
        /** The data; its length is a multiple of 512 bytes. */
        data: Data<'c>,
    },
    /// Write `data` to the image; a length of zero is legal.
    Write {
        /** First sector of 512 bytes: not yet checked. */
        sector: u64,
        /** The data; its length is a multiple of 512 bytes. */
        data: Data<'c>,
    },
    /// Make completed writes durable.
    Flush,
    /// Return the serial.
    GetId {
        /** A buffer of any length; at most 20 bytes of it are used. */
        data: Data<'c>,
    },
    /// The driver no longer needs these sectors.
    Discard {
        /** The segments; at least one. */
        segments: Segments<'c>,
    },
    /// Make these sectors read as zeroes.
    WriteZeroes {
        /** The segments; at least one. */
        segments: Segments<'c>,
    },
    /// Answered with [`Status::Unsupp`]: an unknown type, or flags that the type does not define.
    Unsupported {
        /** The header's `type`. */
        kind: u32,
    },
}

/// The request has no usable status byte: the device returns the chain with used length 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoStatusByte {
    /// The chain has no device-writable byte.
    #[error("request has no device-writable byte for its status")]
    Missing,
    /// The status byte lies outside the guest's memory.
    #[error("status byte of the request cannot be written")]
    Unmapped(#[source] AccessError),
}

/// A malformed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestFault {
    /// The request is shorter than a header.
    #[error("request has {readable_bytes} readable bytes, but its header alone needs {needed_bytes}")]
    HeaderTooShort {
        /** Length of the chain's readable buffers. */
        readable_bytes: u64,
        /** [`HEADER_BYTES`]. */
        needed_bytes: usize,
    },
    /// The header lies outside the guest's memory.
    #[error("header of the request cannot be read")]
    Header(#[source] AccessError),
    /// The data is not a whole number of sectors.
    #[error("request has {len_bytes} bytes of data, not a multiple of {sector_bytes}")]
    DataLength {
        /** Length of the data in the chain. */
        len_bytes: u64,
        /** [`SECTOR_BYTES`]. */
        sector_bytes: u64,
    },
    /// The data is not a whole number of segments.
    #[error("request has {len_bytes} bytes of segments, not a multiple of {segment_bytes}")]
    SegmentsLength {
        /** Length of the data in the chain. */
        len_bytes: u64,
        /** [`SEGMENT_BYTES`]. */
        segment_bytes: usize,
    },
    /// A DISCARD or WRITE_ZEROES without segments.
    #[error("request has no segments")]
    NoSegments,
    /// The request has more segments than we advertise.
    #[error("request has {segments} segments; at most {max} are allowed")]
    TooManySegments {
        /** Number of segments in the chain. */
        segments: u64,
        /** [`MAX_SEGMENTS`]. */
        max: usize,
    },
    /// Segments lie outside the guest's memory.
    #[error("segments of the request cannot be read")]
    Segments(#[source] AccessError),
}

impl RequestFault {
    /// The status that answers this fault.
    #[must_use]
    pub fn status(&self) -> Status {
        Status::IoErr
    }
}

/// Reads the request in `chain`. `buffer` receives its segments, if it has any.
///
/// # Errors
/// [`NoStatusByte`]: the request cannot even be refused.
#[inline]
pub fn parse<'c>(
    chain: &'c Chain,
    view: &MemoryView,
    buffer: &'c mut SegmentBuffer,
) -> Result<Parsed<'c>, NoStatusByte> {
    let (writable, reply) = split_status(chain, view)?;
    let readable = Data::new(chain.readable(), chain.readable_bytes());
    Ok(Parsed { reply, request: parse_request(readable, writable, view, buffer) })
}

/// Finds the status byte of a chain that is not parsed as a request.
///
/// # Errors
/// [`NoStatusByte`].
pub fn reply_slot(chain: &Chain, view: &MemoryView) -> Result<ReplySlot, NoStatusByte> {
    split_status(chain, view).map(|(_, reply)| reply)
}

/// The status is the last writable byte, wherever it lies.
#[inline]
fn split_status<'c>(chain: &'c Chain, view: &MemoryView) -> Result<(Data<'c>, ReplySlot), NoStatusByte> {
    let writable = Data::new(chain.writable(), chain.writable_bytes());
    let (writable, status_addr) = writable.split_last_byte().ok_or(NoStatusByte::Missing)?;
    view.check(status_addr, 1).map_err(NoStatusByte::Unmapped)?;
    Ok((writable, ReplySlot::new(status_addr)))
}

#[inline]
fn parse_request<'c>(
    mut readable: Data<'c>,
    writable: Data<'c>,
    view: &MemoryView,
    buffer: &'c mut SegmentBuffer,
) -> Result<Request<'c>, RequestFault> {
    let (kind, sector) = take_header(&mut readable, view)?;
    Ok(match kind {
        kind::IN => Request::Read { sector, data: whole_sectors(writable)? },
        kind::OUT => Request::Write { sector, data: whole_sectors(readable)? },
        kind::FLUSH => Request::Flush,
        kind::GET_ID => Request::GetId { data: writable },
        kind::DISCARD => parse_segments(SegmentKind::Discard, readable, view, buffer)?,
        kind::WRITE_ZEROES => parse_segments(SegmentKind::WriteZeroes, readable, view, buffer)?,
        kind => Request::Unsupported { kind },
    })
}

#[inline]
fn take_header(readable: &mut Data<'_>, view: &MemoryView) -> Result<(u32, u64), RequestFault> {
    let readable_bytes = readable.len_bytes();
    if readable_bytes < HEADER_BYTES as u64 {
        return Err(RequestFault::HeaderTooShort { readable_bytes, needed_bytes: HEADER_BYTES });
    }
    let [kind, sector] = match readable.take_words(view) {
        Some(words) => words,
        None => copy_header(readable, view)?,
    };
    #[allow(clippy::cast_possible_truncation)] // the other half is reserved
    Ok((kind as u32, sector))
}

/// Slow path: the header is not aligned, or is spread over several buffers or regions.
#[cold]
fn copy_header(readable: &mut Data<'_>, view: &MemoryView) -> Result<[u64; 2], RequestFault> {
    let mut header = [0; HEADER_BYTES];
    readable.take(view, &mut header).map_err(RequestFault::Header)?;
    let header = u128::from_le_bytes(header);
    #[allow(clippy::cast_possible_truncation)] // separates the words
    Ok([header as u64, (header >> 64) as u64])
}

#[inline]
fn whole_sectors(data: Data<'_>) -> Result<Data<'_>, RequestFault> {
    let (len_bytes, sector_bytes) = (data.len_bytes(), SECTOR_BYTES);
    let whole = len_bytes.is_multiple_of(sector_bytes);
    if whole { Ok(data) } else { Err(RequestFault::DataLength { len_bytes, sector_bytes }) }
}

/// The kinds of request whose data is a list of segments.
#[derive(Clone, Copy)]
enum SegmentKind {
    Discard,
    WriteZeroes,
}

#[cold]
fn parse_segments<'c>(
    kind: SegmentKind,
    mut data: Data<'c>,
    view: &MemoryView,
    buffer: &'c mut SegmentBuffer,
) -> Result<Request<'c>, RequestFault> {
    let (len_bytes, segment_bytes) = (data.len_bytes(), SEGMENT_BYTES);
    if !len_bytes.is_multiple_of(segment_bytes as u64) {
        return Err(RequestFault::SegmentsLength { len_bytes, segment_bytes });
    }
    let (segments, max) = (len_bytes / segment_bytes as u64, MAX_SEGMENTS);
    if segments == 0 {
        return Err(RequestFault::NoSegments);
    }
    if segments > max as u64 {
        return Err(RequestFault::TooManySegments { segments, max });
    }
    let segments = ranges::take_segments(&mut data, view, buffer).map_err(RequestFault::Segments)?;
    Ok(match (kind, segments) {
        (SegmentKind::Discard, None) => Request::Unsupported { kind: kind::DISCARD },
        (SegmentKind::WriteZeroes, None) => Request::Unsupported { kind: kind::WRITE_ZEROES },
        (SegmentKind::Discard, Some(segments)) if segments.iter().any(|segment| segment.unmap) => {
            Request::Unsupported { kind: kind::DISCARD }
        }
        (SegmentKind::Discard, Some(segments)) => Request::Discard { segments },
        (SegmentKind::WriteZeroes, Some(segments)) => Request::WriteZeroes { segments },
    })
}
