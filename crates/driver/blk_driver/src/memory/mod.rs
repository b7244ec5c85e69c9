//! Memory that the device may use: our own pool, and memory that a user registers.
//!
//! `MemoryMap (all regions, told to the back-end) → open ranges → Queue::push looks each buffer up`
//!
//! - A request refers to its buffers by guest address. User memory keeps the address of the user's mapping.
//!   Our own memory gets guest addresses from [`OWN_MEMORY_START`] on, where no user's memory lies.
//! - Rings, headers, status bytes and tables lie in regions that are never open to requests.
//!
//! Not here: the layout of a queue's private region (`area.rs`), telling the back-end (`device.rs`).

mod map;
mod pool;

#[cfg(test)]
mod map_tests;

pub(crate) use map::{MemoryMap, OpenRanges};
pub use pool::{Buffer, Pool};

use std::os::fd::OwnedFd;

use guest_mem::MapError;
use rustix::io::Errno;

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

/// Why memory cannot be allocated or registered.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The pool has no room for the buffer.
    #[error("the pool has no {wanted_bytes} bytes in one piece ({free_bytes} of {size_bytes} are free)")]
    Exhausted {
        /** Requested size. */
        wanted_bytes: u64,
        /** Free bytes in total. */
        free_bytes: u64,
        /** The pool's size. */
        size_bytes: u64,
    },
    /// The kernel has no memory for a region, or cannot map a user's file.
    #[error("memory cannot be mapped")]
    Map(#[from] MapError),
    /// Regions overlap, or there are too many.
    #[error("memory cannot be registered")]
    Table(#[from] guest_mem::MemoryError),
    /// A memory file cannot be created.
    #[error("no file for {size_bytes} bytes of memory: {errno}")]
    File {
        /** Requested size. */
        size_bytes: u64,
        /** From the kernel. */
        errno: Errno,
    },
    /// Not enough huge pages are reserved.
    #[error(
        "no {pages} huge pages of {page_bytes} bytes: {errno}; reserve them first (sysctl vm.nr_hugepages={pages})"
    )]
    HugePages {
        /** Pages needed. */
        pages: u64,
        /** Size of a page. */
        page_bytes: u64,
        /** From the kernel. */
        errno: Errno,
    },
    /// The offset is not a multiple of the page size, so a back-end could not map it.
    #[error(
        "memory begins at byte {offset_bytes} of its file, which is not a multiple of the page size {page_bytes}"
    )]
    Unaligned {
        /** As given. */
        offset_bytes: u64,
        /** This machine's page size. */
        page_bytes: u64,
    },
    /// The back-end accepts no more regions.
    #[error("{count} memory regions, the back-end takes at most {max}")]
    TooManyRegions {
        /** Including the new one. */
        count: usize,
        /** The back-end's limit. */
        max: usize,
    },
    /// The back-end refused the memory.
    #[error("the back-end does not take the memory")]
    Message(#[source] crate::device::MessageError),
    /// The back-end is gone and the driver does not wait for another one, or it went away during the call.
    #[error("the back-end is gone")]
    Disconnected,
    /// No user memory begins at this address.
    #[error("no memory is registered at {addr:#x}")]
    NotRegistered {
        /** As given. */
        addr: u64,
    },
}
