//! The worker's pool of buffer descriptions: a request takes one that is large enough and gives it back.
//!
//! - Bounded: small ones for as many requests as the engine takes, a few large ones for requests with
//!   many pieces. Each disk has its share of the large ones, as it has of the engine's places (`io_engine::Shares`): a
//!   request that finds none waits in its ring for another one of its own disk.
//! - Filled when queues start, not per request; shared by all queues of a worker, so an idle disk has none.
//!
//! Not here: what is in them (`guest_mem::IoVecs`).

use std::sync::Arc;

use guest_mem::{FillError, GuestMemory, GuestRange, IoVecs, MemoryView};
use io_engine::{FileId, LEAST_SHARE, Shares};

/// Pieces of a small one: most requests have one to four.
const SMALL_PIECES: usize = 8;
/// Pieces of a large one: a chain of 1024 descriptors, of which each may be split between regions.
const LARGE_PIECES: usize = 2048;
/// Large ones per engine, 32 KiB each; with many disks half as many, and [`LEAST_LARGE`] for each.
const LARGE_COUNT: u32 = 32;
/// Of each disk.
const LEAST_LARGE: u32 = 1;

/// Why a request gets no buffers.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NoBuffers {
    /// As many as the disk may have are in use: try again when a request completes.
    Exhausted,
    /// Its data is not in the guest's memory, or has more pieces than any request may have.
    Refused(FillError),
}

/// See the file's head.
#[derive(Debug)]
pub(crate) struct BufferPool {
    small: Vec<IoVecs>,
    large: Vec<IoVecs>,
    /// Of the large ones, by disk.
    shares: Shares,
    /// Large ones ever made.
    large_made: usize,
    /// Small ones ever made; never more than `limit`.
    made: usize,
    depth: usize,
    limit: usize,
    disks: usize,
}

impl BufferPool {
    /// For an engine of this depth.
    pub(crate) fn new(depth: usize) -> Self {
        let shares = Shares::new(LARGE_COUNT, LEAST_LARGE);
        let (small, large) = (Vec::new(), Vec::new());
        Self { small, large, shares, large_made: 0, made: 0, depth, limit: depth, disks: 0 }
    }

    /// Requests of one more disk will come.
    pub(crate) fn attach(&mut self, file: FileId) {
        self.shares.attach(file);
        self.disks += 1;
        // What an engine takes at most, with the shares of its files: small ones never run out before.
        self.limit = self.limit.max(self.depth + self.depth / 2 + self.disks * LEAST_SHARE);
        self.make_large();
    }

    /// None of its requests is in flight any more.
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

    /// Makes room for `requests` more requests in flight, up to the limit.
    pub(crate) fn reserve(&mut self, requests: usize) {
        let new = requests.min(self.limit - self.made);
        self.small.reserve(self.limit);
        self.small.extend((0..new).map(|_| IoVecs::with_capacity(SMALL_PIECES)));
        self.made += new;
    }

    /// Describes `ranges` of `view`, for a request of the disk behind `file`.
    #[inline]
    pub(crate) fn fill(
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
        let Some(mut large) = self.large.pop() else { unreachable!("there is one for each share") };
        match large.fill(view, ranges) {
            Ok(()) => Ok(large),
            Err(refused) => {
                self.large.push(large);
                self.shares.give_back(file);
                Err(NoBuffers::Refused(refused))
            }
        }
    }

    /// Takes back what a completed request of the disk behind `file` used. `memory`: what its queue uses now; buffers that hold
    /// another let go of it, so that removed regions are unmapped.
    #[inline]
    pub(crate) fn give_back(&mut self, file: FileId, mut buffers: IoVecs, memory: &Arc<GuestMemory>) {
        if buffers.holds(memory) {
            buffers.clear();
        } else {
            buffers.release();
        }
        match buffers.capacity() {
            // A request without data never took any, and one that was held had some of its own, as many as it needed.
            capacity if capacity < SMALL_PIECES => {}
            capacity if capacity < LARGE_PIECES => {
                if self.small.len() < self.made {
                    self.small.push(buffers);
                }
            }
            // One that was held takes the place of one of the disk's own.
            _ => {
                if self.shares.used(file).is_some_and(|used| used > 0) {
                    self.large.push(buffers);
                    self.shares.give_back(file);
                }
            }
        }
    }

    /// Lets go of a memory that is no longer used.
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

    /// Numbers of files, as an engine gives them.
    fn files<const N: usize>() -> [FileId; N] {
        let config = EngineConfig { depth: 8, ..EngineConfig::default() };
        let mut engine = NullEngine::new(&config).unwrap();
        let null = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let spec = || FileSpec { file: Arc::new(null().into()), alignment: Alignment::BUFFERED };
        std::array::from_fn(|_| engine.attach_file(spec()).unwrap())
    }

    fn view() -> MemoryView {
        let region = Region::from_memfd(GuestAddress(0), 1 << 20).unwrap();
        MemoryView::new(Arc::new(GuestMemory::new(vec![Arc::new(region)]).unwrap()))
    }

    /// Too many for a small one.
    fn nine_pieces() -> impl Iterator<Item = GuestRange> + Clone {
        (0..9).map(|page| GuestRange { addr: page * 8192, len_bytes: 4096 })
    }

    /// As after a request was held: its first buffers came home at once, and those that it was tried again with came from
    /// nowhere.
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
        let kept: Vec<_> = (0..40).map_while(|_| pool.fill(hung, &view, nine_pieces()).ok()).collect();
        assert_eq!(kept.len(), 24);
        let others = (0..40).map_while(|_| pool.fill(other, &view, nine_pieces()).ok());
        assert_eq!(others.count(), 8);
    }

    #[test]
    fn disk_that_comes_when_another_has_all_large_buffers_gets_more() {
        let (mut pool, view, [hung, other]) = (BufferPool::new(1024), view(), files());
        pool.attach(hung);
        pool.reserve(1024);
        let kept: Vec<_> = (0..40).map_while(|_| pool.fill(hung, &view, nine_pieces()).ok()).collect();
        assert_eq!(kept.len(), 32);
        pool.attach(other);
        assert!(pool.fill(other, &view, nine_pieces()).is_ok());
    }
}
