//! Regions and dirty logs from files that a front-end passed: charged to its disk, and only accepted if the
//! file is memory.
#![allow(missing_docs, clippy::unwrap_used)]

use std::error::Error;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use guest_mem::{
    Budget, DirtyLog, GuestAddress, Limits, MapError, Quota, QuotaError, Region, RegionSpec, Resource,
};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

const TIB: u64 = 1 << 40;
const LIMITS: Limits = Limits { address_space_bytes: 64 * TIB, mappings: 8, descriptors: 100 };

fn disks() -> [Arc<Quota>; 2] {
    let budget = Budget::new(LIMITS);
    [(); 2].map(|()| Quota::of(&budget))
}

fn memfd(bytes: u64) -> OwnedFd {
    let fd = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, bytes).unwrap();
    fd
}

fn spec(size_bytes: u64) -> RegionSpec {
    RegionSpec { guest_addr: GuestAddress(0), size_bytes, user_addr: 0, file_offset_bytes: 0 }
}

fn map(quota: &Arc<Quota>, size_bytes: u64) -> Result<Region, MapError> {
    Region::map_passed(spec(size_bytes), quota.admit(memfd(size_bytes)).unwrap())
}

fn quota_error(error: &MapError) -> QuotaError {
    *error.source().unwrap().downcast_ref().unwrap()
}

#[test]
fn disk_that_maps_16_tib_after_16_tib_leaves_another_disk_its_guest() {
    let [greedy, other] = disks();
    let mapped: Vec<_> = (0..8).map_while(|_| map(&greedy, 16 * TIB).ok()).collect();
    let refused = quota_error(&map(&greedy, TIB).unwrap_err());
    assert_eq!((mapped.len(), refused.resource, refused.left), (3, Resource::AddressSpace, 0));
    assert!(map(&other, 12 * TIB).is_ok());
    drop(mapped);
    assert!(map(&greedy, 16 * TIB).is_ok());
}

#[test]
fn disk_that_maps_byte_after_byte_leaves_another_disk_its_mappings() {
    let [greedy, other] = disks();
    let dirty_log = |quota: &Arc<Quota>| DirtyLog::map_passed(quota.admit(memfd(8)).unwrap(), 8, 0);
    let regions = [map(&greedy, 1).unwrap(), map(&greedy, 1).unwrap(), map(&greedy, 1).unwrap()];
    let logs = [dirty_log(&greedy).unwrap(), dirty_log(&greedy).unwrap(), dirty_log(&greedy).unwrap()];
    let refused = quota_error(&map(&greedy, 1).unwrap_err());
    let expected = QuotaError { resource: Resource::Mappings, wanted: 1, left: 0, taken: 6, limit: 8 };
    assert_eq!(refused, expected);
    assert!(dirty_log(&greedy).is_err());
    let pair = (map(&other, 1).unwrap(), dirty_log(&other).unwrap());
    drop((regions, logs, pair));
    assert!(map(&greedy, 1).is_ok());
}

#[test]
fn what_cannot_be_mapped_costs_nothing() {
    let [quota, _other] = disks();
    for _ in 0..20 {
        let beyond = Region::map_passed(spec(2), quota.admit(memfd(1)).unwrap());
        assert!(matches!(beyond, Err(MapError::BeyondFile { .. })));
        assert!(matches!(map(&quota, 63 * TIB), Err(MapError::Quota { .. })));
    }
    assert!(map(&quota, 48 * TIB).is_ok());
}

#[test]
fn device_that_maps_memory_of_its_own_is_no_memory_of_a_guest() {
    let [quota, _other] = disks();
    let zero = std::fs::File::options().read(true).write(true).open("/dev/zero").unwrap();
    let refused = Region::map_passed(spec(4096), quota.admit(zero.into()).unwrap()).unwrap_err();
    assert!(matches!(refused, MapError::NotMemory { .. }), "{refused}");
    assert!(refused.to_string().contains("share a memfd"), "{refused}");
}
