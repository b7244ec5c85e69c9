//! All regions that a device gets, and which of them requests may refer to.
//!
//! - A region is added first (the back-end must learn of it) and then opened, so a request never refers to
//!   memory that the back-end does not know. It is closed before it is removed.
//! - Queues keep a copy of the open ranges ([`OpenRanges`]) and check one counter per request.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use guest_mem::{Address, GuestAddress, GuestMemory, GuestRange, Region, RegionSpec};
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};

use super::options::{OWN_MEMORY_START, PAGE_BYTES, PoolOptions, UserMemory};
use super::pool::Pool;
use crate::error::MemoryError;

/// Our own regions start at multiples of this: the largest page with which a back-end may map them.
const REGION_ALIGN_BYTES: u64 = 1 << 30;
/// Size of the pages that `huge_pages` requests.
const HUGE_PAGE_BYTES: u64 = 2 << 20;

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct MemoryMap {
    state: Mutex<State>,
    /// Changes whenever `State::open` changes.
    generation: AtomicU64,
}

#[derive(Debug)]
struct State {
    memory: Arc<GuestMemory>,
    /// Sorted by address.
    open: Vec<Span>,
    /// Guest address of the next region of our own.
    next_addr: u64,
}

/// The range `start..end` lies in one open region.
#[derive(Clone, Copy, Debug)]
struct Span {
    start: u64,
    end: u64,
}

impl Span {
    fn of(region: &Region) -> Self {
        Self { start: region.spec().guest_addr.raw_value(), end: region.guest_end() }
    }

    #[inline]
    fn holds(self, range: GuestRange) -> bool {
        range.addr >= self.start
            && range.addr < self.end
            && u64::from(range.len_bytes) <= self.end - range.addr
    }
}

impl MemoryMap {
    /// A map without memory.
    pub(crate) fn new() -> Arc<Self> {
        let state = State { memory: Arc::default(), open: Vec::new(), next_addr: OWN_MEMORY_START };
        Arc::new(Self { state: Mutex::new(state), generation: AtomicU64::new(0) })
    }

    /// All regions, to announce to the back-end.
    pub(crate) fn memory(&self) -> Arc<GuestMemory> {
        Arc::clone(&self.lock().memory)
    }

    /// Adds a region for rings and headers; requests cannot refer to it.
    ///
    /// # Errors
    /// [`MemoryError`].
    pub(crate) fn add_private(&self, size_bytes: u64) -> Result<Arc<Region>, MemoryError> {
        let mut state = self.lock();
        let region = Arc::new(Region::from_memfd(GuestAddress(state.next_addr), size_bytes)?);
        state.add(Arc::clone(&region))?;
        Ok(region)
    }

    /// Adds a pool for buffers, which is open at once.
    ///
    /// # Errors
    /// [`MemoryError`].
    pub(crate) fn add_pool(&self, options: PoolOptions) -> Result<Pool, MemoryError> {
        let region = {
            let mut state = self.lock();
            let region = Arc::new(pool_region(GuestAddress(state.next_addr), options)?);
            state.add(Arc::clone(&region))?;
            region
        };
        self.open(&region);
        Pool::new(region)
    }

    /// Adds a user's memory; the caller announces it and then opens it.
    ///
    /// # Errors
    /// [`MemoryError`].
    pub(crate) fn add_user(&self, memory: UserMemory) -> Result<Arc<Region>, MemoryError> {
        let UserMemory { fd, offset_bytes, len_bytes, addr } = memory;
        let page_bytes = rustix::param::page_size() as u64;
        if !offset_bytes.is_multiple_of(page_bytes) {
            return Err(MemoryError::Unaligned { offset_bytes, page_bytes });
        }
        let spec = RegionSpec {
            guest_addr: GuestAddress(addr),
            size_bytes: len_bytes,
            user_addr: addr,
            file_offset_bytes: offset_bytes,
        };
        let region = Arc::new(Region::map(spec, Arc::new(fd))?);
        let mut state = self.lock();
        state.memory = Arc::new(state.memory.with_region(Arc::clone(&region))?);
        Ok(region)
    }

    /// Lets requests refer to `region` from now on.
    pub(crate) fn open(&self, region: &Region) {
        let mut state = self.lock();
        state.open.push(Span::of(region));
        state.open.sort_by_key(|span| span.start);
        self.changed();
    }

    /// Stops requests from referring to the memory that begins at `addr`.
    pub(crate) fn close(&self, addr: u64) {
        self.lock().open.retain(|span| span.start != addr);
        self.changed();
    }

    /// Removes the region that begins at `addr`, which was closed before, and returns it.
    ///
    /// # Errors
    /// [`MemoryError::NotRegistered`].
    pub(crate) fn remove(&self, addr: u64) -> Result<Arc<Region>, MemoryError> {
        let mut state = self.lock();
        let found = state.memory.regions().iter().find(|r| r.spec().guest_addr.raw_value() == addr).cloned();
        let region = found.filter(|_| addr < OWN_MEMORY_START || addr >= state.next_addr);
        let region = region.ok_or(MemoryError::NotRegistered { addr })?;
        state.memory = Arc::new(state.memory.without_region(region.spec())?);
        Ok(region)
    }

    fn changed(&self) {
        // Release: pairs with the acquire in `OpenRanges::hold`; a thread that sees the new generation sees the new
        // ranges.
        self.generation.fetch_add(1, Ordering::Release);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn add(&mut self, region: Arc<Region>) -> Result<(), MemoryError> {
        let end = region.guest_end();
        self.memory = Arc::new(self.memory.with_region(region)?);
        // One alignment unit stays free after each region, so that an overrun does not reach the next region.
        self.next_addr = end.next_multiple_of(REGION_ALIGN_BYTES) + REGION_ALIGN_BYTES;
        Ok(())
    }
}

fn pool_region(guest_addr: GuestAddress, options: PoolOptions) -> Result<Region, MemoryError> {
    let unit_bytes = if options.huge_pages { HUGE_PAGE_BYTES } else { PAGE_BYTES };
    let wanted_bytes = options.size_bytes.max(1);
    let too_large = MemoryError::File { size_bytes: wanted_bytes, errno: rustix::io::Errno::FBIG };
    let size_bytes = wanted_bytes.checked_next_multiple_of(unit_bytes).ok_or(too_large)?;
    if !options.huge_pages {
        return Ok(Region::from_memfd(guest_addr, size_bytes)?);
    }
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    let failed = |errno| MemoryError::HugePages {
        pages: size_bytes / HUGE_PAGE_BYTES,
        page_bytes: HUGE_PAGE_BYTES,
        errno,
    };
    let fd = memfd_create("bareblk-pool", flags).map_err(failed)?;
    ftruncate(&fd, size_bytes).map_err(failed)?;
    // Allocates the pages now: a page that is missing later would cause a SIGBUS in the middle of a copy.
    fallocate(&fd, FallocateFlags::empty(), 0, size_bytes).map_err(failed)?;
    let user_addr = guest_addr.raw_value();
    let spec = RegionSpec { guest_addr, size_bytes, user_addr, file_offset_bytes: 0 };
    Ok(Region::map(spec, Arc::new(fd))?)
}

/// One queue's copy of the open ranges.
#[derive(Debug)]
pub(crate) struct OpenRanges {
    map: Arc<MemoryMap>,
    spans: Vec<Span>,
    generation: u64,
    /// Index of the range where the last buffer was found.
    hint: usize,
}

impl OpenRanges {
    /// A copy of `map`'s open ranges that follows their changes.
    pub(crate) fn new(map: Arc<MemoryMap>) -> Self {
        // A generation that no map has, so that the first check copies the ranges.
        Self { map, spans: Vec::new(), generation: u64::MAX, hint: 0 }
    }

    /// Whether all of `range` lies in one open region.
    #[inline]
    pub(crate) fn hold(&mut self, range: GuestRange) -> bool {
        // Acquire: pairs with the release in `MemoryMap::changed`.
        if self.map.generation.load(Ordering::Acquire) != self.generation {
            self.refresh();
        }
        if self.spans.get(self.hint).is_some_and(|span| span.holds(range)) {
            return true;
        }
        let found = self.spans.iter().position(|span| span.holds(range));
        self.hint = found.unwrap_or(self.hint);
        found.is_some()
    }

    #[cold]
    fn refresh(&mut self) {
        let state = self.map.lock();
        // Read under the lock, so that the generation and the ranges match.
        self.generation = self.map.generation.load(Ordering::Relaxed);
        self.spans.clone_from(&state.open);
    }
}
