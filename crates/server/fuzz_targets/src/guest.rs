//! A guest's memory, and a copy with its expected contents: each store of the driver also changes the copy.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use rustix::io::{pread, pwrite};

use guest_mem::{GuestAddress, GuestMemory, MemoryView, Region};

/// The directory for images: in memory if possible, because a disk file system may delay a run.
pub(crate) fn memory_folder() -> PathBuf {
    let shared = PathBuf::from("/dev/shm");
    if shared.is_dir() { shared } else { std::env::temp_dir() }
}

/// Longer accesses use the regions' files: mapped memory is copied word by word, and the fuzzer instruments each word.
const MAPPED_BYTES: usize = 64;

/// The memory and its copy, from address 0.
#[derive(Debug)]
pub(crate) struct Guest {
    pub view: MemoryView,
    /// The contents as the driver wrote them.
    pub expected: Vec<u8>,
}

impl Guest {
    /// Adjacent regions of these sizes.
    pub fn new(sizes: &[u64]) -> Self {
        let mut at = 0;
        let regions = sizes.iter().map(|&size_bytes| {
            let region = Region::from_memfd(GuestAddress(at), size_bytes).expect("a memfd");
            at += size_bytes;
            Arc::new(region)
        });
        let memory = GuestMemory::new(regions.collect()).expect("regions in a row");
        let bytes = usize::try_from(at).expect("a small guest");
        Self { view: MemoryView::new(Arc::new(memory)), expected: vec![0; bytes] }
    }

    /// Stores bytes as the driver. Ignores the part outside the memory.
    pub fn store(&mut self, addr: u64, bytes: &[u8]) {
        let size = self.expected.len();
        let start = usize::try_from(addr).map_or(size, |addr| addr.min(size));
        let bytes = &bytes[..bytes.len().min(size - start)];
        self.expected[start..start + bytes.len()].copy_from_slice(bytes);
        if bytes.len() <= MAPPED_BYTES {
            self.view.store(start as u64, bytes).expect("inside the memory");
            return;
        }
        let written = self.for_each_file(start..start + bytes.len(), |fd, at, part| {
            pwrite(fd, &bytes[part], at).expect("room in a memfd")
        });
        assert_eq!(written, bytes.len());
    }

    /// Zeroes everything, as in new memory.
    pub fn clear(&mut self) {
        let zeroes = vec![0; self.expected.len()];
        self.store(0, &zeroes);
    }

    /// Calls `visit(file, offset, part of the range)` for each region's part of `range`; adds up the results.
    fn for_each_file(
        &self,
        range: Range<usize>,
        mut visit: impl FnMut(&OwnedFd, u64, Range<usize>) -> usize,
    ) -> usize {
        let (mut from, mut sum) = (0, 0);
        for region in self.view.memory().regions() {
            let end = from + usize::try_from(region.spec().size_bytes).expect("a small region");
            let part = range.start.max(from)..range.end.min(end);
            if !part.is_empty() {
                let at = (part.start - from) as u64;
                sum += visit(region.fd(), at, part.start - range.start..part.end - range.start);
            }
            from = end;
        }
        sum
    }

    /// The current bytes; `None` outside the memory.
    pub fn read<const N: usize>(&self, addr: u64) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        self.view.read(addr, &mut bytes).ok().map(|()| bytes)
    }

    /// All current bytes.
    pub fn now(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.expected.len()];
        let read = self.for_each_file(0..self.expected.len(), |fd, at, part| {
            pread(fd, &mut bytes[part], at).expect("a memfd")
        });
        assert_eq!(read, bytes.len());
        bytes
    }

    /// Panics if the device has written outside of the ranges `its`.
    pub fn check_untouched_but(&self, its: &[Range<usize>]) {
        let now = self.now();
        // Comparing single bytes would take most of the time.
        let (mut before, mut at, mut sorted) = (true, 0, its.to_vec());
        sorted.sort_unstable_by_key(|range| range.start);
        for range in sorted {
            before &= now[at..range.start.max(at)] == self.expected[at..range.start.max(at)];
            at = at.max(range.end);
        }
        if before && now[at..] == self.expected[at..] {
            return;
        }
        let differs =
            |&at: &usize| now[at] != self.expected[at] && !its.iter().any(|range| range.contains(&at));
        if let Some(at) = (0..now.len()).find(differs) {
            panic!("the device wrote {:#x} at {at:#x}, which is not its own ({its:x?})", now[at]);
        }
    }
}
