//! The pool: pages in one region, handed out as buffers.
//!
//! Pages are found first-fit under a mutex: programs take buffers at start-up, not per request. Buffers are
//! copied in and out; no reference points to their bytes, because the device may write them at any moment.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use guest_mem::{Address, GuestMemory, GuestRange, MemoryView, Region};

use super::options::PAGE_BYTES;
use crate::error::MemoryError;

/// A pool of pages, shared with all of its buffers.
#[derive(Clone, Debug)]
pub struct Pool {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    region: Arc<Region>,
    /// A memory table with this region only.
    memory: Arc<GuestMemory>,
    /// Free runs of pages, sorted; no two runs are adjacent.
    free: Mutex<Vec<Run>>,
}

/// A run, in pages from the start of the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    first: u64,
    pages: u64,
}

impl Run {
    fn end(self) -> u64 {
        self.first + self.pages
    }
}

impl Pool {
    pub(super) fn new(region: Arc<Region>) -> Result<Self, MemoryError> {
        let memory = Arc::new(GuestMemory::new(vec![Arc::clone(&region)])?);
        let pages = region.spec().size_bytes / PAGE_BYTES;
        let free = Mutex::new(vec![Run { first: 0, pages }]);
        Ok(Self { inner: Arc::new(Inner { region, memory, free }) })
    }

    /// A buffer of at least `len_bytes` (rounded up to 4096), aligned to 4096. Its contents are not cleared.
    ///
    /// # Errors
    /// [`MemoryError::Exhausted`].
    pub fn take(&self, len_bytes: u32) -> Result<Buffer, MemoryError> {
        let pages = u64::from(len_bytes.max(1)).div_ceil(PAGE_BYTES);
        let mut free = self.inner.lock();
        let Some(at) = free.iter().position(|run| run.pages >= pages) else {
            let free_bytes = free.iter().map(|run| run.pages * PAGE_BYTES).sum();
            let (wanted_bytes, size_bytes) = (pages * PAGE_BYTES, self.size_bytes());
            return Err(MemoryError::Exhausted { wanted_bytes, free_bytes, size_bytes });
        };
        let first = free[at].first;
        free[at] = Run { first: first + pages, pages: free[at].pages - pages };
        if free[at].pages == 0 {
            free.remove(at);
        }
        drop(free);
        Ok(Buffer { inner: Arc::clone(&self.inner), run: Run { first, pages }, len_bytes })
    }

    /// The pool's size.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.inner.region.spec().size_bytes
    }

    /// Free bytes; they may not be contiguous.
    #[must_use]
    pub fn free_bytes(&self) -> u64 {
        self.inner.lock().iter().map(|run| run.pages * PAGE_BYTES).sum()
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, Vec<Run>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn give_back(&self, run: Run) {
        let mut free = self.lock();
        let at = free.partition_point(|other| other.first < run.first);
        free.insert(at, run);
        join(&mut free, at);
        if let Some(before) = at.checked_sub(1) {
            join(&mut free, before);
        }
    }
}

/// Merges `free[at]` with the next run if they are adjacent.
fn join(free: &mut Vec<Run>, at: usize) {
    if let Some(&next) = free.get(at + 1)
        && free[at].end() == next.first
    {
        free[at].pages += next.pages;
        free.remove(at + 1);
    }
}

/// Part of the pool, returned to it when dropped. Do not drop it while the device uses it.
#[derive(Debug)]
pub struct Buffer {
    inner: Arc<Inner>,
    /// Empty if the pages must never be returned to the pool.
    run: Run,
    len_bytes: u32,
}

impl Buffer {
    /// The address range, for requests; a request may use a part of it. Its length is the one requested from the pool.
    #[must_use]
    pub fn range(&self) -> GuestRange {
        let base = self.inner.region.spec().guest_addr.raw_value();
        GuestRange { addr: base + self.run.first * PAGE_BYTES, len_bytes: self.len_bytes }
    }

    /// The address of this process's mapping, for callers that access it directly (C programs). The device
    /// may read and write it at any moment while a request refers to it.
    #[must_use]
    pub fn host_ptr(&self) -> *mut u8 {
        let (base, _) = self.inner.region.host_range();
        #[allow(clippy::cast_possible_truncation)] // inside a mapping
        let offset = (self.run.first * PAGE_BYTES) as usize;
        base.as_ptr().wrapping_add(offset)
    }

    /// Copies `bytes` into the buffer at `offset_bytes`.
    ///
    /// # Panics
    /// If that is outside the buffer.
    pub fn write(&self, offset_bytes: u32, bytes: &[u8]) {
        let addr = self.at(offset_bytes, bytes.len());
        let stored = MemoryView::new(Arc::clone(&self.inner.memory)).store(addr, bytes);
        assert!(stored.is_ok(), "a buffer lies in its pool");
    }

    /// Copies from the buffer at `offset_bytes` into `out`.
    ///
    /// # Panics
    /// If that is outside the buffer.
    pub fn read(&self, offset_bytes: u32, out: &mut [u8]) {
        let addr = self.at(offset_bytes, out.len());
        let read = MemoryView::new(Arc::clone(&self.inner.memory)).read(addr, out);
        assert!(read.is_ok(), "a buffer lies in its pool");
    }

    /// Drops the buffer without returning it to the pool: a device may write to it at any later time.
    pub(crate) fn abandon(mut self) {
        self.run.pages = 0;
    }

    fn at(&self, offset_bytes: u32, count: usize) -> u64 {
        let len_bytes = self.len_bytes;
        let end = u64::from(offset_bytes).saturating_add(count as u64);
        assert!(
            end <= u64::from(len_bytes),
            "{count} bytes at {offset_bytes} are outside a buffer of {len_bytes}"
        );
        self.range().addr + u64::from(offset_bytes)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.run.pages > 0 {
            self.inner.give_back(self.run);
        }
    }
}
