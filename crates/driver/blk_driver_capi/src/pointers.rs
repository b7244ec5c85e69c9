//! Pointers from C: checks for NULL, alignment and lengths; everything else is the caller's promise.
//!
//! Structures that may grow are passed with the size that the caller knows. A caller that knows fewer fields gets only
//! those; a caller that knows more fields gets zeroes in the others, and an error if it sets them.

use std::mem::size_of;

use crate::failure::Failure;

/// A type that consists of integers without padding, so that any bytes are a valid value.
///
/// # Safety
/// Each type must be `repr(C)`, have no padding, and consist of integers.
pub(crate) unsafe trait Plain: Copy {}

/// # Errors
/// `pointer` is NULL or not aligned.
fn check<T>(pointer: *const T, argument: &'static str) -> Result<(), Failure> {
    if pointer.is_null() {
        return Err(Failure::Null { argument });
    }
    if !pointer.is_aligned() {
        return Err(Failure::Misaligned { argument, align_bytes: align_of::<T>() });
    }
    Ok(())
}

/// # Errors
/// `pointer` is NULL or not aligned.
///
/// # Safety
/// If these checks pass, `pointer` is valid for `'a`, and no other code changes what it points to.
pub(crate) unsafe fn shared<'a, T>(pointer: *const T, argument: &'static str) -> Result<&'a T, Failure> {
    check(pointer, argument)?;
    // SAFETY: not NULL and aligned as checked; valid and unchanging by the caller's promise.
    Ok(unsafe { &*pointer })
}

/// # Errors
/// `pointer` is NULL or not aligned.
///
/// # Safety
/// If these checks pass, `pointer` is valid for `'a`, and no other code uses what it points to.
pub(crate) unsafe fn exclusive<'a, T>(pointer: *mut T, argument: &'static str) -> Result<&'a mut T, Failure> {
    check(pointer, argument)?;
    // SAFETY: not NULL and aligned as checked; valid and exclusive by the caller's promise.
    Ok(unsafe { &mut *pointer })
}

/// Stores an output.
///
/// # Errors
/// `pointer` is NULL or not aligned.
///
/// # Safety
/// If these checks pass, the memory at `pointer` may be written; it need not contain a valid value.
pub(crate) unsafe fn store<T>(pointer: *mut T, value: T, argument: &'static str) -> Result<(), Failure> {
    check(pointer, argument)?;
    // SAFETY: not NULL and aligned as checked; may be written by the caller's promise.
    unsafe { pointer.write(value) };
    Ok(())
}

/// The `count` elements at `pointer`, which may be NULL if `count` is 0.
///
/// # Errors
/// `pointer` is NULL or not aligned, or `count` is more than `max`.
///
/// # Safety
/// If these checks pass, all elements are valid for `'a`, and no other code changes them.
pub(crate) unsafe fn slice<'a, T>(
    pointer: *const T,
    count: usize,
    max: usize,
    argument: &'static str,
) -> Result<&'a [T], Failure> {
    check_count::<T>(count, max, argument)?;
    if count == 0 {
        return Ok(&[]);
    }
    check(pointer, argument)?;
    // SAFETY: 1. not NULL and aligned, and no more bytes than `isize::MAX`, as checked; 2. valid and unchanging by the
    // caller's promise; memory that C passes counts as initialised, whatever it contains.
    Ok(unsafe { std::slice::from_raw_parts(pointer, count) })
}

/// Like [`slice`], for elements to be written.
///
/// # Errors
/// Those of [`slice`].
///
/// # Safety
/// As for [`slice`], and no other code uses the elements.
pub(crate) unsafe fn slice_mut<'a, T>(
    pointer: *mut T,
    count: usize,
    max: usize,
    argument: &'static str,
) -> Result<&'a mut [T], Failure> {
    check_count::<T>(count, max, argument)?;
    if count == 0 {
        return Ok(&mut []);
    }
    check(pointer, argument)?;
    // SAFETY: 1. not NULL and aligned, and no more bytes than `isize::MAX`, as checked; 2. valid and exclusive by
    // the caller's promise; memory that C passes counts as initialised, whatever it contains.
    Ok(unsafe { std::slice::from_raw_parts_mut(pointer, count) })
}

/// The largest size of a Rust slice.
pub(crate) const MAX_BYTES: usize = isize::MAX.unsigned_abs();

fn check_count<T>(count: usize, max: usize, argument: &'static str) -> Result<(), Failure> {
    let max = max.min(MAX_BYTES / size_of::<T>().max(1));
    if count > max {
        let (value, max) = (count as i128, max as i128);
        return Err(Failure::OutOfRange { argument, value, min: 0, max });
    }
    Ok(())
}

/// Limit of the size of a structure that may grow.
const MAX_STRUCT_BYTES: usize = 4096;

/// Loads the structure at `pointer`, of which the caller knows `size_bytes` bytes. Fields that the caller does not know
/// have their values in `defaults`.
///
/// # Errors
/// `pointer` is NULL, no version has this size, or the caller set fields that this library does not know.
///
/// # Safety
/// If these checks pass, `size_bytes` bytes are valid at `pointer`, and no other code changes them.
pub(crate) unsafe fn load_sized<T: Plain>(
    pointer: *const T,
    size_bytes: usize,
    min_bytes: usize,
    defaults: T,
    argument: &'static str,
) -> Result<T, Failure> {
    check_size(size_bytes, min_bytes, argument)?;
    // SAFETY: the caller's promise, byte by byte.
    let given = unsafe { slice(pointer.cast::<u8>(), size_bytes, MAX_STRUCT_BYTES, argument) }?;
    let known = size_bytes.min(size_of::<T>());
    if let Some(at) = given[known..].iter().position(|&byte| byte != 0) {
        let (at_bytes, known_bytes) = (known + at, size_of::<T>());
        return Err(Failure::UnknownFields { argument, at_bytes, known_bytes });
    }
    let mut value = defaults;
    // SAFETY: 1. both have `known` bytes, and they do not overlap; 2. any bytes are a valid `Plain`.
    unsafe { std::ptr::copy_nonoverlapping(given.as_ptr(), (&raw mut value).cast::<u8>(), known) };
    Ok(value)
}

/// Stores as much of `value` as fits into `size_bytes`, followed by zeroes.
///
/// # Errors
/// `pointer` is NULL, or no version has this size.
///
/// # Safety
/// If these checks pass, `size_bytes` bytes at `pointer` may be written.
pub(crate) unsafe fn store_sized<T: Plain>(
    pointer: *mut T,
    size_bytes: usize,
    min_bytes: usize,
    value: &T,
    argument: &'static str,
) -> Result<(), Failure> {
    check_size(size_bytes, min_bytes, argument)?;
    // SAFETY: the caller's promise, byte by byte.
    let out = unsafe { slice_mut(pointer.cast::<u8>(), size_bytes, MAX_STRUCT_BYTES, argument) }?;
    // SAFETY: a `Plain` is integers without padding: each of its bytes has a value.
    let bytes = unsafe { std::slice::from_raw_parts(std::ptr::from_ref(value).cast::<u8>(), size_of::<T>()) };
    let known = size_bytes.min(bytes.len());
    out[..known].copy_from_slice(&bytes[..known]);
    out[known..].fill(0);
    Ok(())
}

fn check_size(size_bytes: usize, min_bytes: usize, argument: &'static str) -> Result<(), Failure> {
    if (min_bytes..=MAX_STRUCT_BYTES).contains(&size_bytes) {
        return Ok(());
    }
    let (value, min, max) = (size_bytes as i128, min_bytes as i128, MAX_STRUCT_BYTES as i128);
    Err(Failure::OutOfRange { argument, value, min, max })
}
