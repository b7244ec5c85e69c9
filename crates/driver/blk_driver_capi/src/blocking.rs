//! Blocking calls: each sends one request at a time and sleeps until it has ended.

use std::ffi::{c_int, c_void};
use std::time::Duration;

use crate::failure::Failure;
use crate::pointers::{self, MAX_BYTES};
use crate::queue::{bareblk_queue, on_queue};
use crate::request::{BAREBLK_UNMAP, bareblk_segment, durability};

/// Reads `count` bytes (a multiple of 512) from `sector` on (in units of 512 bytes) into `out`, and sleeps until the
/// read has ended. The data is copied through the pool; `out` must not be in the pool or in registered memory.
/// `limit_ns`: time limit of the call, in nanoseconds; BAREBLK_FOREVER: none. The queue must have no other requests in
/// flight.
///
/// Returns 0 or an error: an error of bareblk_push_read; the result of a request, from BAREBLK_ERR_IO to
/// BAREBLK_ERR_LOST (BAREBLK_ERR_DEADLINE: the time limit has passed); BAREBLK_ERR_BUSY: the queue has requests in
/// flight; BAREBLK_ERR_MEMORY: the pool has no room; BAREBLK_ERR_SYSTEM. After an error, `out` may be partly filled.
/// After every return, `out` belongs to the caller alone.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_read_blocking(
    queue: *mut bareblk_queue,
    sector: u64,
    out: *mut c_void,
    count: usize,
    limit_ns: u64,
) -> c_int {
    let read = |queue: &mut bareblk_queue| {
        // SAFETY: the caller's promise: `out` has `count` bytes, which no other thread uses.
        let out = unsafe { pointers::slice_mut(out.cast::<u8>(), count, MAX_BYTES, "out") }?;
        queue.queue.read_blocking(sector, out, Duration::from_nanos(limit_ns))?;
        Ok(0)
    };
    // SAFETY: the caller upholds the contract of the C header.
    unsafe { on_queue(queue, read) }
}

/// Writes `count` bytes (a multiple of 512) from `data` to the sectors from `sector` on. `flags`: BAREBLK_DURABLE, or 0
/// for a write that is durable only after the next flush. Otherwise like bareblk_read_blocking; the errors also include
/// BAREBLK_ERR_READ_ONLY. After an error, a part may have been written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_write_blocking(
    queue: *mut bareblk_queue,
    sector: u64,
    data: *const c_void,
    count: usize,
    flags: u32,
    limit_ns: u64,
) -> c_int {
    let write = |queue: &mut bareblk_queue| {
        let durability = durability(flags)?;
        // SAFETY: the caller's promise: `data` has `count` bytes, which do not change.
        let data = unsafe { pointers::slice(data.cast::<u8>(), count, MAX_BYTES, "data") }?;
        queue.queue.write_blocking(sector, data, durability, Duration::from_nanos(limit_ns))?;
        Ok(0)
    };
    // SAFETY: the caller upholds the contract of the C header.
    unsafe { on_queue(queue, write) }
}

/// Makes durable all writes that completed before the call. Otherwise like bareblk_read_blocking, but needs no room in
/// the pool.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_flush_blocking(queue: *mut bareblk_queue, limit_ns: u64) -> c_int {
    let flush = |queue: &mut bareblk_queue| {
        queue.queue.flush_blocking(Duration::from_nanos(limit_ns))?;
        Ok(0)
    };
    // SAFETY: the caller upholds the contract of the C header.
    unsafe { on_queue(queue, flush) }
}

/// Discards segments like bareblk_push_discard, with the same errors, and waits like bareblk_read_blocking. Needs no
/// room in the pool.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_discard_blocking(
    queue: *mut bareblk_queue,
    segments: *const bareblk_segment,
    count: usize,
    limit_ns: u64,
) -> c_int {
    let discard = |queue: &mut bareblk_queue| {
        // SAFETY: the caller's promise: `segments` has `count` elements, which do not change.
        unsafe { queue.take_segments(segments, count, 0) }?;
        let bareblk_queue { queue, segments, .. } = queue;
        queue.discard_blocking(segments, Duration::from_nanos(limit_ns))?;
        Ok(0)
    };
    // SAFETY: the caller upholds the contract of the C header.
    unsafe { on_queue(queue, discard) }
}

/// Zeroes segments like bareblk_push_write_zeroes, with the same errors, and waits like bareblk_read_blocking. Needs no
/// room in the pool.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_write_zeroes_blocking(
    queue: *mut bareblk_queue,
    segments: *const bareblk_segment,
    count: usize,
    limit_ns: u64,
) -> c_int {
    let zero = |queue: &mut bareblk_queue| {
        // SAFETY: the caller's promise: `segments` has `count` elements, which do not change.
        unsafe { queue.take_segments(segments, count, BAREBLK_UNMAP) }?;
        let bareblk_queue { queue, segments, .. } = queue;
        queue.write_zeroes_blocking(segments, Duration::from_nanos(limit_ns))?;
        Ok(0)
    };
    // SAFETY: the caller upholds the contract of the C header.
    unsafe { on_queue(queue, zero) }
}

/// Stores the device's serial in `id`: BAREBLK_ID_BYTES bytes, padded with zeroes; a serial of that length has no NUL
/// at its end. `count`: size of `id` in bytes, at least BAREBLK_ID_BYTES. Otherwise like bareblk_read_blocking.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_get_id_blocking(
    queue: *mut bareblk_queue,
    id: *mut c_void,
    count: usize,
    limit_ns: u64,
) -> c_int {
    let ask = |queue: &mut bareblk_queue| {
        // SAFETY: the caller's promise: `id` has `count` bytes, which no other thread uses.
        let out = unsafe { pointers::slice_mut(id.cast::<u8>(), count, MAX_BYTES, "id") }?;
        let (min, max) = (BAREBLK_ID_BYTES as i128, MAX_BYTES as i128);
        let Some(out) = out.first_chunk_mut::<BAREBLK_ID_BYTES>() else {
            return Err(Failure::OutOfRange { argument: "room for the id", value: count as i128, min, max });
        };
        *out = queue.queue.get_id_blocking(Duration::from_nanos(limit_ns))?;
        Ok(0)
    };
    // SAFETY: the caller upholds the contract of the C header.
    unsafe { on_queue(queue, ask) }
}

/// Size of a device's serial in bytes.
pub const BAREBLK_ID_BYTES: usize = 20;
