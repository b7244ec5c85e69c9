//! Guest addresses to host memory that a hostile driver may write at any moment.
//!
//! `passed fd (charged to its disk: quota.rs) → Region (mapped, size checked) → GuestMemory (sorted table) → MemoryView (one queue's
//! cached translation) → SharedSlice (rings), IoVecs (data), read/store (headers, status)`
//!
//! - Nothing here hands out a `&[u8]` into guest memory: the guest may write it meanwhile. Rings are
//!   atomics, small pieces are copied with volatile accesses, data is only ever a pointer for the kernel.
//! - Every store into guest memory passes [`GuestMemory::note_store`] with its range, after it was made: the dirty
//!   log of live migration hangs there (`dirty_log.rs`).
//! - Images in memory are copied from and into through [`FileMapping`], by the same handler.
//! - A front-end that truncates the file under a region causes SIGBUS, not death: see [`sigbus`].
//!
//! Not here: what the bytes mean (`virtqueue`, `virtio_blk`), where the fds come from (`blk_server`).

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

pub use dirty_log::{DirtyLog, DirtyLogError, LOG_PAGE_BYTES, LoggedElsewhere, MAX_LOG_BYTES, StoreLog};
pub use file_mapping::{FileMapping, MappingAccess};
pub use io_vecs::{FillError, IoVecs};
pub use memory::{
    AccessError, GuestMemory, GuestRange, MAX_GUEST_BYTES, MAX_REGIONS, MemoryError, MemoryView,
};
pub use quota::{Budget, Charge, Limits, PassedFd, Quota, QuotaError, Resource};
pub use region::{MapError, Region, RegionSpec};
pub use shared_slice::{Shared, SharedSlice};
pub use vm_memory::{Address, GuestAddress};
