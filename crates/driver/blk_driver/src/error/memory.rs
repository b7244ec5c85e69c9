//! Why memory cannot be allocated or registered.

use guest_mem::MapError;
use rustix::io::Errno;

use super::message::MessageError;

/// Why memory cannot be allocated or registered.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The pool has no room for the buffer.
    #[error("the pool has no {wanted_bytes} contiguous bytes ({free_bytes} of {size_bytes} bytes are free)")]
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
    /// A file for memory cannot be created.
    #[error("cannot create a file for {size_bytes} bytes of memory: {errno}")]
    File {
        /** Requested size. */
        size_bytes: u64,
        /** The kernel's error. */
        errno: Errno,
    },
    /// Not enough huge pages are reserved.
    #[error(
        "cannot allocate {pages} huge pages of {page_bytes} bytes: {errno}; reserve them first (sysctl vm.nr_hugepages={pages})"
    )]
    HugePages {
        /** Pages needed. */
        pages: u64,
        /** Size of a page. */
        page_bytes: u64,
        /** The kernel's error. */
        errno: Errno,
    },
    /// The offset is not a multiple of the page size, so a back-end could not map it.
    #[error(
        "memory begins at byte {offset_bytes} of its file, which is not a multiple of the page size {page_bytes}"
    )]
    Unaligned {
        /** Offset of the memory in its file. */
        offset_bytes: u64,
        /** This machine's page size. */
        page_bytes: u64,
    },
    /// The back-end accepts no more regions.
    #[error("{count} memory regions are needed, but the back-end accepts at most {max}")]
    TooManyRegions {
        /** Number of regions, including the new one. */
        count: usize,
        /** The back-end's limit. */
        max: usize,
    },
    /// The back-end refused the memory.
    #[error("the back-end refused the guest memory")]
    Message(#[source] MessageError),
    /// The back-end has disconnected and the driver does not wait for another one, or it disconnected during the call.
    #[error("the back-end has disconnected")]
    Disconnected,
    /// No user memory begins at this address.
    #[error("no memory is registered at {addr:#x}")]
    NotRegistered {
        /** The address. */
        addr: u64,
    },
}
