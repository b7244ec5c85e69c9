//! Reads results from the ring in user memory, or by `io_getevents` if there is no ring.
//!
//! The worker sleeps in `io_getevents` in both cases. With a ring, that call returns only the result that ended the
//! sleep, and the ring returns the others without a copy.

use std::ops::Range;
use std::time::Duration;

use rustix::io::Errno;

use super::context::{Context, IoEvent};
use super::user_ring::UserRing;

/// Maximum number of results per system call without a ring.
const BATCH: usize = 64;

#[derive(Debug)]
pub(super) struct Completions {
    ring: Option<UserRing>,
    /// Results from `io_getevents`.
    taken: Box<[IoEvent]>,
    /// The part of `taken` that `next` has not returned.
    left: Range<usize>,
}

impl Completions {
    pub fn new(ring: Option<UserRing>) -> Self {
        let most = if ring.is_some() { 1 } else { BATCH };
        Self { ring, taken: vec![IoEvent::default(); most].into(), left: 0..0 }
    }

    pub fn has_ring(&self) -> bool {
        self.ring.is_some()
    }

    /// Fixes the set of results that `next` returns: the results available now.
    #[inline]
    pub fn look(&mut self, context: &Context) {
        match &mut self.ring {
            Some(ring) => _ = ring.look(),
            // If the error persists, `sleep` reports it.
            None if self.left.is_empty() => _ = self.take(context, 0, Some(Duration::ZERO)),
            None => {}
        }
    }

    #[inline]
    pub fn next(&mut self) -> Option<IoEvent> {
        if let Some(index) = self.left.next() {
            return Some(self.taken[index]);
        }
        self.ring.as_mut()?.next()
    }

    /// Whether `next` has a result. Makes no system call.
    pub fn is_ready(&mut self) -> bool {
        !self.left.is_empty() || self.ring.as_mut().is_some_and(UserRing::look)
    }

    /// Sleeps until a result is available or the timeout expires. All earlier results must have been returned.
    pub fn sleep(&mut self, context: &Context, timeout: Option<Duration>) -> Result<(), Errno> {
        match self.take(context, 1, timeout) {
            Ok(()) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(errno),
        }
    }

    fn take(&mut self, context: &Context, at_least: u32, timeout: Option<Duration>) -> Result<(), Errno> {
        debug_assert!(self.left.is_empty());
        if let Some(ring) = &mut self.ring {
            ring.before_take();
        }
        let taken = context.take(at_least, &mut self.taken, timeout);
        if let Some(ring) = &mut self.ring {
            ring.after_take();
        }
        self.left = 0..taken?;
        Ok(())
    }
}
