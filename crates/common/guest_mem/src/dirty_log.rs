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
//! - Stores never go unrecorded: a memory that extends beyond its log is refused when either of them changes
//!   ([`GuestMemory::with_log`](crate::GuestMemory::with_log)).
//!
//! Spec: vhost-user, "Migration".

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::sync::atomic::fence;

use vm_memory::GuestAddress;

use crate::quota::PassedFd;
use crate::region::{MapError, Region, RegionSpec};

/// Guest bytes per bit, whatever the machine's page size is (`VHOST_LOG_PAGE`).
pub const LOG_PAGE_BYTES: u64 = 0x1000;
/// Guest bytes per byte of the log.
const BYTE_SPAN: u64 = 8 * LOG_PAGE_BYTES;
/// Limit of a mapped log: enough for all pages of 52-bit guest addresses.
pub const MAX_LOG_BYTES: u64 = (1 << 52) / BYTE_SPAN;

/// One bit per page, from guest address 0 on.
#[derive(Debug)]
pub struct DirtyLog(Arc<Region>);

impl DirtyLog {
    /// Maps `size_bytes` of one of our own files from `offset_bytes` on.
    ///
    /// # Errors
    /// [`MapError`]; nothing stays mapped.
    pub fn map(fd: OwnedFd, size_bytes: u64, offset_bytes: u64) -> Result<Self, MapError> {
        Region::map(log_spec(size_bytes, offset_bytes), Arc::new(fd)).map(Self::of_region)
    }

    /// Maps `size_bytes` of a file that a front-end passed.
    ///
    /// # Errors
    /// [`MapError`]; nothing stays mapped.
    pub fn map_passed(fd: PassedFd, size_bytes: u64, offset_bytes: u64) -> Result<Self, MapError> {
        Region::map_passed(log_spec(size_bytes, offset_bytes), fd).map(Self::of_region)
    }

    /// A log in our own memory, for tests and for front-ends.
    #[must_use]
    pub fn of_region(region: Region) -> Self {
        Self(Arc::new(region))
    }

    /// The mapped range and its file.
    #[must_use]
    pub fn region(&self) -> &Arc<Region> {
        &self.0
    }

    /// The first guest address without a bit.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.0.spec().size_bytes * BYTE_SPAN
    }

    /// Whether the front-end truncated the log's file: bits were lost.
    #[must_use]
    pub fn is_poisoned(&self) -> bool {
        // Acquire: loads before this check must not move after it.
        fence(Acquire);
        self.0.is_poisoned()
    }

    /// The front-end's side: clears all bits and returns the guest addresses of the pages whose bit was set.
    #[must_use]
    pub fn take(&self) -> Vec<u64> {
        let set = self.0.shared_bytes().iter().enumerate().flat_map(|(at, byte)| {
            // Acquire: pairs with the release in `mark`, so that a later read of the page sees that store. AcqRel, so
            // that the page is not read before the bit is cleared.
            let bits = byte.swap(0, AcqRel);
            (0..8)
                .filter(move |bit| bits >> bit & 1 != 0)
                .map(move |bit| at as u64 * BYTE_SPAN + bit * LOG_PAGE_BYTES)
        });
        set.collect()
    }

    /// Sets the bits of all pages that the range touches.
    fn mark(&self, addr: u64, len_bytes: u64) {
        let Some(last_byte) = len_bytes.checked_sub(1) else { return };
        let bytes = self.0.shared_bytes();
        let (mut page, last) = (addr / LOG_PAGE_BYTES, addr.saturating_add(last_byte) / LOG_PAGE_BYTES);
        while page <= last {
            let until = last.min(page | 7);
            let mask = (0xff_u8 << (page % 8)) & (0xff_u8 >> (7 - until % 8));
            let byte = usize::try_from(page / 8).ok().and_then(|at| bytes.get(at));
            debug_assert!(byte.is_some(), "the memory was checked against the log");
            let Some(byte) = byte else { return };
            // Release: pairs with the front-end's exchange; the page's new contents become visible before the bit.
            byte.fetch_or(mask, Release);
            page = until + 1;
        }
    }
}

/// The part of the file that a log uses.
fn log_spec(size_bytes: u64, offset_bytes: u64) -> RegionSpec {
    let size_bytes = size_bytes.min(MAX_LOG_BYTES);
    RegionSpec { guest_addr: GuestAddress(0), size_bytes, user_addr: 0, file_offset_bytes: offset_bytes }
}

/// The fields of `MemoryError::BeyondLog`.
pub(crate) struct BeyondLog {
    pub(crate) end: u64,
    pub(crate) log_bytes: u64,
    pub(crate) needed_bytes: u64,
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
    pub(crate) fn check(&self, memory_end: u64) -> Result<(), BeyondLog> {
        let log_end = self.bits.end();
        let ends = self.elsewhere.iter().map(|part| part.log_addr.saturating_add(part.len_bytes));
        match ends.chain([memory_end]).find(|&end| end > log_end) {
            None => Ok(()),
            Some(end) => {
                let (log_bytes, needed_bytes) = (self.bits.0.spec().size_bytes, end.div_ceil(BYTE_SPAN));
                Err(BeyondLog { end, log_bytes, needed_bytes })
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
