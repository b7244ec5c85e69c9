//! A guest's memory, and what must be in it: every store of the driver's is made twice, once where the device looks.
//!
//! Not here: rings (`chains.rs`), requests (`requests.rs`).

use std::ops::Range;
use std::sync::Arc;

use guest_mem::{GuestAddress, GuestMemory, MemoryView, Region};

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
        let len = bytes.len().min(size - start);
        self.expected[start..start + len].copy_from_slice(&bytes[..len]);
        self.view.store(start as u64, &bytes[..len]).expect("inside the memory");
    }

    /// What is there now; `None` outside.
    pub fn read<const N: usize>(&self, addr: u64) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        self.view.read(addr, &mut bytes).ok().map(|()| bytes)
    }

    /// All that is there now.
    pub fn now(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.expected.len()];
        self.view.read(0, &mut bytes).expect("all of the memory");
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
