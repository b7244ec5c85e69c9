//! A front-end's memory: refused tables, regions that are added and removed while queues run, and files that are
//! truncated while mapped.
//!
//! Spec: vhost-user, "Memory regions description", SET_MEM_TABLE, ADD_MEM_REG, REM_MEM_REG.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use guest_mem::{GuestRange, MemoryView, Region};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use crate::rig;
use crate::rig::format::{Format, on_both_formats};
use crate::rig::passed::{
    Pending, add_transfer, faulty, hold, let_go, mappings, memfd, region, serves, share, table_of, transfer,
    works,
};
use crate::rig::{
    CALM, FrontEnd, Guest, MIB, Options, Rig, USER_BASE, code, eventually, feature, header_bytes, kind,
    ready, region_words, single_region_bytes, vring_addr, vring_state,
};

const REFUSED: u64 = 1;
const OK: u8 = 0;
const IOERR: u8 = 1;
const EXTRA: u64 = 64 * MIB;
const HIGH: u64 = 5 << 30;

/// A running queue in 16 MiB of memory at guest address 0, in the test's own file.
fn ready_in(rig: &Rig, fd: &OwnedFd) -> (FrontEnd, Guest) {
    ready_with(rig, vec![region(fd, 0, 16 * MIB, 0)])
}

fn ready_with(rig: &Rig, regions: Vec<Arc<Region>>) -> (FrontEnd, Guest) {
    ready_with_features(rig, regions, feature::USUAL)
}

fn ready_with_features(rig: &Rig, regions: Vec<Arc<Region>>, features: u64) -> (FrontEnd, Guest) {
    let mut front_end = rig.connect();
    front_end.negotiate(features);
    share(&mut front_end, regions);
    let guest = front_end.start_queue(0, 256, features);
    (front_end, guest)
}

on_both_formats! {
    regions_come_and_go_while_the_queue_is_busy,
    queue_whose_ring_loses_its_region_goes_on_when_it_is_back,
}

/// Adds a region of the test's file, which the guest may then use.
fn add(front_end: &mut FrontEnd, guest: &mut Guest, region: Arc<Region>) {
    front_end.ok(code::ADD_MEM_REG, &single_region_bytes(&region), &[region.fd().as_fd()]);
    front_end.memory = Arc::new(front_end.memory.with_region(region).unwrap());
    guest.view = MemoryView::new(Arc::clone(&front_end.memory));
}

/// Writes a pattern from `addr` and reads it back there.
fn round_trip(guest: &mut Guest, addr: u64, sector: u64) -> bool {
    let data: Vec<u8> = (0..4096u64).map(|i| ((i * 7 + addr / 4096) % 253) as u8).collect();
    guest.view.store(addr, &data).unwrap();
    let written = transfer(guest, kind::OUT, sector, addr, 4096);
    guest.view.store(addr, &[0; 4096]).unwrap();
    let read = transfer(guest, kind::IN, sector, addr, 4096);
    let mut back = vec![0; 4096];
    guest.view.read(addr, &mut back).unwrap();
    (written, read) == (OK, OK) && back == data
}

/// Whether the server refuses the table and the queue continues in its old memory.
fn table_is_refused(regions: &[[u64; 4]]) -> bool {
    let rig = Rig::start(Options::default());
    let (front_end, mut guest) = ready(&rig, feature::USUAL);
    let words = |&[addr, bytes, user, offset]: &[u64; 4]| region_words(addr, bytes, user, offset);
    let table = table_of(&regions.iter().map(words).collect::<Vec<_>>());
    let file = memfd(MIB);
    let fds = vec![file.as_fd(); regions.len()];
    front_end.acked(code::SET_MEM_TABLE, &table, &fds) == REFUSED && serves(&mut guest)
}

#[test]
fn overlapping_regions_are_refused() {
    let (first, second) = ([0, MIB, USER_BASE, 0], [MIB - 1, MIB, USER_BASE + MIB, 0]);
    assert!(table_is_refused(&[first, second]));
    assert!(table_is_refused(&[first, first]));
}

#[test]
fn region_larger_than_its_file_is_refused() {
    assert!(table_is_refused(&[[0, MIB + 1, USER_BASE, 0]]));
    assert!(table_is_refused(&[[0, MIB, USER_BASE, 4096]]));
    assert!(table_is_refused(&[[0, u64::MAX / 2, USER_BASE, 0]]));
}

#[test]
fn empty_region_is_refused() {
    assert!(table_is_refused(&[[0, 0, USER_BASE, 0]]));
}

#[test]
fn region_that_wraps_around_is_refused() {
    assert!(table_is_refused(&[[u64::MAX - 4095, MIB, USER_BASE, 0]]));
    assert!(table_is_refused(&[[0, MIB, u64::MAX - 4095, 0]]));
    assert!(table_is_refused(&[[0, MIB, USER_BASE, u64::MAX - 4095]]));
}

#[test]
fn file_that_cannot_be_mapped_is_refused() {
    let rig = Rig::start(Options::default());
    let (front_end, mut guest) = ready(&rig, feature::USUAL);
    let table = table_of(&[region_words(0, 4096, USER_BASE, 0)]);
    let (event, folder) = (rig::passed::event(), std::fs::File::open("/").unwrap());
    let read_only = std::fs::File::open(&rig.image).unwrap();
    assert_eq!(front_end.acked(code::SET_MEM_TABLE, &table, &[event.as_fd()]), REFUSED);
    assert_eq!(front_end.acked(code::SET_MEM_TABLE, &table, &[folder.as_fd()]), REFUSED);
    assert_eq!(front_end.acked(code::SET_MEM_TABLE, &table, &[read_only.as_fd()]), REFUSED);
    assert!(serves(&mut guest));
}

fn negotiated(rig: &Rig) -> FrontEnd {
    let front_end = rig.connect();
    front_end.negotiate(feature::USUAL);
    front_end
}

/// A page fault that waits would block the worker, and with it every disk of that worker.
#[test]
fn file_or_device_that_is_not_memory_is_refused_as_memory_and_as_log() {
    let rig = Rig::start(Options::default());
    let (front_end, mut guest) = ready(&rig, feature::USUAL);
    let table = table_of(&[region_words(EXTRA, 4096, USER_BASE + EXTRA, 0)]);
    let added = [vec![0; 8], region_words(EXTRA, 4096, USER_BASE + EXTRA, 0)].concat();
    let file = std::fs::File::options().read(true).write(true).open(&rig.image).unwrap();
    let device = std::fs::File::options().read(true).write(true).open("/dev/zero").unwrap();
    // If the tests' folder is on tmpfs, the server accepts the file like a memfd.
    let file_is_memory = rustix::fs::fstatfs(&file).unwrap().f_type == 0x0102_1994;
    let unfit = if file_is_memory { vec![device.as_fd()] } else { vec![file.as_fd(), device.as_fd()] };
    for unfit in unfit {
        assert_eq!(front_end.acked(code::SET_MEM_TABLE, &table, &[unfit]), REFUSED);
        assert_eq!(front_end.acked(code::ADD_MEM_REG, &added, &[unfit]), REFUSED);
        let log: Vec<u8> = [16384_u64, 0, 64 << 16 | 1].into_iter().flat_map(u64::to_ne_bytes).collect();
        assert_eq!(negotiated(&rig).acked(code::SET_INFLIGHT_FD, &log, &[unfit]), REFUSED);
        let dirty: Vec<u8> = [4096_u64, 0].into_iter().flat_map(u64::to_ne_bytes).collect();
        let migrating = negotiated(&rig);
        migrating.send(code::SET_LOG_BASE, &dirty, &[unfit]);
        assert!(migrating.is_closed());
    }
    assert!(serves(&mut guest));
}

#[test]
fn region_that_overlaps_when_added_or_is_unknown_when_removed_is_refused() {
    let rig = Rig::start(Options::default());
    let (front_end, mut guest) = ready(&rig, feature::USUAL);
    let file = memfd(MIB);
    let overlapping = [vec![0; 8], region_words(8 * MIB, MIB, USER_BASE, 0)].concat();
    let unknown = [vec![0; 8], region_words(EXTRA, MIB, USER_BASE + EXTRA, 0)].concat();
    assert_eq!(front_end.acked(code::ADD_MEM_REG, &overlapping, &[file.as_fd()]), REFUSED);
    assert_eq!(front_end.acked(code::REM_MEM_REG, &unknown, &[]), REFUSED);
    assert!(serves(&mut guest));
}

#[test]
fn last_bytes_of_a_region_that_is_no_multiple_of_a_page_are_usable() {
    let rig = Rig::start(Options::buffered());
    let bytes = 16 * MIB + 512;
    let file = memfd(bytes);
    let (_front_end, mut guest) = ready_with(&rig, vec![region(&file, 0, bytes, 0)]);
    assert!(round_trip(&mut guest, bytes - 4096, 8));
    assert_eq!(guest.request(kind::IN, 0, &[], 512).status, Some(OK));
}

#[test]
fn regions_at_offsets_of_one_file_and_above_4_gib_are_told_apart() {
    let rig = Rig::start(Options::default());
    let file = memfd(48 * MIB);
    let regions = [(0, 0), (EXTRA, 16), (HIGH, 32)].map(|(addr, at)| region(&file, addr, 16 * MIB, at * MIB));
    let (_front_end, mut guest) = ready_with(&rig, regions.into());
    assert!(round_trip(&mut guest, EXTRA, 0));
    assert!(round_trip(&mut guest, HIGH + MIB, 8));
    let mut byte = [0; 1];
    rustix::io::pread(&file, &mut byte, 33 * MIB).unwrap();
    let mut seen = [0; 1];
    guest.view.read(HIGH + MIB, &mut seen).unwrap();
    assert_eq!((byte, seen != [0]), (seen, true));
}

#[test]
fn buffer_across_two_adjacent_regions_is_split() {
    let rig = Rig::start(Options::default());
    let (low, high) = (memfd(16 * MIB), memfd(MIB));
    let regions = vec![region(&low, 0, 16 * MIB, 0), region(&high, 16 * MIB, MIB, 0)];
    let (_front_end, mut guest) = ready_with(&rig, regions);
    assert!(round_trip(&mut guest, 16 * MIB - 2048, 0));
}

#[test]
fn repeated_table_is_not_mapped_again_and_the_queue_runs_on() {
    let (options, engine) = faulty();
    let rig = Rig::start(options);
    let file = memfd(16 * MIB);
    let (mut front_end, mut guest) = ready_in(&rig, &file);
    let regions = front_end.memory.regions().to_vec();
    hold(&engine);
    let pending = add_transfer(&mut guest, kind::IN, 0, 8 * MIB, 4096);
    guest.submit();
    // The reply comes although a request is in flight, because no region is removed.
    (0..4).for_each(|_| share(&mut front_end, regions.clone()));
    assert_eq!(mappings(&file), 2);
    let_go(&engine);
    guest.wait_for(pending.token);
    assert!(serves(&mut guest));
}

#[test]
fn removal_is_answered_only_after_the_requests_in_flight_are_complete() {
    let (options, engine) = faulty();
    let rig = Rig::start(options);
    let (main, extra) = (memfd(16 * MIB), memfd(MIB));
    let (mut front_end, mut guest) = ready_in(&rig, &main);
    add(&mut front_end, &mut guest, region(&extra, EXTRA, MIB, 0));
    hold(&engine);
    let pending = add_transfer(&mut guest, kind::IN, 0, EXTRA, 4096);
    guest.submit();
    assert!(eventually(|| engine.hanging() == 1));
    let gone = single_region_bytes(&front_end.memory.regions()[1]);
    front_end.send_flags(code::REM_MEM_REG, 9, &gone, &[]);
    front_end.socket().set_read_timeout(Some(CALM)).unwrap();
    assert!(front_end.receive().is_none());
    front_end.socket().set_read_timeout(Some(rig::PATIENCE)).unwrap();
    let_go(&engine);
    assert_eq!(front_end.receive().unwrap().u64(), 0);
    // The test itself has one mapping.
    assert_eq!(mappings(&extra), 1);
    guest.wait_for(pending.token);
    assert_eq!(pending.status(&guest), OK);
    assert!(serves(&mut guest));
}

#[test]
fn requests_put_while_a_removal_drains_the_queue_are_served_after_it() {
    let (options, engine) = faulty();
    let rig = Rig::start(options);
    let (main, extra) = (memfd(16 * MIB), memfd(MIB));
    let (mut front_end, mut guest) = ready_in(&rig, &main);
    add(&mut front_end, &mut guest, region(&extra, EXTRA, MIB, 0));
    hold(&engine);
    let first = add_transfer(&mut guest, kind::IN, 0, EXTRA, 4096);
    guest.submit();
    assert!(eventually(|| engine.hanging() == 1));
    let gone = single_region_bytes(&front_end.memory.regions()[1]);
    front_end.send_flags(code::REM_MEM_REG, 9, &gone, &[]);
    std::thread::sleep(CALM);
    let second = add_transfer(&mut guest, kind::IN, 0, 8 * MIB, 4096);
    guest.submit();
    let_go(&engine);
    assert_eq!(front_end.receive().unwrap().u64(), 0);
    guest.wait_for(first.token);
    guest.wait_for(second.token);
    assert_eq!((first.status(&guest), second.status(&guest)), (OK, OK));
}

fn regions_come_and_go_while_the_queue_is_busy(ring: Format) {
    let rig = Rig::start(Options::default());
    let (main, extra) = (memfd(16 * MIB), memfd(MIB));
    let regions = vec![region(&main, 0, 16 * MIB, 0)];
    let (mut front_end, mut guest) = ready_with_features(&rig, regions, ring.usual());
    for round in 0..50 {
        let busy: Vec<Pending> =
            (0..32).map(|n| add_transfer(&mut guest, kind::IN, n * 8, 8 * MIB + n * 4096, 4096)).collect();
        guest.submit();
        add(&mut front_end, &mut guest, region(&extra, EXTRA, MIB, 0));
        assert!(busy.iter().all(|_| guest.next_used().is_some()));
        assert!(busy.iter().all(|pending| pending.status(&guest) == OK));
        assert!(round_trip(&mut guest, EXTRA, round * 8));
        front_end.remove_region(EXTRA);
        guest.view = MemoryView::new(Arc::clone(&front_end.memory));
    }
    assert!(eventually(|| mappings(&extra) == 0));
    assert!(serves(&mut guest));
}

#[test]
fn memory_is_unmapped_after_the_front_end_is_gone() {
    let rig = Rig::start(Options::default());
    let file = memfd(16 * MIB);
    let (front_end, mut guest) = ready_in(&rig, &file);
    assert!(serves(&mut guest));
    assert_eq!(mappings(&file), 2);
    drop((front_end, guest));
    assert!(eventually(|| mappings(&file) == 0));
}

/// To grow a region, a front-end removes it and adds a larger one, while the queue runs.
fn queue_whose_ring_loses_its_region_goes_on_when_it_is_back(ring: Format) {
    let rig = Rig::start(Options::default());
    let file = memfd(16 * MIB);
    let regions = vec![region(&file, 0, 16 * MIB, 0)];
    let (front_end, mut guest) = ready_with_features(&rig, regions, ring.usual());
    assert!(serves(&mut guest));
    let body = single_region_bytes(&front_end.memory.regions()[0]);
    front_end.ok(code::REM_MEM_REG, &body, &[]);
    assert_eq!(mappings(&file), 1);
    let pending = add_transfer(&mut guest, kind::IN, 0, 8 * MIB, 4096);
    guest.submit();
    front_end.ok(code::ADD_MEM_REG, &body, &[file.as_fd()]);
    guest.wait_for(pending.token);
    assert!(serves(&mut guest));
}

#[test]
fn queue_whose_ring_comes_with_a_later_region_starts_with_it() {
    let rig = Rig::start(Options::default());
    let file = memfd(16 * MIB);
    let mut front_end = rig.connect();
    front_end.negotiate(feature::USUAL);
    front_end.add_region(EXTRA, MIB);
    let ring = region(&file, 0, 16 * MIB, 0);
    front_end.memory = Arc::new(front_end.memory.with_region(Arc::clone(&ring)).unwrap());
    let mut guest = front_end.new_guest(0, 256, feature::USUAL);
    front_end.announce_queue(&guest);
    front_end.ok(code::SET_VRING_ENABLE, &vring_state(0, 1), &[]);
    front_end.ok(code::ADD_MEM_REG, &single_region_bytes(&ring), &[file.as_fd()]);
    assert!(serves(&mut guest));
}

#[test]
fn ring_outside_memory_is_reported_and_the_other_queues_go_on() {
    let rig = Rig::start(Options::default());
    let (front_end, mut guest) = ready(&rig, feature::USUAL);
    let mut lost = front_end.new_guest(1, 256, feature::USUAL);
    let layout = lost.layout;
    lost.layout.used.0 += 1 << 40;
    front_end.announce_queue(&lost);
    front_end.ok(code::SET_VRING_ENABLE, &vring_state(1, 1), &[]);
    assert!(lost.err_signalled());
    assert!(serves(&mut guest));
    front_end.stop_queue(1);
    lost.layout = layout;
    front_end.announce_queue(&lost);
    assert!(serves(&mut lost));
}

#[test]
fn ring_that_crosses_regions_is_reported_and_a_right_address_revives_it() {
    let rig = Rig::start(Options::default());
    let (low, high) = (memfd(16 * MIB), memfd(MIB));
    let regions = vec![region(&low, 0, 16 * MIB, 0), region(&high, 16 * MIB, MIB, 0)];
    let (front_end, mut guest) = ready_with(&rig, regions);
    let mut across = front_end.new_guest(1, 256, feature::USUAL);
    let layout = across.layout;
    across.layout.descriptors.0 = 16 * MIB - 16;
    front_end.announce_queue(&across);
    front_end.ok(code::SET_VRING_ENABLE, &vring_state(1, 1), &[]);
    assert!(across.err_signalled());
    assert!(serves(&mut guest));
    let index = 1u64.to_ne_bytes();
    front_end.ok(code::SET_VRING_ADDR, &vring_addr(1, &layout), &[]);
    front_end.ok(code::SET_VRING_KICK, &index, &[across.kick.as_fd()]);
    assert!(serves(&mut across));
}

const HUGE_PAGES: &str = "/proc/sys/vm/nr_hugepages";

/// Restores the machine's number of huge pages when dropped.
struct HugePages(u64);

impl Drop for HugePages {
    fn drop(&mut self) {
        let _ = std::fs::write(HUGE_PAGES, self.0.to_string());
    }
}

/// Reserves huge pages for one test; `None` on a machine without them, or without the right.
fn huge_memfd(bytes: u64) -> Option<(OwnedFd, HugePages)> {
    let fd = memfd_create("bareblk-huge", MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB).ok()?;
    ftruncate(&fd, bytes).ok()?;
    let had = std::fs::read_to_string(HUGE_PAGES).ok()?.trim().parse().ok()?;
    let pages = HugePages(had);
    let _ = std::fs::write(HUGE_PAGES, (had + bytes / (2 * MIB) + 2).to_string());
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
    let free = meminfo.lines().find_map(|line| line.strip_prefix("HugePages_Free:"))?;
    let free: u64 = free.trim().parse().ok()?;
    (free * 2 * MIB >= bytes).then_some((fd, pages))
}

#[test]
fn memory_of_huge_pages_works_at_offsets_that_are_no_multiple_of_one() {
    let Some((file, _pages)) = huge_memfd(20 * MIB) else {
        return xtask::skip::skip(xtask::skip::Reason::NoHugePages, "");
    };
    let rig = Rig::start(Options::default());
    let regions = vec![region(&file, 0, 15 * MIB, 0), region(&file, EXTRA, 3 * MIB, 15 * MIB)];
    let (_front_end, mut guest) = ready_with(&rig, regions);
    assert!(serves(&mut guest));
    assert!(round_trip(&mut guest, EXTRA + MIB, 0));
}

#[test]
fn truncated_ring_memory_ends_its_session_and_no_other() {
    let rig = Rig::start(Options { disks: 2, ..Options::default() });
    let file = memfd(16 * MIB);
    let (front_end, mut guest) = ready_in(&rig, &file);
    let mut other = rig.connect_to(1);
    other.negotiate(feature::USUAL);
    other.share_memory(16 * MIB);
    let mut other_guest = other.start_queue(0, 256, feature::USUAL);
    assert!(serves(&mut guest) && serves(&mut other_guest));
    ftruncate(&file, 0).unwrap();
    guest.kick();
    assert!(front_end.is_closed());
    assert!(serves(&mut other_guest));
    assert!(works(&rig));
}

#[test]
fn truncated_data_memory_fails_the_request_and_no_other_disk() {
    let rig = Rig::start(Options { disks: 2, ..Options::default() });
    let (main, extra) = (memfd(16 * MIB), memfd(MIB));
    let regions = vec![region(&main, 0, 16 * MIB, 0), region(&extra, EXTRA, MIB, 0)];
    let (_front_end, mut guest) = ready_with(&rig, regions);
    let mut other = rig.connect_to(1);
    other.negotiate(feature::USUAL);
    other.share_memory(16 * MIB);
    let mut other_guest = other.start_queue(0, 256, feature::USUAL);
    ftruncate(&extra, 0).unwrap();
    let read = transfer(&mut guest, kind::IN, 0, EXTRA, 4096);
    let written = transfer(&mut guest, kind::OUT, 0, EXTRA, 4096);
    assert_eq!((read, written), (IOERR, IOERR));
    assert!(serves(&mut other_guest));
    assert!(serves(&mut guest));
}

#[test]
fn truncated_header_memory_ends_the_session_without_a_crash() {
    let rig = Rig::start(Options::default());
    let (main, extra) = (memfd(16 * MIB), memfd(MIB));
    let regions = vec![region(&main, 0, 16 * MIB, 0), region(&extra, EXTRA, MIB, 0)];
    let (front_end, mut guest) = ready_with(&rig, regions);
    guest.view.store(EXTRA, &header_bytes(kind::IN, 0)).unwrap();
    let range = |addr, len_bytes| GuestRange { addr, len_bytes };
    guest.add(&[range(EXTRA, 16)], &[range(8 * MIB, 512), range(9 * MIB, 1)]);
    ftruncate(&extra, 0).unwrap();
    guest.submit();
    assert!(front_end.is_closed());
    assert!(works(&rig));
}
