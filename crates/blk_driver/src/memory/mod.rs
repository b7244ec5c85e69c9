//! Memory that the device may use: a pool of our own, and what a user registers.
//!
//! `MemoryMap (all regions, told to the back-end) → open ranges → Queue::push looks each buffer up`
//!
//! - A request gives its buffers by guest address. User memory keeps the address that the user has it at; memory
//!   of our own gets guest addresses from [`OWN_MEMORY_START`] on, where no user's memory is found.
//! - Rings, headers, status bytes and tables lie in regions that are never open to requests.
//!
//! Not here: what lies where in a queue's own region (`area.rs`), telling the back-end (`device.rs`).

mod map;
mod pool;

#[cfg(test)]
mod map_tests;

pub(crate) use map::{MemoryMap, OpenRanges};
pub use pool::{Buffer, Pool};

use std::os::fd::OwnedFd;

use guest_mem::MapError;
use rustix::io::Errno;

/// First guest address of memory of our own: far above a heap that starts low, and below where Linux maps files
/// and stacks of programs with 47 or more bits of addresses.
pub(crate) const OWN_MEMORY_START: u64 = 1 << 44;

/// Unit of the pool, and alignment of its buffers.
pub(crate) const PAGE_BYTES: u64 = 4096;

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
    /// Where the memory begins in it: a multiple of the page size.
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
    /// The kernel has no memory for a region, or does not map a user's.
    #[error("memory cannot be mapped")]
    Map(#[from] MapError),
    /// Regions that overlap, or are too many.
    #[error("memory cannot be registered")]
    Table(#[from] guest_mem::MemoryError),
    /// A file for memory cannot be made.
    #[error("no file for {size_bytes} bytes of memory: {errno}")]
    File {
        /** Asked for. */
        size_bytes: u64,
        /** From the kernel. */
        errno: Errno,
    },
    /// Not enough huge pages are reserved.
    #[error(
        "no {pages} huge pages of {page_bytes} bytes: {errno}; reserve them first (sysctl vm.nr_hugepages={pages})"
    )]
    HugePages {
        /** Needed. */
        pages: u64,
        /** Each. */
        page_bytes: u64,
        /** From the kernel. */
        errno: Errno,
    },
    /// A back-end cannot map a file from the middle of a page on.
    #[error(
        "memory begins at byte {offset_bytes} of its file, which is not a multiple of the page size {page_bytes}"
    )]
    Unaligned {
        /** As given. */
        offset_bytes: u64,
        /** Of this machine. */
        page_bytes: u64,
    },
    /// The back-end takes no more regions.
    #[error("{count} memory regions, the back-end takes at most {max}")]
    TooManyRegions {
        /** With the one wanted. */
        count: usize,
        /** The back-end's. */
        max: usize,
    },
    /// The back-end did not take the memory.
    #[error("the back-end does not take the memory")]
    Message(#[source] crate::device::MessageError),
    /// The back-end is gone and will not be waited for, or went while it was told.
    #[error("the back-end is gone")]
    Disconnected,
    /// No user memory begins there.
    #[error("no memory is registered at {addr:#x}")]
    NotRegistered {
        /** As given. */
        addr: u64,
    },
}
