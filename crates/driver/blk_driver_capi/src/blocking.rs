//! One request at a time: each call sleeps until it is done.

use std::ffi::{c_int, c_void};
use std::time::Duration;

use crate::failure::Failure;
use crate::pointers::{self, MAX_BYTES};
use crate::queue::{bareblk_queue, on_queue};
use crate::request::{BAREBLK_UNMAP, bareblk_segment, durability};

/// Reads `count` bytes (a multiple of 512) from `sector` (of 512 bytes) on, copied through the pool. It sleeps until
/// the read is done, at most `limit_ns` nanoseconds (BAREBLK_FOREVER: without limit), and only works on a queue
/// without other requests in flight (else BAREBLK_ERR_BUSY). `out` must not lie in the pool or in registered memory.
///
/// Returns 0 or an error: those of bareblk_push_read, and those of completions. After an error, `out` may be filled in
/// part.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_read_blocking(
    queue: *mut bareblk_queue,
    sector: u64,
    out: *mut c_void,
    count: usize,
    limit_ns: u64,
) -> c_int {
    let read = |queue: &mut bareblk_queue| {
        // SAFETY: the caller's promise: no other thread uses these `count` bytes.
        let out = unsafe { pointers::slice_mut(out.cast::<u8>(), count, MAX_BYTES, "out") }?;
        queue.queue.read_blocking(sector, out, Duration::from_nanos(limit_ns))?;
        Ok(0)
    };
    // SAFETY: the caller's promise.
    unsafe { on_queue(queue, read) }
}

/// Writes `count` bytes (a multiple of 512) to `sector` on. `flags`: BAREBLK_DURABLE, or 0: durable after the next
/// flush. Otherwise as bareblk_read_blocking. After an error, a part may have been written.
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
        // SAFETY: the caller's promise: `count` bytes that do not change.
        let data = unsafe { pointers::slice(data.cast::<u8>(), count, MAX_BYTES, "data") }?;
        queue.queue.write_blocking(sector, data, durability, Duration::from_nanos(limit_ns))?;
        Ok(0)
    };
    // SAFETY: the caller's promise.
    unsafe { on_queue(queue, write) }
}

/// Makes all writes durable that completed before. Otherwise as bareblk_read_blocking.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_flush_blocking(queue: *mut bareblk_queue, limit_ns: u64) -> c_int {
    let flush = |queue: &mut bareblk_queue| {
        queue.queue.flush_blocking(Duration::from_nanos(limit_ns))?;
        Ok(0)
    };
    // SAFETY: the caller's promise.
    unsafe { on_queue(queue, flush) }
}

/// Discards segments as bareblk_push_discard does, and waits as bareblk_read_blocking does.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_discard_blocking(
    queue: *mut bareblk_queue,
    segments: *const bareblk_segment,
    count: usize,
    limit_ns: u64,
) -> c_int {
    let discard = |queue: &mut bareblk_queue| {
        // SAFETY: the caller's promise: `count` of them that do not change.
        unsafe { queue.take_segments(segments, count, 0) }?;
        let bareblk_queue { queue, segments, .. } = queue;
        queue.discard_blocking(segments, Duration::from_nanos(limit_ns))?;
        Ok(0)
    };
    // SAFETY: the caller's promise.
    unsafe { on_queue(queue, discard) }
}

/// Zeroes segments as bareblk_push_write_zeroes does, and waits as bareblk_read_blocking does.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_write_zeroes_blocking(
    queue: *mut bareblk_queue,
    segments: *const bareblk_segment,
    count: usize,
    limit_ns: u64,
) -> c_int {
    let zero = |queue: &mut bareblk_queue| {
        // SAFETY: the caller's promise: `count` of them that do not change.
        unsafe { queue.take_segments(segments, count, BAREBLK_UNMAP) }?;
        let bareblk_queue { queue, segments, .. } = queue;
        queue.write_zeroes_blocking(segments, Duration::from_nanos(limit_ns))?;
        Ok(0)
    };
    // SAFETY: the caller's promise.
    unsafe { on_queue(queue, zero) }
}

/// Stores the device's serial: BAREBLK_ID_BYTES bytes, padded with zeroes; a serial of that length has no NUL at its
/// end. `count` is the room at `id`, at least BAREBLK_ID_BYTES. Otherwise as bareblk_read_blocking.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_get_id_blocking(
    queue: *mut bareblk_queue,
    id: *mut c_void,
    count: usize,
    limit_ns: u64,
) -> c_int {
    let ask = |queue: &mut bareblk_queue| {
        // SAFETY: the caller's promise: no other thread uses these `count` bytes.
        let out = unsafe { pointers::slice_mut(id.cast::<u8>(), count, MAX_BYTES, "id") }?;
        let (min, max) = (BAREBLK_ID_BYTES as i128, MAX_BYTES as i128);
        let Some(out) = out.first_chunk_mut::<BAREBLK_ID_BYTES>() else {
            return Err(Failure::OutOfRange { argument: "room for the id", value: count as i128, min, max });
        };
        *out = queue.queue.get_id_blocking(Duration::from_nanos(limit_ns))?;
        Ok(0)
    };
    // SAFETY: the caller's promise.
    unsafe { on_queue(queue, ask) }
}

/// Bytes of a device's serial.
pub const BAREBLK_ID_BYTES: usize = 20;
