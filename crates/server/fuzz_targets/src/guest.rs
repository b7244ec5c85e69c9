//! A guest's memory, and what must be in it: every store of the driver's is made twice, once where the device looks.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use rustix::io::{pread, pwrite};

use guest_mem::{GuestAddress, GuestMemory, MemoryView, Region};

/// Where images lie: in memory if there is such a folder, as a file system on a disk may have a run wait.
pub(crate) fn memory_folder() -> PathBuf {
    let shared = PathBuf::from("/dev/shm");
    if shared.is_dir() { shared } else { std::env::temp_dir() }
}

/// Longer stores and reads go through the regions' files: mapped memory is copied word by word, each with its share of
/// the fuzzer's instrumentation.
const MAPPED_BYTES: usize = 64;

/// See the file's head. From address 0 on.
#[derive(Debug)]
pub(crate) struct Guest {
    pub view: MemoryView,
    /// As the driver left it.
    pub expected: Vec<u8>,
}

impl Guest {
    /// Regions of these sizes, one behind the other.
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

    /// The driver's store; what lies outside is left out.
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

    /// Zeroes everywhere, as in a new one.
    pub fn clear(&mut self) {
        let zeroes = vec![0; self.expected.len()];
        self.store(0, &zeroes);
    }

    /// Calls `visit(file, offset, part of the range)` for what each region has of `range`; sums what it returns.
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

    /// What is there now; `None` outside.
    pub fn read<const N: usize>(&self, addr: u64) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        self.view.read(addr, &mut bytes).ok().map(|()| bytes)
    }

    /// All that is there now.
    pub fn now(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.expected.len()];
        let read = self.for_each_file(0..self.expected.len(), |fd, at, part| {
            pread(fd, &mut bytes[part], at).expect("a memfd")
        });
        assert_eq!(read, bytes.len());
        bytes
    }

    /// Panics if the device has written outside of `its`.
    pub fn check_untouched_but(&self, its: &[Range<usize>]) {
        let now = self.now();
        // Looking at each byte takes longer than everything else.
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
