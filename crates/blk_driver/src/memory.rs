//! Memory that the device may use: a pool of our own, and what a user registers.
//!
//! Not here: headers, status bytes and tables of requests (`queue.rs` keeps those to itself).

use std::os::fd::OwnedFd;

use guest_mem::GuestRange;

/// How large the pool is and of what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolOptions {
    /// Rounded up to pages.
    pub size_bytes: u64,
    /// 2 MiB pages (they must be reserved: `vm.nr_hugepages`).
    pub huge_pages: bool,
}

/// Memory of the user's own: part of a file that both sides map (a memfd).
#[derive(Debug)]
pub struct UserMemory {
    /// The file.
    pub fd: OwnedFd,
    /// Where the memory begins in it.
    pub offset_bytes: u64,
    /// How long it is.
    pub len_bytes: u64,
    /// Where the user has it mapped: requests give buffers by these addresses.
    pub addr: u64,
}

/// Why memory cannot be had or registered.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// No room for a buffer.
    #[error("the pool has no {wanted_bytes} bytes in one piece ({free_bytes} of {size_bytes} are free)")]
    Exhausted {
        /** Asked for. */
        wanted_bytes: u64,
        /** In all. */
        free_bytes: u64,
        /** The pool's. */
        size_bytes: u64,
    },
}

/// Shared by everybody who has a buffer of it.
#[derive(Clone, Debug)]
pub struct Pool {}

impl Pool {
    /// A buffer of at least `len_bytes` (rounded up to 4096), aligned to 4096, zeroed or not.
    ///
    /// # Errors
    /// [`MemoryError::Exhausted`].
    pub fn take(&self, _len_bytes: u32) -> Result<Buffer, MemoryError> {
        todo!()
    }
}

/// Part of the pool; given back when dropped. Do not drop it while the device has it.
#[derive(Debug)]
pub struct Buffer {}

impl Buffer {
    /// For requests; sub-ranges are fine.
    #[must_use]
    pub fn range(&self) -> GuestRange {
        todo!()
    }
    /// Copies `bytes` to `offset_bytes`.
    ///
    /// # Panics
    /// If that is outside the buffer.
    pub fn write(&self, _offset_bytes: u32, _bytes: &[u8]) {
        todo!()
    }
    /// Copies from `offset_bytes` into `out`.
    ///
    /// # Panics
    /// If that is outside the buffer.
    pub fn read(&self, _offset_bytes: u32, _out: &mut [u8]) {
        todo!()
    }
}
