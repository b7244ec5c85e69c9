//! The buffers of one call as a sequence of bytes: which pieces a part of them covers, and copies into them.

use crate::backend::Buffers;

/// Total length of the buffers.
///
/// # Safety
/// The array of buffers must be valid.
pub(super) unsafe fn len_bytes(buffers: &Buffers) -> usize {
    let mut total = 0;
    // SAFETY: 1. the caller guarantees that the array is valid.
    unsafe { for_each(buffers, |_, len_bytes| total += len_bytes) };
    total
}

/// Calls `visit(address, length)` for each piece.
///
/// # Safety
/// The array of buffers must be valid.
#[inline]
unsafe fn for_each(buffers: &Buffers, mut visit: impl FnMut(*mut u8, usize)) {
    match *buffers {
        Buffers::None => {}
        Buffers::One { base, len_bytes } => visit(base, len_bytes as usize),
        Buffers::Many { first, count } => {
            // SAFETY: 1. the caller guarantees that the array is valid.
            let pieces = unsafe { std::slice::from_raw_parts(first, count as usize) };
            pieces.iter().for_each(|piece| visit(piece.iov_base.cast(), piece.iov_len));
        }
    }
}

/// Calls `visit(address, length)` for each piece of the bytes from `skip_bytes` on, up to `most_bytes` in total.
///
/// # Safety
/// The array of buffers must be valid.
#[inline]
pub(super) unsafe fn for_each_part(
    buffers: &Buffers,
    mut skip_bytes: usize,
    mut most_bytes: usize,
    mut visit: impl FnMut(*mut u8, usize),
) {
    let step = |base: *mut u8, len_bytes: usize| {
        let skipped = skip_bytes.min(len_bytes);
        skip_bytes -= skipped;
        let taken = (len_bytes - skipped).min(most_bytes);
        most_bytes -= taken;
        if taken > 0 {
            visit(base.wrapping_add(skipped), taken);
        }
    };
    // SAFETY: 1. the caller guarantees that the array is valid.
    unsafe { for_each(buffers, step) };
}

/// Copies `bytes` into the buffers from `at_bytes` on.
///
/// # Safety
/// The buffers must be mapped and writable, and no reference in this program may point to them.
#[inline]
pub(super) unsafe fn store(buffers: &Buffers, at_bytes: usize, mut bytes: &[u8]) {
    let most_bytes = bytes.len();
    let copy = |to: *mut u8, len_bytes: usize| {
        let (part, rest) = bytes.split_at(len_bytes);
        bytes = rest;
        // SAFETY: 1. `to`: the caller guarantees that the buffer is valid, and `for_each_part` stays inside; 2. the two do
        // not overlap: `part` is this program's own memory; 3. guests may access `to` at the same time: no reference to
        // it exists, and any bytes are valid.
        unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), to, len_bytes) };
    };
    // SAFETY: 1. the caller guarantees that the array is valid.
    unsafe { for_each_part(buffers, at_bytes, most_bytes, copy) };
}

/// Fills `len_bytes` of the buffers with zeroes from `at_bytes` on.
///
/// # Safety
/// As for [`store`].
pub(super) unsafe fn clear(buffers: &Buffers, at_bytes: usize, len_bytes: usize) {
    // SAFETY: 1. as in `store`.
    let clear = |to: *mut u8, len_bytes: usize| unsafe { std::ptr::write_bytes(to, 0, len_bytes) };
    // SAFETY: 1. the caller guarantees that the array is valid.
    unsafe { for_each_part(buffers, at_bytes, len_bytes, clear) };
}
