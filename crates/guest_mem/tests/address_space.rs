//! The limit on all regions of a process together. Alone in its binary: it takes the whole limit.
#![allow(missing_docs, clippy::unwrap_used)]

use std::sync::Arc;

use guest_mem::{GuestAddress, MapError, Region, RegionSpec};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

#[test]
fn regions_that_take_up_the_address_space_are_refused_and_given_back() {
    let fd = Arc::new(memfd_create("test", MemfdFlags::CLOEXEC).unwrap());
    ftruncate(&fd, 1 << 44).unwrap();
    let map = |i: u64| {
        let guest_addr = GuestAddress(i << 44);
        let spec = RegionSpec { guest_addr, size_bytes: 1 << 44, user_addr: i << 44, file_offset_bytes: 0 };
        Region::map(spec, Arc::clone(&fd))
    };
    let mapped: Vec<_> = (0..8).map_while(|i| map(i).ok()).collect();
    let refused = map(9);
    assert!(!mapped.is_empty() && mapped.len() <= 4);
    assert!(matches!(refused, Err(MapError::AddressSpace { .. })));
    drop(mapped);
    assert!(map(0).is_ok());
}
