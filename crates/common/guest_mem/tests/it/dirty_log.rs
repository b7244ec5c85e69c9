//! The dirty log's bits: which bits a store sets, logs that are too small, and a front-end that takes bits at
//! the same time.
#![allow(missing_docs, clippy::cast_possible_truncation, clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use guest_mem::{
    DirtyLog, GuestAddress, GuestMemory, GuestRange, IoVecs, LOG_PAGE_BYTES as PAGE, LoggedElsewhere,
    MAX_LOG_BYTES, MemoryError, MemoryView, Region, RegionSpec, StoreLog,
};
use proptest::prelude::*;

const MEMORY_BYTES: u64 = 64 * PAGE;

fn region(guest_addr: u64, size_bytes: u64) -> Arc<Region> {
    Arc::new(Region::from_memfd(GuestAddress(guest_addr), size_bytes).unwrap())
}

fn bits(bytes: u64) -> Arc<DirtyLog> {
    Arc::new(DirtyLog::of_region(Region::from_memfd(GuestAddress(0), bytes).unwrap()))
}

fn log(bits: &Arc<DirtyLog>) -> Option<Arc<StoreLog>> {
    Some(Arc::new(StoreLog::new(Arc::clone(bits), [].into(), None)))
}

/// Memory of 64 pages in two regions that meet at page 24, and its log.
fn logged() -> (MemoryView, Arc<DirtyLog>) {
    let memory = GuestMemory::new(vec![region(0, 24 * PAGE), region(24 * PAGE, 40 * PAGE)]).unwrap();
    let bits = bits(8);
    let memory = memory.with_log(log(&bits)).unwrap();
    (MemoryView::new(Arc::new(memory)), bits)
}

fn pages(numbers: impl IntoIterator<Item = u64>) -> Vec<u64> {
    numbers.into_iter().map(|page| page * PAGE).collect()
}

#[test]
fn store_sets_the_bit_of_its_page_and_no_other() {
    let (view, bits) = logged();
    view.store(9 * PAGE + 7, &[1]).unwrap();
    assert_eq!(bits.take(), pages([9]));
    assert_eq!(bits.take(), pages([]));
}

#[test]
fn store_across_pages_sets_all_their_bits() {
    let (view, bits) = logged();
    view.store(7 * PAGE - 1, &vec![0; 10 * PAGE as usize + 2]).unwrap();
    assert_eq!(bits.take(), pages(6..=17));
    view.store(8 * PAGE, &vec![0; 8 * PAGE as usize]).unwrap();
    assert_eq!(bits.take(), pages(8..16));
}

#[test]
fn store_across_regions_and_at_the_very_end_is_noted() {
    let (view, bits) = logged();
    view.store(24 * PAGE - 2, &[0; 4]).unwrap();
    view.store(MEMORY_BYTES - 1, &[0]).unwrap();
    assert_eq!(bits.take(), pages([23, 24, 63]));
}

#[test]
fn store_that_is_refused_and_one_of_no_bytes_are_not_noted() {
    let (view, bits) = logged();
    view.store(MEMORY_BYTES - 1, &[0; 2]).unwrap_err();
    view.store(5 * PAGE, &[]).unwrap();
    assert_eq!(bits.take(), pages([]));
}

#[test]
fn ring_field_is_noted_with_its_own_address() {
    let (view, bits) = logged();
    let words = view.memory().shared_slice::<u64>(GuestAddress(2 * PAGE), 1024).unwrap();
    words.store(600, 1, Ordering::Release);
    assert_eq!(bits.take(), pages([3]));
}

#[test]
fn memory_without_a_log_notes_nothing_and_neither_does_one_made_from_it() {
    let (view, bits) = logged();
    let grown = view.memory().with_region(region(1 << 32, PAGE)).unwrap();
    assert!(view.memory().logs_stores() && !grown.logs_stores());
    let off = view.memory().with_log(None).unwrap();
    MemoryView::new(Arc::new(off)).store(0, &[1]).unwrap();
    assert_eq!(bits.take(), pages([]));
}

#[test]
fn memory_beyond_its_log_is_refused_with_what_is_needed() {
    let (view, _) = logged();
    let refused = view.memory().with_log(log(&bits(7))).unwrap_err();
    assert_eq!(refused, MemoryError::BeyondLog { end: MEMORY_BYTES, log_bytes: 7, needed_bytes: 8 });
    let odd = GuestMemory::new(vec![region(0, 8 * PAGE + 1)]).unwrap();
    assert!(odd.with_log(log(&bits(1))).is_err());
    assert!(odd.with_log(log(&bits(2))).is_ok());
}

#[test]
fn part_that_is_logged_elsewhere_is_noted_in_both_places() {
    let (view, _) = logged();
    let bits = bits(64);
    let part = LoggedElsewhere { addr: 3 * PAGE + 100, len_bytes: 50, log_addr: 200 * PAGE - 20 };
    let log = StoreLog::new(Arc::clone(&bits), [part].into(), None);
    let view = MemoryView::new(Arc::new(view.memory().with_log(Some(Arc::new(log))).unwrap()));
    for (store, len, elsewhere) in [
        (99, 1, vec![]),
        (100, 1, vec![199]),
        (119, 2, vec![199, 200]),
        (150, 9, vec![]),
        (0, 4096, vec![199, 200]),
    ] {
        view.store(3 * PAGE + store, &vec![0; len]).unwrap();
        assert_eq!(bits.take(), pages([3].into_iter().chain(elsewhere)), "{store} + {len}");
    }
}

#[test]
fn part_that_is_to_be_logged_beyond_the_log_is_refused() {
    let (view, bits) = logged();
    let with = |log_addr| {
        let part = LoggedElsewhere { addr: 0, len_bytes: 100, log_addr };
        view.memory().with_log(Some(Arc::new(StoreLog::new(Arc::clone(&bits), [part].into(), None))))
    };
    assert!(with(MEMORY_BYTES - 100).is_ok());
    assert!(with(MEMORY_BYTES - 99).is_err());
    assert!(with(u64::MAX - 10).is_err());
}

#[test]
#[cfg(not(miri))]
fn log_larger_than_any_guest_is_mapped_in_part_and_one_larger_than_its_file_is_refused() {
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    let fd = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, 4 * MAX_LOG_BYTES).unwrap();
    let log = DirtyLog::map(fd.try_clone().unwrap(), 2 * MAX_LOG_BYTES, 0).unwrap();
    assert_eq!(log.end(), 1 << 52);
    assert!(DirtyLog::map(fd.try_clone().unwrap(), 0, 0).is_err());
    assert!(DirtyLog::map(fd.try_clone().unwrap(), 8, u64::MAX - 3).is_err());
    assert!(DirtyLog::map(fd, 2, 4 * MAX_LOG_BYTES - 1).is_err());
}

#[test]
#[cfg(not(miri))]
fn log_whose_file_is_cut_off_is_poisoned_by_the_next_bit() {
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    let fd = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, 4096).unwrap();
    let bits = Arc::new(DirtyLog::map(fd.try_clone().unwrap(), 8, 0).unwrap());
    let memory = GuestMemory::new(vec![region(0, MEMORY_BYTES)]).unwrap().with_log(log(&bits)).unwrap();
    ftruncate(&fd, 0).unwrap();
    assert!(!bits.is_poisoned());
    memory.note_store(0, 1);
    assert!(bits.is_poisoned() && !memory.is_poisoned());
}

// ---- buffers filled by another writer

proptest! {
    /// All buffers are marked as a whole, and nothing outside them, even if they were completed piece by piece.
    #[test]
    fn buffers_are_noted_as_a_whole_however_far_they_are_done(
        pieces in prop::collection::vec((0..MEMORY_BYTES - 20_000, 1u32..20_000), 1..8),
        steps in prop::collection::vec(1u64..9000, 0..12),
    ) {
        let (view, bits) = logged();
        let old = MemoryView::new(Arc::new(view.memory().with_log(None).unwrap()));
        let mut vecs = IoVecs::with_capacity(16);
        vecs.fill(&old, pieces.iter().map(|&(addr, len_bytes)| GuestRange { addr, len_bytes })).unwrap();
        for step in steps {
            vecs.advance(step.min(vecs.remaining_bytes()));
        }
        vecs.note_filled(view.memory());
        let touched = |&(addr, len): &(u64, u32)| addr / PAGE..=(addr + u64::from(len) - 1) / PAGE;
        let expected: BTreeSet<_> = pieces.iter().flat_map(touched).collect();
        prop_assert_eq!(bits.take(), pages(expected));
    }
}

// ---- a front-end that takes bits at the same time

/// The log lies in the page that is stored to: the store would overwrite a bit that was set before it.
#[test]
#[cfg(not(miri))]
fn bit_is_set_after_the_store() {
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    let fd = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, PAGE).unwrap();
    let bits = Arc::new(DirtyLog::map(fd.try_clone().unwrap(), 8, 0).unwrap());
    let spec =
        RegionSpec { guest_addr: GuestAddress(0), size_bytes: PAGE, user_addr: 0, file_offset_bytes: 0 };
    let region = Arc::new(Region::map(spec, Arc::new(fd)).unwrap());
    let memory = Arc::new(GuestMemory::new(vec![region]).unwrap().with_log(log(&bits)).unwrap());

    MemoryView::new(Arc::clone(&memory)).store(0, &[0]).unwrap();
    assert_eq!(bits.take(), pages([0]));
    memory.shared_slice::<u8>(GuestAddress(0), 1).unwrap().store(0, 0, Ordering::Relaxed);
    assert_eq!(bits.take(), pages([0]));
}

/// The invariant of a migration: a front-end that takes a page's bit and then copies the page has every
/// store, or gets the bit again. Each round ends with stores; the second store finds the bit set, or just
/// taken.
#[test]
fn store_is_in_the_copy_or_its_page_is_in_the_log_again() {
    let rounds = if cfg!(miri) { 20 } else { 4_000_u32 };
    let (view, bits) = logged();
    let word = view.memory().shared_slice::<u32>(GuestAddress(0), 1).unwrap();
    let (stored, copied) = (AtomicU32::new(0), AtomicU32::new(0));
    let wait_for = |number: &AtomicU32, round| {
        while number.load(Ordering::Acquire) < round {
            std::thread::yield_now();
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 1..=rounds {
                (0..8).for_each(|step| word.store(0, 8 * round + step, Ordering::Relaxed));
                stored.store(round, Ordering::Release);
                wait_for(&copied, round);
            }
        });
        for round in 1..=rounds {
            let mut copy = 0;
            let mut is_over = false;
            while !is_over {
                is_over = stored.load(Ordering::Acquire) == round;
                if !bits.take().is_empty() {
                    copy = word.load(0, Ordering::Relaxed);
                }
            }
            copied.store(round, Ordering::Release);
            assert_eq!(copy, 8 * round + 7, "round {round}");
        }
    });
}
