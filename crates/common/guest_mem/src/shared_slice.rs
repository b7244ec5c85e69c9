//! Typed access to ring fields in guest memory that both sides may access at the same time.
//!
//! Values are little-endian in memory (virtio 1.3 §1.4.1) and native-endian for callers. The memory is only accessed
//! through atomics; a store also calls the store hook with its range.

use std::fmt;
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use vm_memory::{Address, GuestAddress};

use crate::memory::{AccessError, GuestMemory};

/// An integer that can live in memory shared with a running driver.
///
/// # Safety
/// `Atomic` must have the size and alignment of `Self`, any bit pattern must be valid for it, and all
/// its operations must be atomic.
pub unsafe trait Shared: Copy {
    /// The atomic type of the same width.
    type Atomic: Sync;
    /// Loads a little-endian value.
    fn load(cell: &Self::Atomic, order: Ordering) -> Self;
    /// Stores a value as little-endian.
    fn store(self, cell: &Self::Atomic, order: Ordering);
}

macro_rules! shared {
    ($($int:ty => $atomic:ty),*) => {$(
        // SAFETY: 1. std documents that the atomic has the integer's size and bit validity; the alignment is
        // checked when a slice is made.
        unsafe impl Shared for $int {
            type Atomic = $atomic;
            #[inline]
            fn load(cell: &$atomic, order: Ordering) -> $int {
                <$int>::from_le(cell.load(order))
            }
            #[inline]
            fn store(self, cell: &$atomic, order: Ordering) {
                cell.store(self.to_le(), order);
            }
        }
    )*};
}
shared!(u8 => AtomicU8, u16 => AtomicU16, u32 => AtomicU32, u64 => AtomicU64);

/// `len` values of type `T`, contiguous and aligned in one region of guest memory.
pub struct SharedSlice<T: Shared> {
    memory: Arc<GuestMemory>,
    guest_addr: GuestAddress,
    ptr: NonNull<T::Atomic>,
    len: usize,
    marker: PhantomData<T>,
}

// SAFETY: 1. the pointed-to memory is only accessed through atomics; 2. `memory` keeps it mapped.
unsafe impl<T: Shared> Send for SharedSlice<T> {}
// SAFETY: as for `Send`.
unsafe impl<T: Shared> Sync for SharedSlice<T> {}

impl<T: Shared> SharedSlice<T> {
    /// # Safety
    /// `ptr` must be aligned for `T::Atomic`, and `len` elements from it must be inside one region of `memory`.
    unsafe fn new(memory: Arc<GuestMemory>, guest_addr: GuestAddress, ptr: NonNull<u8>, len: usize) -> Self {
        Self { memory, guest_addr, ptr: ptr.cast(), len, marker: PhantomData }
    }

    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the slice is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The value at `index`; the next call may return a different one.
    #[inline]
    #[must_use]
    pub fn load(&self, index: usize, order: Ordering) -> T {
        T::load(self.cell(index), order)
    }

    /// The values at `index` and `index + 1`, each loaded once; the next call may return different ones. `None` if the
    /// slice is shorter.
    #[inline]
    #[must_use]
    pub fn get_pair(&self, index: usize, order: Ordering) -> Option<[T; 2]> {
        let second = index.checked_add(1).filter(|&second| second < self.len)?;
        Some([self.load(index, order), self.load(second, order)])
    }

    /// Stores `value` at `index`.
    #[inline]
    pub fn store(&self, index: usize, value: T, order: Ordering) {
        value.store(self.cell(index), order);
        let size_bytes = size_of::<T>() as u64;
        self.memory.note_store(self.guest_addr.0 + index as u64 * size_bytes, size_bytes);
    }

    /// Stores the two values at `index` and `index + 1`.
    #[inline]
    pub fn store_pair(&self, index: usize, [first, second]: [T; 2], order: Ordering) {
        second.store(self.cell(index + 1), order);
        first.store(self.cell(index), order);
        let size_bytes = size_of::<T>() as u64;
        self.memory.note_store(self.guest_addr.0 + index as u64 * size_bytes, 2 * size_bytes);
    }

    #[inline]
    fn cell(&self, index: usize) -> &T::Atomic {
        assert!(index < self.len, "ring index is ours and must be in range");
        // SAFETY: 1. `new` was given `len` elements and `index < len`.
        let cell = unsafe { self.ptr.add(index) };
        // SAFETY: 1. valid: in range, see above, and aligned as `new` requires; 2. alive: `memory` keeps it mapped
        // while `self`, and thus this borrow, exists; 3. shared: the driver may access it at the same time, and the
        // type is an atomic.
        unsafe { cell.as_ref() }
    }
}

impl GuestMemory {
    /// `len` values of type `T` at `addr`, for a part of a ring.
    ///
    /// # Errors
    /// [`AccessError`] if the values are misaligned, unmapped, or not inside one region.
    pub fn shared_slice<T: Shared>(
        self: &Arc<Self>,
        addr: GuestAddress,
        len: usize,
    ) -> Result<SharedSlice<T>, AccessError> {
        let align_bytes = align_of::<T::Atomic>();
        let len_bytes = len as u64 * size_of::<T>() as u64;
        let addr_value = addr.raw_value();
        let unmapped = AccessError::Unmapped { addr: addr_value, len_bytes };
        let (host, room_bytes) =
            self.find(addr_value).and_then(|span| span.at(addr_value)).ok_or(unmapped)?;
        if !addr_value.is_multiple_of(align_bytes as u64) || !host.as_ptr().addr().is_multiple_of(align_bytes)
        {
            return Err(AccessError::Misaligned { addr: addr_value, align_bytes });
        }
        if room_bytes < len_bytes {
            let split = self
                .check(addr_value, len_bytes)
                .map(|()| AccessError::Split { addr: addr_value, len_bytes });
            return Err(split.unwrap_or(unmapped));
        }
        // SAFETY: 1. aligned, checked above; 2. `len_bytes <= room_bytes`, so all values are inside one
        // region.
        Ok(unsafe { SharedSlice::new(Arc::clone(self), addr, host, len) })
    }
}

impl<T: Shared> fmt::Debug for SharedSlice<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { guest_addr, len, .. } = self;
        f.debug_struct("SharedSlice").field("guest_addr", guest_addr).field("len", len).finish()
    }
}
