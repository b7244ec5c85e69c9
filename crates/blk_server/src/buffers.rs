//! The worker's pool of buffer descriptions: a request takes one that is large enough and gives it back.
//!
//! - Bounded: small ones for as many requests as the engine takes, a few large ones for requests with
//!   many pieces. A request that finds none waits in its ring.
//! - Filled when queues start, not per request; shared by all queues of a worker, so an idle disk has none.
//!
//! Not here: what is in them (`guest_mem::IoVecs`).

use std::sync::Arc;

use guest_mem::{FillError, GuestMemory, GuestRange, IoVecs, MemoryView};

/// Pieces of a small one: most requests have one to four.
const SMALL_PIECES: usize = 8;
/// Pieces of a large one: a chain of 1024 descriptors, of which each may be split between regions.
const LARGE_PIECES: usize = 2048;
/// Large ones per worker, 32 KiB each.
const LARGE_COUNT: usize = 32;

/// Why a request gets no buffers.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NoBuffers {
    /// All in use: try again when a request completes.
    Exhausted,
    /// Its data is not in the guest's memory, or has more pieces than any request may have.
    Refused(FillError),
}

/// See the file's head.
#[derive(Debug)]
pub(crate) struct BufferPool {
    small: Vec<IoVecs>,
    large: Vec<IoVecs>,
    /// Small ones ever made; never more than `limit`.
    made: usize,
    limit: usize,
}

impl BufferPool {
    /// For at most `limit` requests in flight.
    pub(crate) fn new(limit: usize) -> Self {
        Self { small: Vec::new(), large: Vec::new(), made: 0, limit }
    }

    /// Makes room for `requests` more requests in flight, up to the limit.
    pub(crate) fn reserve(&mut self, requests: usize) {
        let new = requests.min(self.limit - self.made);
        self.small.reserve(self.limit);
        self.small.extend((0..new).map(|_| IoVecs::with_capacity(SMALL_PIECES)));
        self.made += new;
        if self.large.capacity() == 0 {
            self.large.extend((0..LARGE_COUNT).map(|_| IoVecs::with_capacity(LARGE_PIECES)));
        }
    }

    /// Describes `ranges` of `view`.
    #[inline]
    pub(crate) fn fill(
        &mut self,
        view: &MemoryView,
        ranges: impl Iterator<Item = GuestRange> + Clone,
    ) -> Result<IoVecs, NoBuffers> {
        let small = self.small.last_mut().ok_or(NoBuffers::Exhausted)?;
        match small.fill(view, ranges.clone()) {
            Ok(()) => self.small.pop().ok_or(NoBuffers::Exhausted),
            Err(FillError::Full { .. }) => self.fill_large(view, ranges),
            Err(refused) => Err(NoBuffers::Refused(refused)),
        }
    }

    #[cold]
    fn fill_large(
        &mut self,
        view: &MemoryView,
        ranges: impl Iterator<Item = GuestRange>,
    ) -> Result<IoVecs, NoBuffers> {
        let mut large = self.large.pop().ok_or(NoBuffers::Exhausted)?;
        match large.fill(view, ranges) {
            Ok(()) => Ok(large),
            Err(refused) => {
                self.large.push(large);
                Err(NoBuffers::Refused(refused))
            }
        }
    }

    /// Takes back what a completed request used. `memory`: what its queue uses now; buffers that hold
    /// another let go of it, so that removed regions are unmapped.
    #[inline]
    pub(crate) fn give_back(&mut self, mut buffers: IoVecs, memory: &Arc<GuestMemory>) {
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
            _ => {
                if self.large.len() < LARGE_COUNT {
                    self.large.push(buffers);
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
    use super::*;

    /// As after a request was held: its first buffers came home at once, and those that it was tried again with came from
    /// nowhere.
    #[test]
    fn buffers_that_are_not_the_pools_do_not_make_it_larger() {
        let (mut pool, memory) = (BufferPool::new(4), Arc::default());
        pool.reserve(2);
        let foreign = [1, SMALL_PIECES, SMALL_PIECES + 1, LARGE_PIECES];
        foreign.into_iter().for_each(|pieces| pool.give_back(IoVecs::with_capacity(pieces), &memory));
        assert_eq!((pool.small.len(), pool.large.len()), (2, LARGE_COUNT));
    }
}
