//! Tests which memory requests may refer to, and when.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use guest_mem::GuestRange;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::options::OWN_MEMORY_START;
use super::{MemoryMap, OpenRanges, PoolOptions, UserMemory};
use crate::error::MemoryError;

const ADDR: u64 = 0x7f00_0000_0000;

fn file(size_bytes: u64) -> OwnedFd {
    let fd = memfd_create("user", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, size_bytes).unwrap();
    fd
}

fn user(offset_bytes: u64, len_bytes: u64, addr: u64) -> UserMemory {
    UserMemory { fd: file(1 << 20), offset_bytes, len_bytes, addr }
}

fn range(addr: u64, len_bytes: u32) -> GuestRange {
    GuestRange { addr, len_bytes }
}

#[test]
fn user_memory_can_be_named_between_open_and_close_only() {
    let map = MemoryMap::new();
    let mut open = OpenRanges::new(Arc::clone(&map));
    let region = map.add_user(user(4096, 8192, ADDR)).unwrap();
    assert!(!open.hold(range(ADDR, 512)));
    map.open(&region);
    assert!(open.hold(range(ADDR, 512)) && open.hold(range(ADDR + 8191, 1)));
    assert!(!open.hold(range(ADDR + 8191, 2)) && !open.hold(range(ADDR - 1, 2)));
    map.close(ADDR);
    assert!(!open.hold(range(ADDR, 512)));
    map.remove(ADDR).unwrap();
    assert!(map.memory().regions().is_empty());
}

#[test]
fn buffer_across_two_regions_that_touch_is_not_one_buffer() {
    let map = MemoryMap::new();
    let mut open = OpenRanges::new(Arc::clone(&map));
    for addr in [ADDR, ADDR + 4096] {
        let region = map.add_user(user(0, 4096, addr)).unwrap();
        map.open(&region);
    }
    assert!(open.hold(range(ADDR + 4096, 4096)) && open.hold(range(ADDR, 4096)));
    assert!(!open.hold(range(ADDR, 8192)));
}

#[test]
fn buffer_that_wraps_the_address_space_is_not_held() {
    let map = MemoryMap::new();
    let mut open = OpenRanges::new(Arc::clone(&map));
    map.add_pool(PoolOptions { size_bytes: 4096, huge_pages: false }).unwrap();
    assert!(open.hold(range(OWN_MEMORY_START, 4096)));
    assert!(!open.hold(range(u64::MAX - 1, 4096)));
}

#[test]
fn memory_registered_twice_overlaps() {
    let map = MemoryMap::new();
    map.add_user(user(0, 8192, ADDR)).unwrap();
    let refused = map.add_user(user(0, 4096, ADDR + 4096)).unwrap_err();
    assert!(matches!(refused, MemoryError::Table(guest_mem::MemoryError::Overlap { .. })));
    assert_eq!(map.memory().regions().len(), 1);
}

#[test]
fn memory_beyond_its_file_or_from_the_middle_of_a_page_is_refused() {
    let map = MemoryMap::new();
    let beyond = map.add_user(user(4096, 1 << 20, ADDR)).unwrap_err();
    assert!(matches!(beyond, MemoryError::Map(guest_mem::MapError::BeyondFile { .. })));
    let unaligned = map.add_user(user(512, 4096, ADDR)).unwrap_err();
    assert!(matches!(unaligned, MemoryError::Unaligned { offset_bytes: 512, .. }));
}

#[test]
fn memory_of_our_own_and_unknown_memory_cannot_be_removed() {
    let map = MemoryMap::new();
    let private = map.add_private(4096).unwrap();
    let addr = private.spec().guest_addr.0;
    assert!(matches!(map.remove(addr), Err(MemoryError::NotRegistered { addr: at }) if at == addr));
    assert!(matches!(map.remove(ADDR), Err(MemoryError::NotRegistered { addr: ADDR })));
}

#[test]
fn regions_of_our_own_lie_apart_from_each_other() {
    let map = MemoryMap::new();
    let first = map.add_private(4096).unwrap();
    let second = map.add_private(4096).unwrap();
    assert!(second.spec().guest_addr.0 > first.guest_end());
}
