//! Adds requests to a queue.

use std::ffi::c_int;
use std::time::{Duration, Instant};

use blk_driver::{Durability, Request, Work};
use guest_mem::GuestRange;
use virtio_blk::{MAX_SEGMENTS, Segment};

use crate::failure::Failure;
use crate::options::BAREBLK_FOREVER;
use crate::pointers;
use crate::queue::{bareblk_queue, on_queue};

/// A buffer of a request: a part of the pool or of registered memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct bareblk_range {
    /// In the pool: bareblk_buffer_addr plus an offset. In registered memory: the pointer as an integer, (uintptr_t)
    /// pointer.
    pub addr: u64,
    /// Length in bytes, from 1 to UINT32_MAX.
    pub len_bytes: u64,
}

/// A range of sectors, for discard and write-zeroes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct bareblk_segment {
    /// First sector, in units of 512 bytes.
    pub sector: u64,
    /// Number of sectors of 512 bytes.
    pub sectors: u32,
    /// Write-zeroes: BAREBLK_UNMAP or 0. Discard: 0.
    pub flags: u32,
}

/// Flag of a write: the write completes only when its data is durable.
pub const BAREBLK_DURABLE: u32 = 1;

/// Flag of a segment of a write-zeroes: the device may deallocate the sectors.
pub const BAREBLK_UNMAP: u32 = 1;

/// Maximum number of buffers in a list: the largest power of two that a queue's size can be (virtio 1.3 §2.7). Devices
/// accept fewer.
const MAX_RANGES: usize = 1 << 15;

/// Adds a read to the queue. It reads from `sector` on (in units of 512 bytes) into `count` buffers (from 1 to
/// bareblk_info.max_segments), whose lengths must add up to a multiple of 512 bytes. The device does not see the
/// request before the next bareblk_prepare_kick or bareblk_submit. The device, not this function, checks whether the
/// sectors exist.
///
/// `token`: any value; the completion repeats it. `deadline_ns`: a time from now, in nanoseconds; if the device has not
/// completed the request by then, the request ends with BAREBLK_ERR_DEADLINE. BAREBLK_FOREVER: no deadline.
///
/// The call copies the array `buffers`. The buffers themselves belong to the device until the request has ended; if it
/// ends with BAREBLK_ERR_DEADLINE or BAREBLK_ERR_CANCELLED, until its BAREBLK_RETURNED.
///
/// Returns 0 or an error: BAREBLK_ERR_INVALID, BAREBLK_ERR_FULL, BAREBLK_ERR_NOT_REGISTERED; on a queue that cannot
/// continue, BAREBLK_ERR_DISCONNECTED or BAREBLK_ERR_DEVICE. After an error, the queue is unchanged, and there will be
/// no completion.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_push_read(
    queue: *mut bareblk_queue,
    sector: u64,
    buffers: *const bareblk_range,
    count: usize,
    token: u64,
    deadline_ns: u64,
) -> c_int {
    let push = |queue: &mut bareblk_queue| {
        // SAFETY: the caller upholds the contract of the C header.
        unsafe { queue.take_ranges(buffers, count) }?;
        let bareblk_queue { queue, ranges, .. } = queue;
        queue.push(&request(Work::Read { sector, data: ranges }, token, deadline_ns))?;
        Ok(0)
    };
    // SAFETY: the caller upholds the contract of the C header.
    unsafe { on_queue(queue, push) }
}

/// Adds a write to the queue. It writes `count` buffers to the sectors from `sector` on. `flags`: BAREBLK_DURABLE, or 0
/// for a write that is durable only after the next flush. Otherwise like bareblk_push_read; the errors also include
/// BAREBLK_ERR_READ_ONLY.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_push_write(
    queue: *mut bareblk_queue,
    sector: u64,
    buffers: *const bareblk_range,
    count: usize,
    flags: u32,
    token: u64,
    deadline_ns: u64,
) -> c_int {
    let push = |queue: &mut bareblk_queue| {
        let durability = durability(flags)?;
        // SAFETY: the caller upholds the contract of the C header.
        unsafe { queue.take_ranges(buffers, count) }?;
        let bareblk_queue { queue, ranges, .. } = queue;
        queue.push(&request(Work::Write { sector, data: ranges, durability }, token, deadline_ns))?;
        Ok(0)
    };
    // SAFETY: the caller upholds the contract of the C header.
    unsafe { on_queue(queue, push) }
}

/// Adds a flush to the queue. It makes durable all writes that completed before it. On a device without a write cache,
/// it ends at once. Otherwise like bareblk_push_read.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_push_flush(
    queue: *mut bareblk_queue,
    token: u64,
    deadline_ns: u64,
) -> c_int {
    let push = |queue: &mut bareblk_queue| {
        queue.queue.push(&request(Work::Flush, token, deadline_ns))?;
        Ok(0)
    };
    // SAFETY: the caller upholds the contract of the C header.
    unsafe { on_queue(queue, push) }
}

/// Adds a discard to the queue: the device may drop the contents of the `count` segments (from 1 to
/// bareblk_info.max_discard_segments), whose flags must be 0. The call copies the array `segments`. Otherwise like
/// bareblk_push_read; the errors also include BAREBLK_ERR_NOT_OFFERED and BAREBLK_ERR_READ_ONLY.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_push_discard(
    queue: *mut bareblk_queue,
    segments: *const bareblk_segment,
    count: usize,
    token: u64,
    deadline_ns: u64,
) -> c_int {
    let push = |queue: &mut bareblk_queue| {
        // SAFETY: the caller upholds the contract of the C header.
        unsafe { queue.take_segments(segments, count, 0) }?;
        let bareblk_queue { queue, segments, .. } = queue;
        queue.push(&request(Work::Discard { segments }, token, deadline_ns))?;
        Ok(0)
    };
    // SAFETY: the caller upholds the contract of the C header.
    unsafe { on_queue(queue, push) }
}

/// Adds a write-zeroes to the queue: the `count` segments (from 1 to bareblk_info.max_write_zeroes_segments) read as
/// zeroes once it has completed. Otherwise like bareblk_push_discard.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_push_write_zeroes(
    queue: *mut bareblk_queue,
    segments: *const bareblk_segment,
    count: usize,
    token: u64,
    deadline_ns: u64,
) -> c_int {
    let push = |queue: &mut bareblk_queue| {
        // SAFETY: the caller upholds the contract of the C header.
        unsafe { queue.take_segments(segments, count, BAREBLK_UNMAP) }?;
        let bareblk_queue { queue, segments, .. } = queue;
        queue.push(&request(Work::WriteZeroes { segments }, token, deadline_ns))?;
        Ok(0)
    };
    // SAFETY: the caller upholds the contract of the C header.
    unsafe { on_queue(queue, push) }
}

/// Adds a request for the device's serial to the queue. The device stores BAREBLK_ID_BYTES bytes in `buffer`, padded
/// with zeroes; a serial of that length has no NUL at its end. `buffer` must have at least BAREBLK_ID_BYTES bytes.
/// Otherwise like bareblk_push_read.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_push_get_id(
    queue: *mut bareblk_queue,
    buffer: bareblk_range,
    token: u64,
    deadline_ns: u64,
) -> c_int {
    let push = |queue: &mut bareblk_queue| {
        let data = range(buffer)?;
        queue.queue.push(&request(Work::GetId { data }, token, deadline_ns))?;
        Ok(0)
    };
    // SAFETY: the caller upholds the contract of the C header.
    unsafe { on_queue(queue, push) }
}

impl bareblk_queue {
    /// Copies a list of buffers into `self.ranges`.
    ///
    /// # Safety
    /// `buffers` is NULL, or `count` buffers are valid there.
    unsafe fn take_ranges(&mut self, buffers: *const bareblk_range, count: usize) -> Result<(), Failure> {
        // SAFETY: the caller upholds the contract of the C header.
        let given = unsafe { pointers::slice(buffers, count, MAX_RANGES, "buffers") }?;
        self.ranges.clear();
        for &buffer in given {
            self.ranges.push(range(buffer)?);
        }
        Ok(())
    }

    /// Copies a list of segments into `self.segments`; `known` are the flags that may be set.
    ///
    /// # Safety
    /// `segments` is NULL, or `count` segments are valid there.
    pub(crate) unsafe fn take_segments(
        &mut self,
        segments: *const bareblk_segment,
        count: usize,
        known: u32,
    ) -> Result<(), Failure> {
        // SAFETY: the caller upholds the contract of the C header.
        let given = unsafe { pointers::slice(segments, count, MAX_SEGMENTS, "segments") }?;
        self.segments.clear();
        for &bareblk_segment { sector, sectors, flags } in given {
            check_flags(flags, known, "flags of a segment")?;
            self.segments.push(Segment { sector, sectors, unmap: flags & BAREBLK_UNMAP != 0 });
        }
        Ok(())
    }
}

fn range(given: bareblk_range) -> Result<GuestRange, Failure> {
    let bareblk_range { addr, len_bytes } = given;
    let max = u32::MAX.into();
    let too_long =
        |_| Failure::OutOfRange { argument: "length of a buffer", value: len_bytes.into(), min: 1, max };
    Ok(GuestRange { addr, len_bytes: u32::try_from(len_bytes).map_err(too_long)? })
}

pub(crate) fn durability(flags: u32) -> Result<Durability, Failure> {
    check_flags(flags, BAREBLK_DURABLE, "flags")?;
    Ok(if flags & BAREBLK_DURABLE == 0 { Durability::Cached } else { Durability::Durable })
}

fn check_flags(value: u32, known: u32, argument: &'static str) -> Result<(), Failure> {
    if value & !known != 0 {
        return Err(Failure::UnknownFlags { argument, value, known });
    }
    Ok(())
}

fn request(work: Work<'_>, token: u64, deadline_ns: u64) -> Request<'_> {
    let after = (deadline_ns != BAREBLK_FOREVER).then(|| Duration::from_nanos(deadline_ns));
    // A deadline beyond the clock's range means no deadline.
    let deadline = after.and_then(|after| Instant::now().checked_add(after));
    Request { deadline, ..Request::new(work, token) }
}
