//! Guest memory as its users see it: real memfds, two regions, gaps, truncation while mapped.
#![allow(missing_docs, clippy::cast_possible_truncation, clippy::unwrap_used)]

use std::sync::atomic::Ordering;
use std::sync::{Arc, Barrier};

use guest_mem::{
    AccessError, FillError, GuestAddress, GuestMemory, GuestRange, IoVecs, MapError, MemoryError, MemoryView,
    PieceCursor, Region, RegionSpec, sigbus,
};
use proptest::prelude::*;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

const PAGE: u64 = 4096;

fn memfd(size_bytes: u64) -> Arc<std::os::fd::OwnedFd> {
    let fd = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, size_bytes).unwrap();
    Arc::new(fd)
}

fn region(guest_addr: u64, size_bytes: u64) -> Arc<Region> {
    Arc::new(Region::from_memfd(GuestAddress(guest_addr), size_bytes).unwrap())
}

fn spec(guest_addr: u64, size_bytes: u64, file_offset_bytes: u64) -> RegionSpec {
    let user_addr = 0x7000_0000_0000 + guest_addr;
    RegionSpec { guest_addr: GuestAddress(guest_addr), size_bytes, user_addr, file_offset_bytes }
}

/// Two adjacent regions (at 0 and at 4 pages), a gap, and a region above 4 GiB.
fn view() -> MemoryView {
    let regions = vec![region(1 << 32, 4 * PAGE), region(0, 4 * PAGE), region(4 * PAGE, 4 * PAGE)];
    MemoryView::new(Arc::new(GuestMemory::new(regions).unwrap()))
}

#[test]
fn bytes_stored_across_adjacent_regions_are_read_back() {
    let view = view();
    view.store(4 * PAGE - 3, b"abcdef").unwrap();
    let mut out = [0; 6];
    view.read(4 * PAGE - 3, &mut out).unwrap();
    assert_eq!(&out, b"abcdef");
}

#[test]
fn store_that_ends_in_a_gap_is_refused_and_stores_nothing() {
    let view = view();
    let refused = view.store(8 * PAGE - 2, b"abcd");
    let mut out = [9; 2];
    view.read(8 * PAGE - 2, &mut out).unwrap();
    assert_eq!(refused, Err(AccessError::Unmapped { addr: 8 * PAGE - 2, len_bytes: 4 }));
    assert_eq!(out, [0, 0]);
}

#[test]
fn range_that_wraps_the_address_space_is_refused() {
    let refused = view().read(u64::MAX - 1, &mut [0; 4]);
    assert_eq!(refused, Err(AccessError::Unmapped { addr: u64::MAX - 1, len_bytes: 4 }));
}

#[test]
fn memory_above_four_gib_is_reachable() {
    let view = view();
    view.store((1 << 32) + 5, &[7]).unwrap();
    let mut out = [0];
    view.read((1 << 32) + 5, &mut out).unwrap();
    assert_eq!(out, [7]);
}

#[test]
fn overlapping_regions_are_refused_with_both_addresses() {
    let refused = GuestMemory::new(vec![region(PAGE, 2 * PAGE), region(0, PAGE + 1)]);
    assert_eq!(refused.unwrap_err(), MemoryError::Overlap { first: 0, second: PAGE });
}

#[test]
fn region_larger_than_its_file_is_refused_with_both_sizes() {
    let refused = Region::map(spec(0, 2 * PAGE, PAGE), memfd(2 * PAGE)).unwrap_err();
    assert!(
        matches!(refused, MapError::BeyondFile { end_bytes, file_bytes, .. } if end_bytes == 3 * PAGE && file_bytes == 2 * PAGE)
    );
}

#[test]
fn region_sizes_that_wrap_are_refused() {
    let wraps = RegionSpec { user_addr: u64::MAX, ..spec(0, PAGE, 0) };
    assert!(matches!(Region::map(wraps, memfd(PAGE)), Err(MapError::Overflow { what: "user address", .. })));
    assert!(matches!(Region::map(spec(0, 0, 0), memfd(PAGE)), Err(MapError::Empty { .. })));
}

#[test]
fn two_regions_of_one_file_at_unaligned_offsets_see_their_own_bytes() {
    let fd = memfd(4 * PAGE);
    let low = Arc::new(Region::map(spec(0, 1000, 0), Arc::clone(&fd)).unwrap());
    let high = Arc::new(Region::map(spec(PAGE, 5000, 1000), Arc::clone(&fd)).unwrap());
    let view = MemoryView::new(Arc::new(GuestMemory::new(vec![low, high]).unwrap()));
    view.store(PAGE, &[42]).unwrap();
    let mut byte = [0];
    rustix::io::pread(&fd, &mut byte[..], 1000).unwrap();
    assert_eq!(byte, [42]);
    assert!(view.read(1000, &mut byte).is_err());
}

#[test]
fn region_announced_again_is_recognised_and_another_file_is_not() {
    let fd = memfd(PAGE);
    let region = Region::map(spec(0, PAGE, 0), Arc::clone(&fd)).unwrap();
    assert!(region.is_same(&spec(0, PAGE, 0), &fd));
    assert!(!region.is_same(&spec(0, PAGE, 0), memfd(PAGE)));
    assert!(!region.is_same(&spec(PAGE, PAGE, 0), &fd));
}

#[test]
fn region_is_removed_by_its_addresses_and_only_then() {
    let memory = GuestMemory::new(vec![region(0, PAGE), region(PAGE, PAGE)]).unwrap();
    let of_second = *memory.regions()[1].spec();
    let smaller = memory.without_region(&of_second).unwrap();
    assert_eq!(smaller.regions().len(), 1);
    assert!(matches!(smaller.without_region(&of_second), Err(MemoryError::NoSuchRegion { .. })));
}

#[test]
fn user_address_is_translated_by_its_region() {
    let region = Arc::new(Region::map(spec(8 * PAGE, PAGE, 0), memfd(PAGE)).unwrap());
    let memory = GuestMemory::new(vec![region]).unwrap();
    let first = 0x7000_0000_0000 + 8 * PAGE;
    assert_eq!(memory.user_to_guest(first + 5), Some(GuestAddress(8 * PAGE + 5)));
    assert_eq!(memory.user_to_guest(first + PAGE), None);
}

#[test]
fn ring_part_must_be_aligned_mapped_and_inside_one_region() {
    let memory = Arc::clone(view().memory());
    let slice = |addr, len| memory.shared_slice::<u32>(GuestAddress(addr), len).map(|s| s.len());
    assert_eq!(slice(8, 4), Ok(4));
    assert_eq!(slice(6, 4), Err(AccessError::Misaligned { addr: 6, align_bytes: 4 }));
    assert_eq!(slice(4 * PAGE - 8, 4), Err(AccessError::Split { addr: 4 * PAGE - 8, len_bytes: 16 }));
    assert_eq!(slice(8 * PAGE - 8, 4), Err(AccessError::Unmapped { addr: 8 * PAGE - 8, len_bytes: 16 }));
}

#[test]
fn ring_values_are_little_endian_in_memory() {
    let view = view();
    let slice = view.memory().shared_slice::<u32>(GuestAddress(0), 2).unwrap();
    slice.store(1, 0x0102_0304, Ordering::Release);
    let mut out = [0; 4];
    view.read(4, &mut out).unwrap();
    assert_eq!(out, [4, 3, 2, 1]);
}

#[test]
fn buffers_that_cross_regions_are_split_and_copied_in_order() {
    let view = view();
    let mut vecs = IoVecs::with_capacity(4);
    vecs.fill(&view, [GuestRange { addr: 4 * PAGE - 2, len_bytes: 4 }]).unwrap();
    assert_eq!(vecs.as_raw().len(), 2);
    assert_eq!(vecs.copy_in(b"wxyz"), 4);
    let mut out = [0; 8];
    assert_eq!(vecs.copy_out(&mut out), 4);
    assert_eq!(&out[..4], b"wxyz");
}

#[test]
fn buffers_beyond_the_capacity_are_refused_and_leave_nothing() {
    let range = GuestRange { addr: 0, len_bytes: 512 };
    let mut vecs = IoVecs::with_capacity(2);
    let capacity = vecs.capacity();
    let refused = vecs.fill(&view(), std::iter::repeat_n(range, capacity + 1));
    assert_eq!(refused, Err(FillError::Full { capacity }));
    assert_eq!(vecs.remaining_bytes(), 0);
}

#[test]
fn buffers_without_room_hold_nothing_and_refuse_the_first_piece() {
    let mut vecs = IoVecs::default();
    assert_eq!((vecs.capacity(), vecs.remaining_bytes(), vecs.as_raw().len()), (0, 0, 0));
    let refused = vecs.fill(&view(), [GuestRange { addr: 0, len_bytes: 512 }]);
    assert_eq!(refused, Err(FillError::Full { capacity: 0 }));
    assert_eq!(vecs.fill(&view(), []), Ok(()));
}

#[test]
fn parts_follow_each_other_as_far_as_they_have_room_and_leave_the_buffers_whole() {
    let view = view();
    let (mut vecs, mut part) = (IoVecs::with_capacity(3), IoVecs::with_capacity(2));
    let range = |addr, len_bytes| GuestRange { addr, len_bytes };
    vecs.fill(&view, [range(0, 100), range(1000, 10), range(2000, 100)]).unwrap();
    let mut cursor = PieceCursor::default();
    assert_eq!(vecs.part(&mut cursor, 60, &mut part), 60);
    part.copy_in(&[1; 60]);
    // Three pieces, of which two have room.
    assert_eq!(vecs.part(&mut cursor, 120, &mut part), 50);
    part.copy_in(&[2; 50]);
    assert_eq!(vecs.part(&mut cursor, 1000, &mut part), 100);
    assert_eq!(part.copy_in(&[3; 200]), 100);
    assert_eq!(vecs.part(&mut cursor, 1, &mut part), 0);
    let mut out = [0; 300];
    assert_eq!((vecs.remaining_bytes(), vecs.copy_out(&mut out)), (210, 210));
    assert_eq!(out[..60], [1; 60]);
    assert_eq!(out[60..110], [2; 50]);
    assert_eq!(out[110..210], [3; 100]);
    assert!(part.holds(view.memory()));
}

#[test]
fn buffers_are_done_piece_by_piece_and_at_once() {
    let view = view();
    let pieces = [GuestRange { addr: 0, len_bytes: 512 }, GuestRange { addr: 1024, len_bytes: 512 }];
    let mut vecs = IoVecs::with_capacity(2);
    vecs.fill(&view, pieces).unwrap();
    vecs.advance(600);
    assert_eq!((vecs.as_raw().len(), vecs.remaining_bytes()), (1, 424));
    vecs.advance(424);
    assert_eq!((vecs.as_raw().len(), vecs.remaining_bytes()), (0, 0));
}

#[test]
fn addresses_found_in_turns_in_two_regions_and_between_them_are_told_apart() {
    let regions = vec![region(0, PAGE), region(4 * PAGE, PAGE)];
    let view = MemoryView::new(Arc::new(GuestMemory::new(regions).unwrap()));
    view.store(PAGE - 4, b"low.").unwrap();
    view.store(4 * PAGE, b"high").unwrap();
    let read = |addr| {
        let mut out = [0; 4];
        view.read(addr, &mut out).map(|()| out)
    };
    assert_eq!(read(PAGE - 4), Ok(*b"low."));
    assert_eq!(read(4 * PAGE), Ok(*b"high"));
    assert!(read(PAGE).is_err() && read(4 * PAGE - 4).is_err() && read(5 * PAGE).is_err());
    assert!(read(PAGE - 2).is_err(), "the second half is in no region");
    assert_eq!(read(PAGE - 4), Ok(*b"low."));
    assert!(view.check(PAGE - 1, 1).is_ok() && view.check(PAGE - 1, 2).is_err());
    assert!(view.check(u64::MAX, 1).is_err() && view.check(u64::MAX - 1, 4).is_err());
}

#[test]
fn rest_of_buffers_is_found_again_by_its_guest_addresses_in_another_memory() {
    let view = view();
    let mut vecs = IoVecs::with_capacity(4);
    vecs.fill(&view, [GuestRange { addr: 3 * PAGE, len_bytes: 2 * PAGE as u32 }]).unwrap();
    vecs.advance(100);
    let mut rest = vecs.take_rest();
    assert_eq!((vecs.remaining_bytes(), rest.remaining_bytes()), (0, 2 * PAGE - 100));

    // The same addresses in a single region.
    let other = MemoryView::new(Arc::new(GuestMemory::new(vec![region(0, 8 * PAGE)]).unwrap()));
    other.store(3 * PAGE + 100, b"new").unwrap();
    rest.rebind(&other).unwrap();
    let mut out = [0; 3];
    rest.copy_out(&mut out);
    assert_eq!((&out, rest.remaining_bytes()), (b"new", 2 * PAGE - 100));
    assert!(rest.holds(other.memory()) && !rest.holds(view.memory()));

    let without = MemoryView::new(Arc::new(GuestMemory::new(vec![region(0, 4 * PAGE)]).unwrap()));
    assert!(rest.rebind(&without).is_err());
    assert_eq!(rest.remaining_bytes(), 0);
    assert!(!rest.holds(without.memory()) && !rest.holds(other.memory()));
}

#[test]
fn alignment_looks_at_every_piece() {
    let view = view();
    let mut vecs = IoVecs::with_capacity(2);
    let first = GuestRange { addr: 512, len_bytes: 512 };
    vecs.fill(&view, [first, GuestRange { addr: 1024, len_bytes: 512 }]).unwrap();
    assert!(vecs.is_aligned(512, 512));
    vecs.fill(&view, [first, GuestRange { addr: 1028, len_bytes: 512 }]).unwrap();
    assert!(!vecs.is_aligned(512, 512) && vecs.is_aligned(4, 512));
}

#[test]
fn truncated_file_poisons_the_region_and_the_process_goes_on() {
    let fd = memfd(2 * PAGE);
    let region = Arc::new(Region::map(spec(0, 2 * PAGE, 0), Arc::clone(&fd)).unwrap());
    let view = MemoryView::new(Arc::new(GuestMemory::new(vec![region]).unwrap()));
    let faults_before = sigbus::faults();
    ftruncate(&fd, PAGE).unwrap();
    let mut out = [1; 4];
    view.read(PAGE, &mut out).unwrap();
    assert_eq!(out, [0; 4]);
    assert!(view.memory().poisoned().is_some());
    assert!(sigbus::faults() > faults_before);
}

#[test]
fn faults_all_over_a_truncated_region_take_one_mapping_not_one_each() {
    let pages = 40_000; // more than half of vm.max_map_count
    let fd = memfd(pages * PAGE);
    let region = Arc::new(Region::map(spec(0, pages * PAGE, 0), Arc::clone(&fd)).unwrap());
    let view = MemoryView::new(Arc::new(GuestMemory::new(vec![region]).unwrap()));
    ftruncate(&fd, 0).unwrap();
    let mut byte = [1];
    (0..pages).step_by(2).for_each(|page| view.read(page * PAGE, &mut byte).unwrap());
    assert!(view.memory().poisoned().is_some());
}

#[test]
fn region_without_faults_is_not_poisoned() {
    assert!(view().memory().poisoned().is_none());
}

proptest! {
    /// Advancing through buffers visits every byte once and in order, whatever the steps.
    #[test]
    fn store_of_any_length_at_any_alignment_writes_its_bytes_and_no_others(
        at in 0_usize..32, bytes in prop::collection::vec(any::<u8>(), 0..64),
    ) {
        let view = MemoryView::new(Arc::new(GuestMemory::new(vec![region(0, 128)]).unwrap()));
        let mut expected = [0xa5; 128];
        view.store(0, &expected).unwrap();
        expected[at..at + bytes.len()].copy_from_slice(&bytes);
        view.store(at as u64, &bytes).unwrap();
        let mut found = [0; 128];
        view.read(0, &mut found).unwrap();
        prop_assert_eq!(found, expected);
    }

    #[test]
    fn advancing_in_any_steps_reads_the_same_bytes(
        lengths in prop::collection::vec(0u32..700, 1..12),
        steps in prop::collection::vec(1u64..900, 1..40),
    ) {
        let view = view();
        let pattern: Vec<u8> = (0..8 * PAGE).map(|i| (i * 7 % 251) as u8).collect();
        view.store(0, &pattern).unwrap();
        let mut addr = 4 * PAGE - 1500;
        let ranges: Vec<_> = lengths.iter().map(|&len_bytes| {
            let range = GuestRange { addr, len_bytes };
            addr += u64::from(len_bytes);
            range
        }).collect();
        let mut vecs = IoVecs::with_capacity(32);
        vecs.fill(&view, ranges).unwrap();
        let total = vecs.remaining_bytes();
        let mut seen = Vec::new();
        for step in steps {
            let step = step.min(vecs.remaining_bytes());
            let mut out = vec![0; step as usize];
            prop_assert_eq!(vecs.copy_out(&mut out) as u64, step);
            seen.extend_from_slice(&out);
            vecs.advance(step);
        }
        let start = (4 * PAGE - 1500) as usize;
        prop_assert_eq!(&seen[..], &pattern[start..start + seen.len()]);
        prop_assert_eq!(vecs.remaining_bytes(), total - seen.len() as u64);
    }
}

#[test]
fn who_reads_zeroes_of_ours_in_a_truncated_region_finds_it_poisoned() {
    for round in 0..2000 {
        let fd = memfd(2 * PAGE);
        let region = Arc::new(Region::map(spec(0, 2 * PAGE, 0), Arc::clone(&fd)).unwrap());
        let memory = Arc::new(GuestMemory::new(vec![region]).unwrap());
        let view = MemoryView::new(Arc::clone(&memory));
        view.store(0, &[1]).unwrap();
        ftruncate(&fd, PAGE).unwrap();
        let start = Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let other = MemoryView::new(Arc::clone(&memory));
                start.wait();
                other.read(PAGE, &mut [0]).unwrap();
            });
            start.wait();
            let mut byte = [1];
            while byte == [1] {
                view.read(0, &mut byte).unwrap();
            }
            assert!(view.is_poisoned(), "zeroes were read and not reported, round {round}");
        });
    }
}
