//! The dirty log of live migration: a bit for each page that the device stored to, in memory of the front-end's.
//!
//! `store → GuestMemory::note_store → StoreLog → DirtyLog: bit … front-end: takes the bit, copies the page`
//!
//! - A bit is set *after* the store that it stands for. The front-end clears it first and copies the page then: a
//!   store is in that copy, or its bit is set again. Set before the store, the copy could lie between the two.
//! - Set by a read-modify-write even where it is set already: a plain look can overtake the store before it, and see
//!   a bit that the front-end is about to clear.
//! - Whoever passes the file may cut it off at any time: it is a mapping like guest memory, under the same handler.
//! - Nothing outside the log is ever written, and nothing goes unnoted for that: a memory that reaches beyond its log
//!   is refused when either changes ([`GuestMemory::with_log`](crate::GuestMemory::with_log)).
//!
//! Spec: vhost-user, "Migration". Not here: its messages (`blk_server`), which stores there are (everywhere).

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Release};

use vm_memory::GuestAddress;

use crate::memory::{AccessError, GuestMemory, MemoryError};
use crate::quota::PassedFd;
use crate::region::{MapError, Region, RegionSpec};
use crate::shared_slice::SharedSlice;

/// What one bit stands for, whatever pages the machine has (`VHOST_LOG_PAGE`).
pub const LOG_PAGE_BYTES: u64 = 0x1000;
/// Guest addresses that one byte of the log stands for.
const BYTE_SPAN: u64 = 8 * LOG_PAGE_BYTES;
/// More is not mapped of a log: as much as guest addresses of 52 bits have pages.
pub const MAX_LOG_BYTES: u64 = (1 << 52) / BYTE_SPAN;

/// Why a dirty log cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DirtyLogError {
    /// The file does not hold it, or is none to map.
    #[error(transparent)]
    Map(#[from] MapError),
    /// Never, for bytes.
    #[error(transparent)]
    Access(#[from] AccessError),
}

/// The bits, from guest address 0 on.
#[derive(Debug)]
pub struct DirtyLog {
    bytes: SharedSlice<u8>,
    memory: Arc<GuestMemory>,
}

impl DirtyLog {
    /// Maps `size_bytes` of a file of our own from `offset_bytes` on.
    ///
    /// # Errors
    /// [`DirtyLogError`]; nothing stays mapped.
    pub fn map(fd: OwnedFd, size_bytes: u64, offset_bytes: u64) -> Result<Self, DirtyLogError> {
        Self::of_region(Region::map(log_spec(size_bytes, offset_bytes), Arc::new(fd))?)
    }

    /// The same of a file that a front-end has passed.
    ///
    /// # Errors
    /// [`DirtyLogError`]; nothing stays mapped.
    pub fn map_passed(fd: PassedFd, size_bytes: u64, offset_bytes: u64) -> Result<Self, DirtyLogError> {
        Self::of_region(Region::map_passed(log_spec(size_bytes, offset_bytes), fd)?)
    }

    /// A log of our own, in a region that begins at 0: for tests, and for front-ends.
    ///
    /// # Errors
    /// [`DirtyLogError::Access`] if it begins elsewhere.
    pub fn of_region(region: Region) -> Result<Self, DirtyLogError> {
        let len = usize::try_from(region.spec().size_bytes).unwrap_or(usize::MAX);
        let memory = Arc::new(GuestMemory::of_one(region));
        let bytes = memory.shared_slice(GuestAddress(0), len)?;
        Ok(Self { bytes, memory })
    }

    /// What is mapped, and of which file.
    #[must_use]
    pub fn region(&self) -> Option<&Arc<Region>> {
        self.memory.regions().first()
    }

    /// The first guest address that it has no bit for.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.bytes.len() as u64 * BYTE_SPAN
    }

    /// Whether the front-end has cut off its file: bits were lost.
    #[must_use]
    pub fn is_poisoned(&self) -> bool {
        self.memory.is_poisoned()
    }

    /// What a front-end does: clears all bits, and returns the guest addresses of the pages that had one.
    #[must_use]
    pub fn take(&self) -> Vec<u64> {
        let set = (0..self.bytes.len()).flat_map(|at| {
            // Acquire: pairs with the release in `mark`; what is read of the page now has that store. AcqRel, so
            // that it is not read before.
            let bits = self.bytes.take_bits(at, AcqRel);
            (0..8)
                .filter(move |bit| bits >> bit & 1 != 0)
                .map(move |bit| at as u64 * BYTE_SPAN + bit * LOG_PAGE_BYTES)
        });
        set.collect()
    }

    /// Sets the bits of all pages that the range touches.
    fn mark(&self, addr: u64, len_bytes: u64) {
        let Some(last_byte) = len_bytes.checked_sub(1) else { return };
        let (mut page, last) = (addr / LOG_PAGE_BYTES, addr.saturating_add(last_byte) / LOG_PAGE_BYTES);
        while page <= last {
            let until = last.min(page | 7);
            let mask = (0xff_u8 << (page % 8)) & (0xff_u8 >> (7 - until % 8));
            let at = usize::try_from(page / 8).ok().filter(|&at| at < self.bytes.len());
            debug_assert!(at.is_some(), "memory and log were compared before");
            let Some(at) = at else { return };
            // Release: pairs with the front-end's exchange; the page's new contents go first.
            self.bytes.set_bits(at, mask, Release);
            page = until + 1;
        }
    }
}

/// No more of the file than a log needs.
fn log_spec(size_bytes: u64, offset_bytes: u64) -> RegionSpec {
    let size_bytes = size_bytes.min(MAX_LOG_BYTES);
    RegionSpec { guest_addr: GuestAddress(0), size_bytes, user_addr: 0, file_offset_bytes: offset_bytes }
}

/// Part of a ring whose stores the front-end also wants noted elsewhere (vhost-user, `log_guest_addr`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoggedElsewhere {
    /// Guest address of the first byte.
    pub addr: u64,
    /// Length.
    pub len_bytes: u64,
    /// Where in the log the first byte is noted; need not be in the guest's memory.
    pub log_addr: u64,
}

/// Where a memory's stores are noted.
#[derive(Clone, Debug)]
pub struct StoreLog {
    bits: Arc<DirtyLog>,
    elsewhere: Box<[LoggedElsewhere]>,
    changed: Option<Arc<OwnedFd>>,
}

impl StoreLog {
    /// `changed`: an eventfd of the front-end's, which wants to be told of changes.
    #[must_use]
    pub fn new(
        bits: Arc<DirtyLog>,
        elsewhere: Box<[LoggedElsewhere]>,
        changed: Option<Arc<OwnedFd>>,
    ) -> Self {
        Self { bits, elsewhere, changed }
    }

    /// The log itself.
    #[must_use]
    pub fn bits(&self) -> &DirtyLog {
        &self.bits
    }

    /// Who wants to be told of changes.
    #[must_use]
    pub fn changed(&self) -> Option<&Arc<OwnedFd>> {
        self.changed.as_ref()
    }

    /// Whether it is the same log, in which the same is noted.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        let fd = |log: &Self| log.changed.as_ref().map(Arc::as_ptr);
        Arc::ptr_eq(&self.bits, &other.bits) && self.elsewhere == other.elsewhere && fd(self) == fd(other)
    }

    /// Whether there is a bit for everything up to `memory_end`, and for the rings.
    pub(crate) fn check(&self, memory_end: u64) -> Result<(), MemoryError> {
        let log_end = self.bits.end();
        let ends = self.elsewhere.iter().map(|part| part.log_addr.saturating_add(part.len_bytes));
        match ends.chain([memory_end]).find(|&end| end > log_end) {
            None => Ok(()),
            Some(end) => {
                let needed_bytes = end.div_ceil(BYTE_SPAN);
                Err(MemoryError::BeyondLog { end, log_bytes: self.bits.bytes.len() as u64, needed_bytes })
            }
        }
    }

    #[cold]
    pub(crate) fn note(&self, addr: u64, len_bytes: u64) {
        self.bits.mark(addr, len_bytes);
        for part in &self.elsewhere {
            let end = (addr.saturating_add(len_bytes)).min(part.addr.saturating_add(part.len_bytes));
            let start = addr.max(part.addr);
            if start < end {
                self.bits.mark(part.log_addr + (start - part.addr), end - start);
            }
        }
    }
}
