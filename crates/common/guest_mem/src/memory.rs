//! The table of regions that make up a guest's memory, and access by guest address.
//!
//! - A table never changes. When regions are added or removed, a session makes a new table and hands it to
//!   the queues. Tables share regions, so nothing is mapped twice.
//! - A range may cross from one region into an adjacent one, and is then split. A gap is an error.
//! - [`MemoryView`] is one queue's handle. It caches the regions of its last lookups, separately for headers and data.

use std::cell::Cell;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use vm_memory::{Address, GuestAddress};

use crate::dirty_log::{BeyondLog, StoreLog};
use crate::region::{Region, RegionSpec, Span};
use crate::sigbus;

/// Limit of regions per guest: the answer to `GET_MAX_MEM_SLOTS`. QEMU uses at most 512 slots. vhost-user requires at
/// least eight, as many as fit in one message.
pub const MAX_REGIONS: usize = 512;

/// Limit of memory per guest: more than the largest existing machines have, and less than the budget for all guests of
/// a process.
pub const MAX_GUEST_BYTES: u64 = 1 << 44;

/// A guest range of `len_bytes` from `addr` on, as in a descriptor; not yet checked against any memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GuestRange {
    /// Guest-physical address of the first byte.
    pub addr: u64,
    /// Length; descriptors have 32 bits for it (virtio 1.3 §2.7.5).
    pub len_bytes: u32,
}

/// Why an access by guest address is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AccessError {
    /// Part of the range is in no region.
    #[error("guest range {addr:#x} + {len_bytes} bytes is not entirely inside guest memory")]
    Unmapped {
        /** First address of the range. */
        addr: u64,
        /** Length of the range. */
        len_bytes: u64,
    },
    /// A ring part is not aligned (virtio 1.3 §2.7).
    #[error("guest address {addr:#x} is not a multiple of {align_bytes}")]
    Misaligned {
        /** The misaligned address. */
        addr: u64,
        /** Required alignment. */
        align_bytes: usize,
    },
    /// A ring part crosses from one region into the next.
    #[error(
        "guest range {addr:#x} + {len_bytes} bytes crosses memory regions, but a ring part must be inside one region"
    )]
    Split {
        /** First address of the range. */
        addr: u64,
        /** Length of the range. */
        len_bytes: u64,
    },
}

/// Why a set of regions cannot form a memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemoryError {
    /// Two regions claim the same guest addresses.
    #[error("memory regions at guest addresses {first:#x} and {second:#x} overlap")]
    Overlap {
        /** Start of the lower region. */
        first: u64,
        /** Start of the higher region. */
        second: u64,
    },
    /// There are more than [`MAX_REGIONS`] regions.
    #[error("{count} memory regions; at most {max} are allowed")]
    TooMany {
        /** The number of regions. */
        count: usize,
        /** [`MAX_REGIONS`]. */
        max: usize,
    },
    /// The regions together are larger than [`MAX_GUEST_BYTES`].
    #[error("memory regions have {size_bytes} bytes in total; at most {max_bytes} are allowed")]
    TooLarge {
        /** Sum of all regions. */
        size_bytes: u64,
        /** [`MAX_GUEST_BYTES`]. */
        max_bytes: u64,
    },
    /// Some guest addresses, or a ring's log address, have no bit in the dirty log.
    #[error(
        "dirty log has {log_bytes} bytes, but guest addresses below {end:#x} need {needed_bytes}: stores to some addresses could not be recorded"
    )]
    BeyondLog {
        /** First address after the range that needs bits. */
        end: u64,
        /** Size of the log. */
        log_bytes: u64,
        /** Log bytes needed for `end`. */
        needed_bytes: u64,
    },
    /// The region to remove does not exist.
    #[error("no memory region at guest address {guest_addr:#x} with {size_bytes} bytes")]
    NoSuchRegion {
        /** Guest address of the region. */
        guest_addr: u64,
        /** Size of the region. */
        size_bytes: u64,
    },
}

/// A guest's memory at one time: regions sorted by guest address, without overlaps.
#[derive(Debug, Default)]
pub struct GuestMemory {
    regions: Box<[Arc<Region>]>,
    /// Set only during a live migration.
    log: Option<Arc<StoreLog>>,
}

impl GuestMemory {
    /// # Errors
    /// [`MemoryError`] if regions overlap or are too many.
    pub fn new(mut regions: Vec<Arc<Region>>) -> Result<Self, MemoryError> {
        let count = regions.len();
        if count > MAX_REGIONS {
            return Err(MemoryError::TooMany { count, max: MAX_REGIONS });
        }
        let sizes = regions.iter().map(|region| region.spec().size_bytes);
        let size_bytes = sizes.fold(0, u64::saturating_add);
        if size_bytes > MAX_GUEST_BYTES {
            return Err(MemoryError::TooLarge { size_bytes, max_bytes: MAX_GUEST_BYTES });
        }
        regions.sort_by_key(|region| region.spec().guest_addr);
        for pair in regions.windows(2) {
            let (first, second) = (&pair[0], pair[1].spec().guest_addr.raw_value());
            if first.guest_end() > second {
                return Err(MemoryError::Overlap { first: first.spec().guest_addr.raw_value(), second });
            }
        }
        Ok(Self { regions: regions.into(), log: None })
    }

    /// A copy of this memory that records its stores in `log`, or does not record them if `log` is `None`. (A memory
    /// made from it by adding or removing a region records nothing.)
    ///
    /// # Errors
    /// [`MemoryError::BeyondLog`].
    pub fn with_log(&self, log: Option<Arc<StoreLog>>) -> Result<Self, MemoryError> {
        let end = self.regions.last().map_or(0, |region| region.guest_end());
        let refused = |BeyondLog { end, log_bytes, needed_bytes }| MemoryError::BeyondLog {
            end,
            log_bytes,
            needed_bytes,
        };
        log.as_ref().map_or(Ok(()), |log| log.check(end)).map_err(refused)?;
        Ok(Self { regions: self.regions.clone(), log })
    }

    /// The log that records stores, if there is one.
    #[inline]
    #[must_use]
    pub fn log(&self) -> Option<&Arc<StoreLog>> {
        self.log.as_ref()
    }

    /// Returns a copy of this memory map with `region` added.
    ///
    /// # Errors
    /// Those of [`GuestMemory::new`].
    pub fn with_region(&self, region: Arc<Region>) -> Result<Self, MemoryError> {
        Self::new(self.regions.iter().cloned().chain([region]).collect())
    }

    /// This memory without the region at these addresses. (`file_offset_bytes` is not compared: vhost-user
    /// `REM_MEM_REG` need not repeat it.)
    ///
    /// # Errors
    /// [`MemoryError::NoSuchRegion`].
    pub fn without_region(&self, spec: &RegionSpec) -> Result<Self, MemoryError> {
        let is_it = |region: &Arc<Region>| {
            let r = region.spec();
            (r.guest_addr, r.size_bytes, r.user_addr) == (spec.guest_addr, spec.size_bytes, spec.user_addr)
        };
        let (guest_addr, size_bytes) = (spec.guest_addr.raw_value(), spec.size_bytes);
        if !self.regions.iter().any(is_it) {
            return Err(MemoryError::NoSuchRegion { guest_addr, size_bytes });
        }
        Self::new(self.regions.iter().filter(|r| !is_it(r)).cloned().collect())
    }

    /// The regions, sorted by guest address.
    #[must_use]
    pub fn regions(&self) -> &[Arc<Region>] {
        &self.regions
    }

    /// Converts an address in the front-end's address space, as used to announce rings, to a guest address.
    #[must_use]
    pub fn user_to_guest(&self, user_addr: u64) -> Option<GuestAddress> {
        self.regions.iter().find_map(|region| {
            let spec = region.spec();
            let offset_bytes = user_addr.checked_sub(spec.user_addr)?;
            (offset_bytes < spec.size_bytes).then(|| spec.guest_addr.unchecked_add(offset_bytes))
        })
    }

    /// The first region in which an access found no page: the front-end truncated its file.
    #[must_use]
    pub fn poisoned(&self) -> Option<&Arc<Region>> {
        self.regions.iter().find(|region| region.is_poisoned())
    }

    /// Whether any region is poisoned. Costs almost nothing while no front-end has truncated a file.
    #[inline]
    #[must_use]
    pub fn is_poisoned(&self) -> bool {
        // Acquire: loads before this check must not move after it.
        fence(Ordering::Acquire);
        sigbus::faults() != 0 && self.poisoned().is_some()
    }

    /// Records a store into guest memory. Every store calls this with its range, after the store. If the call came
    /// before the store, the front-end could clear the bit and copy the page before the page changes.
    #[inline]
    pub fn note_store(&self, addr: u64, len_bytes: u64) {
        if let Some(log) = &self.log {
            log.note(addr, len_bytes);
        }
    }

    /// Whether stores are recorded.
    #[inline]
    #[must_use]
    pub fn logs_stores(&self) -> bool {
        self.log.is_some()
    }

    /// Checks that every byte of the range is in memory.
    ///
    /// # Errors
    /// [`AccessError::Unmapped`].
    pub fn check(&self, addr: u64, len_bytes: u64) -> Result<(), AccessError> {
        self.for_each_part(addr, len_bytes, &Cell::new(Span::NOWHERE), |_, _, _| ())
    }

    /// Calls `visit(host, part_bytes, done_bytes)` for each part of the range, in order. Fails at an unmapped part,
    /// after the parts before it were visited.
    #[inline]
    pub(crate) fn for_each_part(
        &self,
        addr: u64,
        len_bytes: u64,
        last: &Cell<Span>,
        mut visit: impl FnMut(NonNull<u8>, u64, u64),
    ) -> Result<(), AccessError> {
        let mut done_bytes = 0;
        while done_bytes < len_bytes {
            let unmapped = AccessError::Unmapped { addr, len_bytes };
            let at = addr.checked_add(done_bytes).ok_or(unmapped)?;
            let (host, room_bytes) = self.host_at(at, last).ok_or(unmapped)?;
            let part_bytes = room_bytes.min(len_bytes - done_bytes);
            visit(host, part_bytes, done_bytes);
            done_bytes += part_bytes;
        }
        Ok(())
    }

    /// Returns the host address of `addr`, and the number of bytes from there to the end of its region. `last` is a
    /// cached span of this memory.
    #[inline]
    fn host_at(&self, addr: u64, last: &Cell<Span>) -> Option<(NonNull<u8>, u64)> {
        last.get().at(addr).or_else(|| {
            let span = self.find(addr)?;
            last.set(span);
            span.at(addr)
        })
    }

    /// The region that may contain `addr`.
    #[inline(never)]
    pub(crate) fn find(&self, addr: u64) -> Option<Span> {
        let after = self.regions.partition_point(|r| r.spec().guest_addr.raw_value() <= addr);
        Some(self.regions[after.checked_sub(1)?].span())
    }
}

/// One queue's handle on the guest's memory. It caches the last lookups of headers and data separately: a front-end may
/// put them in different regions, where a single entry would always miss.
#[derive(Clone, Debug)]
pub struct MemoryView {
    /// Keeps the memory of the cached spans mapped.
    memory: Arc<GuestMemory>,
    /// The span found by the last lookup of copied data: headers, status bytes, tables.
    small: Cell<Span>,
    /// The span found by the last lookup of a buffer that the kernel reads or fills.
    data: Cell<Span>,
}

impl MemoryView {
    /// A view of `memory`.
    #[must_use]
    pub fn new(memory: Arc<GuestMemory>) -> Self {
        Self { memory, small: Cell::new(Span::NOWHERE), data: Cell::new(Span::NOWHERE) }
    }

    /// The memory of this view.
    #[must_use]
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// Whether a page of the memory is missing because its file was truncated. Bytes read from the memory may then be
    /// zeroes of this process.
    #[inline]
    #[must_use]
    pub fn is_poisoned(&self) -> bool {
        self.memory.is_poisoned()
    }

    /// Checks that every byte of the range is in memory.
    ///
    /// # Errors
    /// [`AccessError::Unmapped`].
    #[inline]
    pub fn check(&self, addr: u64, len_bytes: u64) -> Result<(), AccessError> {
        match self.memory.host_at(addr, &self.small) {
            Some((_, room_bytes)) if room_bytes >= len_bytes => Ok(()),
            _ => self.check_parts(addr, len_bytes),
        }
    }

    /// Slow path: the range crosses regions, or is not fully mapped.
    #[cold]
    fn check_parts(&self, addr: u64, len_bytes: u64) -> Result<(), AccessError> {
        self.memory.for_each_part(addr, len_bytes, &self.small, |_, _, _| ())
    }

    /// Copies `out.len()` bytes from `addr` out of guest memory.
    ///
    /// # Errors
    /// [`AccessError::Unmapped`]; `out` may be partly filled then.
    #[inline]
    pub fn read(&self, addr: u64, out: &mut [u8]) -> Result<(), AccessError> {
        match self.memory.host_at(addr, &self.small) {
            Some((host, room_bytes)) if room_bytes >= out.len() as u64 => {
                copy_once(host, out);
                Ok(())
            }
            _ => self.read_parts(addr, out),
        }
    }

    /// The two little-endian words at `addr`, each read once. `None` if they are not aligned in one region:
    /// [`MemoryView::read`] then copies them, or reports why it cannot.
    #[inline]
    #[must_use]
    pub fn word_pair(&self, addr: u64) -> Option<[u64; 2]> {
        let (host, room_bytes) = self.memory.host_at(addr, &self.small)?;
        let first = host.cast::<u64>();
        if room_bytes < 2 * size_of::<u64>() as u64 || !first.is_aligned() {
            return None;
        }
        // SAFETY: 1. the region has two words from `host` on, and `self.memory` keeps it mapped.
        let second = unsafe { first.add(1) };
        // SAFETY: 1. mapped, see above; 2. aligned, checked above; 3. volatile: read exactly once.
        let first = unsafe { first.read_volatile() };
        // SAFETY: as above.
        let second = unsafe { second.read_volatile() };
        Some([u64::from_le(first), u64::from_le(second)])
    }

    /// Slow path: the range crosses regions, or is not fully mapped.
    #[cold]
    fn read_parts(&self, addr: u64, out: &mut [u8]) -> Result<(), AccessError> {
        self.memory.for_each_part(addr, out.len() as u64, &self.small, |host, part_bytes, done_bytes| {
            #[allow(clippy::cast_possible_truncation)] // both at most `out.len()`
            let (part, done) = (part_bytes as usize, done_bytes as usize);
            copy_once(host, &mut out[done..done + part]);
        })
    }

    /// Copies `bytes` to `addr` in guest memory.
    ///
    /// # Errors
    /// [`AccessError::Unmapped`]; nothing is stored then.
    #[inline]
    pub fn store(&self, addr: u64, bytes: &[u8]) -> Result<(), AccessError> {
        let len_bytes = bytes.len() as u64;
        match self.memory.host_at(addr, &self.small) {
            Some((host, room_bytes)) if room_bytes >= len_bytes => put_once(host, bytes),
            _ => self.store_parts(addr, bytes)?,
        }
        self.memory.note_store(addr, len_bytes);
        Ok(())
    }

    /// Stores one byte at `addr` in guest memory.
    ///
    /// # Errors
    /// [`AccessError::Unmapped`].
    #[inline]
    pub fn store_byte(&self, addr: u64, byte: u8) -> Result<(), AccessError> {
        let unmapped = AccessError::Unmapped { addr, len_bytes: 1 };
        let (host, _) = self.memory.host_at(addr, &self.small).ok_or(unmapped)?;
        // SAFETY: 1. the region has at least this byte at `host`, and `self.memory` keeps it mapped; 2. volatile: the
        // guest may read it at any time.
        unsafe { host.write_volatile(byte) };
        self.memory.note_store(addr, 1);
        Ok(())
    }

    /// Slow path: the range crosses regions, or is not fully mapped. Checks the whole range before it stores
    /// anything.
    #[cold]
    fn store_parts(&self, addr: u64, bytes: &[u8]) -> Result<(), AccessError> {
        let len_bytes = bytes.len() as u64;
        self.memory.for_each_part(addr, len_bytes, &self.small, |_, _, _| ())?;
        self.memory.for_each_part(addr, len_bytes, &self.small, |host, part_bytes, done_bytes| {
            #[allow(clippy::cast_possible_truncation)] // both at most `bytes.len()`
            let (part, done) = (part_bytes as usize, done_bytes as usize);
            put_once(host, &bytes[done..done + part]);
        })
    }

    /// The host address of a buffer for the kernel, if the range is inside one region.
    #[inline]
    pub(crate) fn host_of(&self, range: GuestRange) -> Option<NonNull<u8>> {
        let (host, room_bytes) = self.memory.host_at(range.addr, &self.data)?;
        (room_bytes >= u64::from(range.len_bytes)).then_some(host)
    }

    /// Splits `range` into host parts for the kernel.
    pub(crate) fn for_each_part(
        &self,
        range: GuestRange,
        mut visit: impl FnMut(NonNull<u8>, u64),
    ) -> Result<(), AccessError> {
        let len_bytes = u64::from(range.len_bytes);
        self.memory.for_each_part(range.addr, len_bytes, &self.data, |host, part, _| visit(host, part))
    }
}

/// Copies mapped memory and reads each byte exactly once, so that a check of the copy holds for its later
/// use. The compiler may replace reads of a plain copy by reads of its source.
#[inline]
fn copy_once(host: NonNull<u8>, out: &mut [u8]) {
    const WORD: usize = size_of::<u64>();
    let aligned = host.as_ptr().addr().is_multiple_of(WORD);
    let words = if aligned { out.len() / WORD } else { 0 };
    for at in 0..words {
        // SAFETY: 1. the caller passes as many mapped bytes as `out` has, and `words` words fit.
        let source = unsafe { host.as_ptr().cast::<u64>().add(at) };
        // SAFETY: 1. mapped, see above; 2. aligned, checked above; 3. volatile: read exactly once.
        let word = unsafe { source.read_volatile() };
        out[at * WORD..][..WORD].copy_from_slice(&word.to_ne_bytes());
    }
    for (at, byte) in out.iter_mut().enumerate().skip(words * WORD) {
        // SAFETY: 1. as above, `at < out.len()`.
        let source = unsafe { host.as_ptr().add(at) };
        // SAFETY: 1. mapped; bytes have no alignment; 2. volatile: read exactly once.
        *byte = unsafe { source.read_volatile() };
    }
}

/// Copies into mapped memory and writes each byte once.
#[inline]
fn put_once(host: NonNull<u8>, bytes: &[u8]) {
    const WORD: usize = size_of::<u64>();
    let aligned = host.as_ptr().addr().is_multiple_of(WORD);
    let words = if aligned { bytes.len() / WORD } else { 0 };
    let (whole, rest) = bytes.split_at(words * WORD);
    for (at, word) in whole.as_chunks::<WORD>().0.iter().enumerate() {
        // SAFETY: 1. the caller passes as many mapped bytes as `bytes` has, and `words` words fit.
        let target = unsafe { host.as_ptr().cast::<u64>().add(at) };
        // SAFETY: 1. mapped, see above; 2. aligned, checked above; 3. volatile: the guest may read it at any
        // time.
        unsafe { target.write_volatile(u64::from_ne_bytes(*word)) };
    }
    for (at, &byte) in (words * WORD..).zip(rest) {
        // SAFETY: 1. as above, `at < bytes.len()`.
        let target = unsafe { host.as_ptr().add(at) };
        // SAFETY: 1. mapped, see above; bytes have no alignment; 2. volatile: the guest may read it at any
        // time.
        unsafe { target.write_volatile(byte) };
    }
}
