//! Buffers of a device's pool.

use std::ffi::{c_int, c_void};

use blk_driver::{Buffer, Device};

use crate::call::guarded;
use crate::device::{bareblk_device, on_device};
use crate::failure::Failure;
use crate::pointers;

/// A buffer from a device's pool. Any number of threads may use it at once. It may outlive its device. Freed by
/// bareblk_buffer_release.
#[derive(Debug)]
pub struct bareblk_buffer {
    buffer: Buffer,
}

/// Takes a buffer of `len_bytes` bytes from the device's pool and stores its handle in `buffer`. The buffer is aligned
/// to 4096 bytes. Its contents are not cleared. The caller owns it until bareblk_buffer_release.
///
/// Returns 0 or an error: BAREBLK_ERR_INVALID, BAREBLK_ERR_MEMORY. After an error, the handle is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_buffer_take(
    device: *const bareblk_device,
    len_bytes: u32,
    buffer: *mut *mut bareblk_buffer,
) -> c_int {
    let take = |device: &Device| {
        // SAFETY: the caller's promise: `buffer` may be written.
        unsafe { pointers::store(buffer, std::ptr::null_mut(), "buffer") }?;
        let taken = Box::new(bareblk_buffer { buffer: device.pool().take(len_bytes)? });
        // SAFETY: as above.
        unsafe { pointers::store(buffer, Box::into_raw(taken), "buffer") }?;
        Ok(0)
    };
    // SAFETY: the caller upholds the contract of the C header.
    unsafe { on_device(device, take) }
}

/// Returns the buffer's address for bareblk_range.addr. It is the address by which the device knows the buffer, not a
/// pointer. Returns 0 if `buffer` is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_buffer_addr(buffer: *const bareblk_buffer) -> u64 {
    // SAFETY: the caller upholds the contract of the C header.
    let buffer = unsafe { pointers::shared(buffer, "buffer") };
    buffer.map_or(0, |buffer| buffer.buffer.range().addr)
}

/// Returns a pointer to the buffer's bytes, valid until bareblk_buffer_release. While a request uses the buffer, the
/// device may read and change the bytes at any moment. Returns NULL if `buffer` is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_buffer_data(buffer: *const bareblk_buffer) -> *mut c_void {
    // SAFETY: the caller upholds the contract of the C header.
    let buffer = unsafe { pointers::shared(buffer, "buffer") };
    buffer.map_or(std::ptr::null_mut(), |buffer| buffer.buffer.host_ptr().cast())
}

/// Copies `count` bytes from `data` into the buffer, starting at its byte `offset_bytes`. `data` must not be in the
/// pool.
///
/// Returns 0 or an error: BAREBLK_ERR_INVALID, for example because the bytes do not fit into the buffer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_buffer_write(
    buffer: *const bareblk_buffer,
    offset_bytes: u32,
    data: *const c_void,
    count: usize,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller upholds the contract of the C header.
        let buffer = &unsafe { pointers::shared(buffer, "buffer") }?.buffer;
        inside(buffer, offset_bytes, count)?;
        // SAFETY: the caller's promise: `data` has `count` bytes, which do not change.
        let data = unsafe { pointers::slice(data.cast::<u8>(), count, pointers::MAX_BYTES, "data") }?;
        buffer.write(offset_bytes, data);
        Ok(0)
    })
}

/// Copies `count` bytes from the buffer, from its byte `offset_bytes` on, to `out`. `out` must not be in the pool.
///
/// Returns 0 or an error: BAREBLK_ERR_INVALID, for example because the buffer has fewer bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_buffer_read(
    buffer: *const bareblk_buffer,
    offset_bytes: u32,
    out: *mut c_void,
    count: usize,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller upholds the contract of the C header.
        let buffer = &unsafe { pointers::shared(buffer, "buffer") }?.buffer;
        inside(buffer, offset_bytes, count)?;
        // SAFETY: the caller's promise: `out` has `count` bytes, which no other thread uses.
        let out = unsafe { pointers::slice_mut(out.cast::<u8>(), count, pointers::MAX_BYTES, "out") }?;
        buffer.read(offset_bytes, out);
        Ok(0)
    })
}

/// Checks the range first, because `Buffer` panics if it is outside.
fn inside(buffer: &Buffer, offset_bytes: u32, count: usize) -> Result<(), Failure> {
    let len_bytes = buffer.range().len_bytes;
    if u64::from(offset_bytes).saturating_add(count as u64) > u64::from(len_bytes) {
        return Err(Failure::OutsideBuffer { offset_bytes, count, len_bytes });
    }
    Ok(())
}

/// Returns the buffer to the pool and frees its handle. NULL has no effect. The device must no longer use the buffer,
/// because the pool may hand it out again at once: no request in flight may use it, and a request that ended with
/// BAREBLK_ERR_DEADLINE or BAREBLK_ERR_CANCELLED must have had its BAREBLK_RETURNED. For BAREBLK_ERR_LOST, see
/// bareblk_disconnect.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_buffer_release(buffer: *mut bareblk_buffer) {
    if buffer.is_null() {
        return;
    }
    guarded(|| {
        // SAFETY: 1. not NULL, hence from `Box::into_raw` in `bareblk_buffer_take`; 2. freed once, by the caller's promise.
        drop(unsafe { Box::from_raw(buffer) });
        Ok(0)
    });
}
