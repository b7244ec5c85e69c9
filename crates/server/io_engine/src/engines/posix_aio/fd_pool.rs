//! The descriptors of one file: its own, and duplicates of it.
//!
//! glibc serves the requests of one descriptor one after the other, and those of different descriptors in parallel,
//! even if all belong to the same open file. Each request therefore gets the least busy descriptor. If all are busy,
//! the pool makes a duplicate, up to its size; if that fails (`EMFILE`), it uses the existing ones. The pool closes the
//! duplicates when the worker is about to sleep without requests in flight on the file, and when it closes the file.

use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use super::requests::ControlBlocks;
use super::waiters::Waiters;

#[derive(Debug)]
struct Descriptor {
    file: Arc<File>,
    /// Requests that use the descriptor and have not ended.
    busy: usize,
    /// The requests on this descriptor that the C library has accepted, oldest first.
    outstanding: VecDeque<u32>,
    /// The request that a waiter waits for, or last waited for, and its ticket.
    waited: Option<(u32, u64)>,
}

impl Descriptor {
    fn new(file: Arc<File>) -> Self {
        Self { file, busy: 0, outstanding: VecDeque::new(), waited: None }
    }
}

#[derive(Debug)]
pub(super) struct PoolFile {
    /// The file's own descriptor first.
    descriptors: Vec<Descriptor>,
    most: usize,
    in_flight: usize,
    /// Duplicating the descriptor failed. The pool tries again once the file has been idle.
    refused: bool,
    /// `aio_fsync` refuses such a file.
    pub read_only: bool,
}

impl PoolFile {
    pub fn new(file: Arc<File>, most: usize, read_only: bool) -> Self {
        let descriptors = vec![Descriptor::new(file)];
        Self { descriptors, most, in_flight: 0, refused: false, read_only }
    }

    pub fn own(&self) -> Arc<File> {
        Arc::clone(&self.descriptors[0].file)
    }

    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Returns the descriptor for another request.
    pub fn pick(&mut self) -> (usize, RawFd) {
        let place = self.least_busy();
        let place = if self.descriptors[place].busy > 0 && self.duplicate() {
            self.descriptors.len() - 1
        } else {
            place
        };
        self.in_flight += 1;
        let descriptor = &mut self.descriptors[place];
        descriptor.busy += 1;
        (place, descriptor.file.as_raw_fd())
    }

    /// The first of the least busy descriptors.
    fn least_busy(&self) -> usize {
        let busy = self.descriptors.iter().map(|descriptor| descriptor.busy).enumerate();
        busy.min_by_key(|&(_, busy)| busy).map_or(0, |(place, _)| place)
    }

    fn duplicate(&mut self) -> bool {
        if self.descriptors.len() >= self.most || self.refused {
            return false;
        }
        match self.descriptors[0].file.try_clone() {
            Ok(file) => self.descriptors.push(Descriptor::new(Arc::new(file))),
            Err(error) => {
                tracing::debug!(%error, in_use = self.descriptors.len(), "cannot duplicate a file's descriptor");
                self.refused = true;
            }
        }
        !self.refused
    }

    /// Records that the C library has accepted the request.
    pub fn started(&mut self, descriptor: usize, slot: u32) {
        self.descriptors[descriptor].outstanding.push_back(slot);
    }

    /// Records that a request ended without being started.
    pub fn ended(&mut self, descriptor: usize) {
        self.descriptors[descriptor].busy -= 1;
        self.in_flight -= 1;
    }

    /// Offers each descriptor's oldest request to `take` until `take` returns false. With `every`, offers all
    /// requests.
    pub fn collect(&mut self, every: bool, mut take: impl FnMut(u32) -> bool) {
        for descriptor in &mut self.descriptors {
            let before = descriptor.outstanding.len();
            if every {
                descriptor.outstanding.retain(|&slot| !take(slot));
            }
            while descriptor.outstanding.front().is_some_and(|&slot| take(slot)) {
                descriptor.outstanding.pop_front();
            }
            let ended = before - descriptor.outstanding.len();
            descriptor.busy -= ended;
            self.in_flight -= ended;
        }
    }

    /// Starts a waiter for each descriptor's oldest request. Returns false if one of them has already ended.
    pub fn watch_oldest(&mut self, blocks: &ControlBlocks, waiters: &mut Waiters) -> bool {
        self.descriptors.iter_mut().all(|descriptor| {
            let Some(&oldest) = descriptor.outstanding.front() else { return true };
            // This waiter has not returned yet. It ends the sleep when it returns, now or with its request.
            if descriptor.waited.is_some_and(|(slot, ticket)| blocks.has_waiter(slot, ticket)) {
                return true;
            }
            let pending = blocks.is_pending(oldest);
            if pending {
                descriptor.waited = Some((oldest, waiters.send(oldest)));
            }
            pending
        })
    }

    pub fn outstanding(&self) -> impl Iterator<Item = u32> {
        self.descriptors.iter().flat_map(|descriptor| descriptor.outstanding.iter().copied())
    }

    /// Closes the duplicates if the file has nothing in flight.
    pub fn close_idle(&mut self) {
        if self.in_flight == 0 {
            self.descriptors.truncate(1);
            self.refused = false;
        }
    }

    #[cfg(test)]
    pub fn descriptors(&self) -> usize {
        self.descriptors.len()
    }

    #[cfg(test)]
    pub fn outstanding_by_descriptor(&self) -> Vec<usize> {
        self.descriptors.iter().map(|descriptor| descriptor.outstanding.len()).collect()
    }
}
