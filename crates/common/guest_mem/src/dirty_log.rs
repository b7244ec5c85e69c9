//! The dirty log of live migration: a bit for each page that the device stored to, in the front-end's memory.
//!
//! `store → GuestMemory::note_store → StoreLog → DirtyLog: bit … front-end: takes the bit, copies the page`
//!
//! - A bit is set *after* its store. The front-end clears the bit first and then copies the page, so either
//!   that copy has the store or the bit is set again. If the bit were set before the store, the copy could
//!   fall between the two.
//! - A bit is set by a read-modify-write even if it is already set: a plain load could overtake the preceding
//!   store and see a bit that the front-end is about to clear.
//! - The owner of the file may truncate it at any time. The log is a mapping like guest memory, with the same
//!   handler.
//! - Nothing outside the log is written, and still no store goes unrecorded: a memory that extends beyond its
//!   log is refused when either of them changes ([`GuestMemory::with_log`](crate::GuestMemory::with_log)).
//!
//! Spec: vhost-user, "Migration".

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Release};

use vm_memory::GuestAddress;

use crate::memory::{AccessError, GuestMemory, MemoryError};
use crate::quota::PassedFd;
use crate::region::{MapError, Region, RegionSpec};
use crate::shared_slice::SharedSlice;

/// Guest bytes per bit, for any page size of the machine (`VHOST_LOG_PAGE`).
pub const LOG_PAGE_BYTES: u64 = 0x1000;
/// Guest bytes per byte of the log.
const BYTE_SPAN: u64 = 8 * LOG_PAGE_BYTES;
/// Most bytes of a log that are mapped: enough for all pages of 52-bit guest addresses.
pub const MAX_LOG_BYTES: u64 = (1 << 52) / BYTE_SPAN;

/// Why a dirty log cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DirtyLogError {
    /// The file does not hold the whole log, or cannot be mapped.
    #[error(transparent)]
    Map(#[from] MapError),
    /// Cannot occur for bytes.
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
    /// Maps `size_bytes` of one of our own files from `offset_bytes` on.
    ///
    /// # Errors
    /// [`DirtyLogError`]; nothing stays mapped.
    pub fn map(fd: OwnedFd, size_bytes: u64, offset_bytes: u64) -> Result<Self, DirtyLogError> {
        Self::of_region(Region::map(log_spec(size_bytes, offset_bytes), Arc::new(fd))?)
    }

    /// Maps `size_bytes` of a file that a front-end passed.
    ///
    /// # Errors
    /// [`DirtyLogError`]; nothing stays mapped.
    pub fn map_passed(fd: PassedFd, size_bytes: u64, offset_bytes: u64) -> Result<Self, DirtyLogError> {
        Self::of_region(Region::map_passed(log_spec(size_bytes, offset_bytes), fd)?)
    }

    /// A log in our own memory, in a region that begins at 0: for tests, and for front-ends.
    ///
    /// # Errors
    /// [`DirtyLogError::Access`] if it begins elsewhere.
    pub fn of_region(region: Region) -> Result<Self, DirtyLogError> {
        let len = usize::try_from(region.spec().size_bytes).unwrap_or(usize::MAX);
        let memory = Arc::new(GuestMemory::of_one(region));
        let bytes = memory.shared_slice(GuestAddress(0), len)?;
        Ok(Self { bytes, memory })
    }

    /// The mapped range and its file.
    #[must_use]
    pub fn region(&self) -> Option<&Arc<Region>> {
        self.memory.regions().first()
    }

    /// The first guest address without a bit.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.bytes.len() as u64 * BYTE_SPAN
    }

    /// Whether the front-end truncated the log's file: bits were lost.
    #[must_use]
    pub fn is_poisoned(&self) -> bool {
        self.memory.is_poisoned()
    }

    /// The front-end's side: clears all bits and returns the guest addresses of the pages whose bit was set.
    #[must_use]
    pub fn take(&self) -> Vec<u64> {
        let set = (0..self.bytes.len()).flat_map(|at| {
            // Acquire: pairs with the release in `mark`, so that a later read of the page sees that store.
            // AcqRel, so that the page is not read before.
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
            // Release: pairs with the front-end's exchange; the page's new contents become visible first.
            self.bytes.set_bits(at, mask, Release);
            page = until + 1;
        }
    }
}

/// The part of the file that a log needs.
fn log_spec(size_bytes: u64, offset_bytes: u64) -> RegionSpec {
    let size_bytes = size_bytes.min(MAX_LOG_BYTES);
    RegionSpec { guest_addr: GuestAddress(0), size_bytes, user_addr: 0, file_offset_bytes: offset_bytes }
}

/// Part of a ring whose stores the front-end also wants recorded at another log address (vhost-user,
/// `log_guest_addr`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoggedElsewhere {
    /// Guest address of the first byte.
    pub addr: u64,
    /// Length.
    pub len_bytes: u64,
    /// The log address that records the first byte; need not be in the guest's memory.
    pub log_addr: u64,
}

/// Where stores to a memory are recorded.
#[derive(Clone, Debug)]
pub struct StoreLog {
    bits: Arc<DirtyLog>,
    elsewhere: Box<[LoggedElsewhere]>,
    changed: Option<Arc<OwnedFd>>,
}

impl StoreLog {
    /// `changed`: the front-end's eventfd for change notifications.
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

    /// The eventfd for change notifications.
    #[must_use]
    pub fn changed(&self) -> Option<&Arc<OwnedFd>> {
        self.changed.as_ref()
    }

    /// Whether `other` is the same log and records the same stores.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        let fd = |log: &Self| log.changed.as_ref().map(Arc::as_ptr);
        Arc::ptr_eq(&self.bits, &other.bits) && self.elsewhere == other.elsewhere && fd(self) == fd(other)
    }

    /// Checks that the log has a bit for every address up to `memory_end`, and for the rings.
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
