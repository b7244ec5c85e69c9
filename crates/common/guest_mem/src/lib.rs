//! Translates guest addresses to host memory that a hostile driver may write at any moment.
//!
//! `passed fd (charged to its disk: quota.rs) → Region (mapped, size checked) → GuestMemory (sorted table) → MemoryView (one queue's
//! cached translation) → SharedSlice (rings), IoVecs (data), read/store (headers, status)`
//!
//! - This crate hands out no `&[u8]` into guest memory, because the guest may write it at the same time.
//!   Rings are accessed through atomics, small pieces are copied with volatile accesses, and data is only
//!   passed to the kernel as pointers.
//! - Every store into guest memory calls [`GuestMemory::note_store`] with its range, after the store. The
//!   dirty log of live migration uses this hook (`dirty_log.rs`).
//! - Images in memory are copied through [`FileMapping`], under the same SIGBUS handler.
//! - A front-end that truncates the file under a region causes a SIGBUS that the process survives: see
//!   [`sigbus`].
//!
//! See also: the meaning of the bytes (`virtqueue`, `virtio_blk`), the origin of the fds (`blk_server`).

mod backing;
mod closing;
mod dirty_log;
mod file_mapping;
mod io_vecs;
mod memory;
mod quota;
mod region;
mod shared_slice;
pub mod sigbus;

pub use dirty_log::{DirtyLog, LOG_PAGE_BYTES, LoggedElsewhere, MAX_LOG_BYTES, StoreLog};
pub use file_mapping::{FileMapping, MappingAccess, tells_pages};
pub use io_vecs::{FillError, IoVecs, PieceCursor};
pub use memory::{
    AccessError, GuestMemory, GuestRange, MAX_GUEST_BYTES, MAX_REGIONS, MemoryError, MemoryView,
};
pub use quota::{Budget, Charge, Limits, PassedFd, Quota, QuotaError, Resource};
pub use region::{MapError, Region, RegionSpec};
pub use shared_slice::{Shared, SharedSlice};
pub use vm_memory::{Address, GuestAddress};

/// The example in README.md compiles and runs.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
#[derive(Debug)]
pub struct Readme;
