//! Buffers of a device's pool.

use std::ffi::{c_int, c_void};

use blk_driver::{Buffer, Device};

use crate::call::guarded;
use crate::device::{bareblk_device, on_device};
use crate::failure::Failure;
use crate::pointers;

/// A part of a device's pool. Several threads may use it at once. It may outlive its device.
#[derive(Debug)]
pub struct bareblk_buffer {
    buffer: Buffer,
}

/// Takes `len_bytes` from the pool, aligned to 4096; the contents are those of the last use. The caller owns the buffer
/// until bareblk_buffer_release.
///
/// Returns 0 or an error: BAREBLK_ERR_MEMORY, BAREBLK_ERR_INVALID. After an error, the handle is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_buffer_take(
    device: *const bareblk_device,
    len_bytes: u32,
    buffer: *mut *mut bareblk_buffer,
) -> c_int {
    let take = |device: &Device| {
        // SAFETY: the caller's promise: it may be written.
        unsafe { pointers::store(buffer, std::ptr::null_mut(), "buffer") }?;
        let taken = Box::new(bareblk_buffer { buffer: device.pool().take(len_bytes)? });
        // SAFETY: as above.
        unsafe { pointers::store(buffer, Box::into_raw(taken), "buffer") }?;
        Ok(0)
    };
    // SAFETY: the caller's promise.
    unsafe { on_device(device, take) }
}

/// Returns the buffer's address for bareblk_range, as the device knows it; it is not a pointer. 0 for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_buffer_addr(buffer: *const bareblk_buffer) -> u64 {
    // SAFETY: the caller's promise.
    let buffer = unsafe { pointers::shared(buffer, "buffer") };
    buffer.map_or(0, |buffer| buffer.buffer.range().addr)
}

/// Returns a pointer to the buffer's bytes. The device may change them at any moment while a request names them. NULL
/// for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_buffer_data(buffer: *const bareblk_buffer) -> *mut c_void {
    // SAFETY: the caller's promise.
    let buffer = unsafe { pointers::shared(buffer, "buffer") };
    buffer.map_or(std::ptr::null_mut(), |buffer| buffer.buffer.host_ptr().cast())
}

/// Copies `count` bytes into the buffer, from its byte `offset_bytes` on. `data` must not lie in the pool.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_buffer_write(
    buffer: *const bareblk_buffer,
    offset_bytes: u32,
    data: *const c_void,
    count: usize,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller's promise.
        let buffer = &unsafe { pointers::shared(buffer, "buffer") }?.buffer;
        inside(buffer, offset_bytes, count)?;
        // SAFETY: the caller's promise: `count` bytes that do not change.
        let data = unsafe { pointers::slice(data.cast::<u8>(), count, pointers::MAX_BYTES, "data") }?;
        buffer.write(offset_bytes, data);
        Ok(0)
    })
}

/// Copies `count` bytes out of the buffer, from its byte `offset_bytes` on. `out` must not lie in the pool.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_buffer_read(
    buffer: *const bareblk_buffer,
    offset_bytes: u32,
    out: *mut c_void,
    count: usize,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller's promise.
        let buffer = &unsafe { pointers::shared(buffer, "buffer") }?.buffer;
        inside(buffer, offset_bytes, count)?;
        // SAFETY: the caller's promise: no other thread uses these `count` bytes.
        let out = unsafe { pointers::slice_mut(out.cast::<u8>(), count, pointers::MAX_BYTES, "out") }?;
        buffer.read(offset_bytes, out);
        Ok(0)
    })
}

/// Checks first, because `Buffer` panics for a range outside.
fn inside(buffer: &Buffer, offset_bytes: u32, count: usize) -> Result<(), Failure> {
    let len_bytes = buffer.range().len_bytes;
    if u64::from(offset_bytes).saturating_add(count as u64) > u64::from(len_bytes) {
        return Err(Failure::OutsideBuffer { offset_bytes, count, len_bytes });
    }
    Ok(())
}

/// Returns the buffer to the pool, from where another call may take it. So no request in flight may name it. (After
/// BAREBLK_ERR_DEADLINE or BAREBLK_ERR_CANCELLED a request names it until BAREBLK_RETURNED; after BAREBLK_ERR_LOST see
/// bareblk_disconnect.) NULL does nothing.
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
