//! Copies and prefetches the bytes of one call.

use guest_mem::FileMapping;

use crate::backend::Buffers;

/// Maximum number of bytes per call; the core resumes the rest. The same limit as for a call through the page cache, so
/// that one guest's large requests do not delay the worker's other guests.
pub(super) const MAX_COPY_BYTES: usize = 512 << 10;

const CACHE_LINE_BYTES: usize = 64;
/// Number of cache lines to prefetch. The processor's own prefetcher continues from there.
const PREFETCH_LINES: usize = 4;

/// Copies from the file to the buffers. Returns the bytes moved.
///
/// # Safety
/// The buffers must be mapped and writable, and no reference in this program may point to them.
#[inline]
pub(super) unsafe fn read(mapping: &FileMapping, offset_bytes: u64, buffers: &Buffers) -> u32 {
    // SAFETY: 1. the caller guarantees that the buffer is valid.
    let copy = |at, base, len_bytes| unsafe { mapping.copy_to(at, base, len_bytes) };
    // SAFETY: 1. the caller guarantees that the array is valid.
    unsafe { for_each_piece(offset_bytes, buffers, copy) }
}

/// Copies from the buffers to the file. Returns the bytes moved.
///
/// # Safety
/// The buffers must be mapped and readable, and no code in this program may write them meanwhile.
#[inline]
pub(super) unsafe fn write(mapping: &FileMapping, offset_bytes: u64, buffers: &Buffers) -> u32 {
    // SAFETY: 1. the caller guarantees that the buffer is valid.
    let copy = |at, base: *mut u8, len_bytes| unsafe { mapping.copy_from(at, base, len_bytes) };
    // SAFETY: 1. the caller guarantees that the array is valid.
    unsafe { for_each_piece(offset_bytes, buffers, copy) }
}

/// Calls `copy(file offset, buffer, length)` for each piece, up to [`MAX_COPY_BYTES`] in total.
///
/// # Safety
/// The array of buffers must be valid.
#[inline]
unsafe fn for_each_piece(
    offset_bytes: u64,
    buffers: &Buffers,
    mut copy: impl FnMut(u64, *mut u8, usize),
) -> u32 {
    let mut done = 0;
    let mut step = |base: *mut u8, len_bytes: usize| {
        let len_bytes = len_bytes.min(MAX_COPY_BYTES - done);
        copy(offset_bytes + done as u64, base, len_bytes);
        done += len_bytes;
    };
    match *buffers {
        Buffers::None => {}
        Buffers::One { base, len_bytes } => step(base, len_bytes as usize),
        Buffers::Many { first, count } => {
            // SAFETY: 1. the caller guarantees that the array is valid.
            let pieces = unsafe { std::slice::from_raw_parts(first, count as usize) };
            pieces.iter().for_each(|piece| step(piece.iov_base.cast(), piece.iov_len));
        }
    }
    #[allow(clippy::cast_possible_truncation)] // at most `MAX_COPY_BYTES`
    let done = done as u32;
    done
}

/// Address of the first buffer; null if there is none.
///
/// # Safety
/// The array of buffers must be valid.
#[inline]
pub(super) unsafe fn first_byte(buffers: &Buffers) -> *const u8 {
    match *buffers {
        Buffers::None => std::ptr::null(),
        Buffers::One { base, .. } => base,
        // SAFETY: 1. the caller guarantees the array, and the core makes no empty one.
        Buffers::Many { first, .. } => unsafe { (*first).iov_base.cast() },
    }
}

/// Prefetches the first cache lines of source and target, and thereby their address translations. Any address is
/// allowed: a prefetch does not fault.
#[inline]
pub(super) fn prefetch(source: *const u8, target: *const u8) {
    for line in 0..PREFETCH_LINES {
        prefetch_to_read(source.wrapping_add(line * CACHE_LINE_BYTES));
        prefetch_to_write(target.wrapping_add(line * CACHE_LINE_BYTES));
    }
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn prefetch_to_read(address: *const u8) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: 1. a hint: any address is allowed, and nothing is read.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
}

/// Inline assembly, because the intrinsic prefetches for writing only if the whole program is built for processors with
/// `PRFCHW`. Other processors treat the instruction as a no-op.
#[cfg(target_arch = "x86_64")]
#[inline]
fn prefetch_to_write(address: *const u8) {
    // SAFETY: 1. a hint: any address is allowed, and nothing is written.
    unsafe {
        std::arch::asm!("prefetchw [{address}]", address = in(reg) address,
            options(nostack, preserves_flags, readonly));
    }
}

#[cfg(target_arch = "aarch64")]
#[inline]
fn prefetch_to_read(address: *const u8) {
    // SAFETY: 1. a hint: any address is allowed, and nothing is read.
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{address}]", address = in(reg) address,
            options(nostack, preserves_flags, readonly));
    }
}

#[cfg(target_arch = "aarch64")]
#[inline]
fn prefetch_to_write(address: *const u8) {
    // SAFETY: 1. a hint: any address is allowed, and nothing is written.
    unsafe {
        std::arch::asm!("prfm pstl1keep, [{address}]", address = in(reg) address,
            options(nostack, preserves_flags, readonly));
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
#[inline]
fn prefetch_to_read(_address: *const u8) {}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
#[inline]
fn prefetch_to_write(_address: *const u8) {}
