//! The user's memory options, and the guest addresses of the library's own memory.

use std::os::fd::OwnedFd;

/// First guest address of our own memory: far above a heap that starts low, and below the addresses where
/// Linux maps files and stacks of programs with 47 or more address bits.
pub(crate) const OWN_MEMORY_START: u64 = 1 << 44;

/// Unit of the pool, and alignment of its buffers.
pub(crate) const PAGE_BYTES: u64 = 4096;

/// The pool's size and page type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolOptions {
    /// Rounded up to whole pages.
    pub size_bytes: u64,
    /// Use 2 MiB pages (they must be reserved: `vm.nr_hugepages`).
    pub huge_pages: bool,
}

/// The user's own memory: part of a file that both sides map (a memfd).
#[derive(Debug)]
pub struct UserMemory {
    /// The file.
    pub fd: OwnedFd,
    /// Offset of the memory in the file: a multiple of the page size.
    pub offset_bytes: u64,
    /// Length of the memory.
    pub len_bytes: u64,
    /// Address of the user's mapping: requests refer to buffers by these addresses.
    pub addr: u64,
}
