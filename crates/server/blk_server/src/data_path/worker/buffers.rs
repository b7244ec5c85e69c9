//! An engine's pool of buffer descriptions. Each request borrows one that is large enough.
//!
//! - The pool has enough small descriptions for all requests of the engine. A few large descriptions serve requests
//!   with many pieces.
//! - Each disk has its share of the large descriptions (`io_engine::Shares`). A request that gets no description waits
//!   in its ring until its disk returns one.
//! - The pool grows when queues start, not per request. All queues that use the engine share it.

use std::sync::Arc;

use guest_mem::{FillError, GuestMemory, GuestRange, IoVecs, MemoryView};
use io_engine::{FileId, LEAST_SHARE, Shares};
use virtio_blk::Data;

/// Pieces of a small description. Most requests have one to four.
const SMALL_PIECES: usize = 8;
/// Pieces of a large description: a chain of 1024 descriptors, each split between two regions.
const LARGE_PIECES: usize = 2048;
/// Large descriptions per engine, 32 KiB each. With many disks there are more, because each disk keeps its reserve.
const LARGE_COUNT: u32 = 32;
/// The smallest reserve of a disk.
const LEAST_LARGE: u32 = 1;

/// Maximum number of requests in an engine of this depth. The first disk may have as many as the depth. Each further
/// disk may add its reserve, which shrinks as disks are added (`io_engine::Shares`).
fn most_requests(depth: usize, disks: usize) -> usize {
    let added: usize = (2..=disks).map(|disks| (depth / (2 * disks)).max(LEAST_SHARE)).sum();
    depth + added + disks * LEAST_SHARE
}

/// Why a request gets no buffers.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NoBuffers {
    /// The disk has used up its share. Retry when one of its requests completes.
    Exhausted,
    /// The data is not in guest memory, or has too many pieces.
    Refused(FillError),
}

/// The buffer descriptions of one engine.
#[derive(Debug)]
pub(crate) struct BufferPool {
    small: Vec<IoVecs>,
    large: Vec<IoVecs>,
    /// Each disk's share of the large descriptions.
    shares: Shares,
    /// Number of large descriptions, in the pool or in use.
    large_made: usize,
    /// Number of small descriptions, in the pool or in use; at most `limit`.
    made: usize,
    depth: usize,
    limit: usize,
    disks: usize,
}

impl BufferPool {
    /// Makes a pool for an engine of this depth.
    pub(crate) fn new(depth: usize) -> Self {
        let shares = Shares::new(LARGE_COUNT, LEAST_LARGE);
        let (small, large) = (Vec::new(), Vec::new());
        Self { small, large, shares, large_made: 0, made: 0, depth, limit: depth, disks: 0 }
    }

    /// Adds a disk.
    pub(crate) fn attach(&mut self, file: FileId) {
        self.shares.attach(file);
        self.disks += 1;
        // This is the engine's own limit of requests, including the shares of its files. Small descriptions therefore
        // never run out before the engine is full.
        self.limit = self.limit.max(most_requests(self.depth, self.disks));
        self.make_large();
    }

    /// Removes a disk that has no requests in flight.
    pub(crate) fn detach(&mut self, file: FileId) {
        self.shares.detach(file);
        self.disks -= 1;
        self.make_large();
    }

    fn make_large(&mut self) {
        let places = usize::try_from(self.shares.places()).unwrap_or(usize::MAX);
        self.large.reserve(places - self.large.len());
        self.large.extend((self.large_made..places).map(|_| IoVecs::with_capacity(LARGE_PIECES)));
        self.large_made = places;
    }

    /// Adds small descriptions for `requests` more requests in flight, up to the limit.
    pub(crate) fn reserve(&mut self, requests: usize) {
        let new = requests.min(self.limit - self.made);
        self.small.reserve(self.limit);
        self.small.extend((0..new).map(|_| IoVecs::with_capacity(SMALL_PIECES)));
        self.made += new;
    }

    /// Describes `data` in `view` for a request of the disk `file`.
    #[inline(always)] // the compiler would make it a call for each request
    pub(crate) fn fill(
        &mut self,
        file: FileId,
        view: &MemoryView,
        data: Data<'_>,
    ) -> Result<IoVecs, NoBuffers> {
        if let (Some(small), Some(range)) = (self.small.last_mut(), data.only_range())
            && small.fill_one(view, range)
        {
            return self.small.pop().ok_or(NoBuffers::Exhausted);
        }
        self.fill_ranges(file, view, data.ranges())
    }

    #[inline(never)] // inlined, it would take registers from the path for requests with one buffer
    fn fill_ranges(
        &mut self,
        file: FileId,
        view: &MemoryView,
        ranges: impl Iterator<Item = GuestRange> + Clone,
    ) -> Result<IoVecs, NoBuffers> {
        let small = self.small.last_mut().ok_or(NoBuffers::Exhausted)?;
        match small.fill(view, ranges.clone()) {
            Ok(()) => self.small.pop().ok_or(NoBuffers::Exhausted),
            Err(FillError::Full { .. }) => self.fill_large(file, view, ranges),
            Err(refused) => Err(NoBuffers::Refused(refused)),
        }
    }

    #[cold]
    fn fill_large(
        &mut self,
        file: FileId,
        view: &MemoryView,
        ranges: impl Iterator<Item = GuestRange>,
    ) -> Result<IoVecs, NoBuffers> {
        if !self.shares.take(file) {
            return Err(NoBuffers::Exhausted);
        }
        let Some(mut large) = self.large.pop() else {
            unreachable!("there is a large description for each share")
        };
        match large.fill(view, ranges) {
            Ok(()) => Ok(large),
            Err(refused) => {
                self.large.push(large);
                self.shares.give_back(file);
                Err(NoBuffers::Refused(refused))
            }
        }
    }

    /// Returns the buffers of a completed request. Buffers that hold a memory other than the queue's current `memory`
    /// release it, so that removed regions are unmapped.
    #[inline]
    pub(crate) fn give_back(&mut self, file: FileId, mut buffers: IoVecs, memory: &Arc<GuestMemory>) {
        if buffers.holds(memory) {
            buffers.clear();
        } else {
            buffers.release();
        }
        match buffers.capacity() {
            // A request without data has borrowed no description. A formerly parked request has separate buffers of
            // exactly its size.
            capacity if capacity < SMALL_PIECES => {}
            capacity if capacity < LARGE_PIECES => {
                if self.small.len() < self.made {
                    self.small.push(buffers);
                }
            }
            // Buffers of a formerly parked request may replace a large description of the disk.
            _ => {
                if self.shares.used(file).is_some_and(|used| used > 0) {
                    self.large.push(buffers);
                    self.shares.give_back(file);
                }
            }
        }
    }

    /// Makes all buffers release this memory.
    pub(crate) fn forget(&mut self, memory: &Arc<GuestMemory>) {
        let all = self.small.iter_mut().chain(&mut self.large);
        all.filter(|buffers| buffers.holds(memory)).for_each(IoVecs::release);
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use disk_image::Alignment;
    use guest_mem::{GuestAddress, Region};
    use io_engine::{Engine, EngineConfig, FileSpec, NullEngine};

    use super::*;

    /// File ids, as an engine assigns them.
    fn files<const N: usize>() -> [FileId; N] {
        let config = EngineConfig { depth: 8, ..EngineConfig::default() };
        let mut engine = NullEngine::new(&config).unwrap();
        let null = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let spec = || FileSpec::of_file(Arc::new(null().into()), Alignment::BUFFERED);
        std::array::from_fn(|_| engine.attach_file(spec()).unwrap())
    }

    fn view() -> MemoryView {
        let region = Region::from_memfd(GuestAddress(0), 1 << 20).unwrap();
        MemoryView::new(Arc::new(GuestMemory::new(vec![Arc::new(region)]).unwrap()))
    }

    /// Returns too many pieces for a small description.
    fn nine_pieces() -> impl Iterator<Item = GuestRange> + Clone {
        (0..9).map(|page| GuestRange { addr: page * 8192, len_bytes: 4096 })
    }

    /// This happens after a request was parked: the queue returned its first buffers at once, and allocated other
    /// buffers for the retry.
    #[test]
    fn buffers_that_are_not_the_pools_do_not_make_it_larger() {
        let (mut pool, memory, [file]) = (BufferPool::new(4), Arc::default(), files());
        pool.attach(file);
        pool.reserve(2);
        let foreign = [1, SMALL_PIECES, SMALL_PIECES + 1, LARGE_PIECES];
        foreign.into_iter().for_each(|pieces| pool.give_back(file, IoVecs::with_capacity(pieces), &memory));
        assert_eq!((pool.small.len(), pool.large.len()), (2, LARGE_COUNT as usize));
    }

    #[test]
    fn disk_that_keeps_all_large_buffers_it_may_have_leaves_another_one_its_share() {
        let (mut pool, view, [hung, other]) = (BufferPool::new(1024), view(), files());
        [hung, other].into_iter().for_each(|file| pool.attach(file));
        pool.reserve(1024);
        let kept: Vec<_> = (0..40).map_while(|_| pool.fill_ranges(hung, &view, nine_pieces()).ok()).collect();
        assert_eq!(kept.len(), 24);
        let others = (0..40).map_while(|_| pool.fill_ranges(other, &view, nine_pieces()).ok());
        assert_eq!(others.count(), 8);
    }

    #[test]
    fn disk_that_comes_when_another_has_all_large_buffers_gets_more() {
        let (mut pool, view, [hung, other]) = (BufferPool::new(1024), view(), files());
        pool.attach(hung);
        pool.reserve(1024);
        let kept: Vec<_> = (0..40).map_while(|_| pool.fill_ranges(hung, &view, nine_pieces()).ok()).collect();
        assert_eq!(kept.len(), 32);
        pool.attach(other);
        assert!(pool.fill_ranges(other, &view, nine_pieces()).is_ok());
    }
}
