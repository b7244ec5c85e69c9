//! Leaks of an earlier life are freed while the guest goes on, with a loss of power after each call to the disk.

use proptest::prelude::*;
use xtask::sizes::Size;

use crate::check::{Severity, check};
use crate::image::Image;
use crate::tests::headers::extension;
use crate::write::error::WriteError;
use crate::write::space::reclaim::state::StepSize;
use crate::write::space::reclaim::{ReclaimError, Reclaimed};
use crate::write::tests::hostile::{count, host, open, word};
use crate::write::tests::images::{Kind, make};
use crate::write::tests::model::{assert_sound, leaks, unreferenced};
use crate::write::tests::plain::Plain;
use crate::write::tests::world::{Seen, Under, World};
use crate::write::writer::Writer;

const SEEDS: Size<u64> = Size { smoke: 3, full: 60 };
/// Before the kill.
const STEPS: usize = 12;

/// So that the guest gets between the pieces of these small images.
const SMALL: StepSize = StepSize { entries: 1, counts: 7, leaks: 5 };

impl World {
    fn begin_small(&mut self) {
        self.begin_reclaim();
        self.writer.reclaim.as_mut().unwrap().step = SMALL;
    }

    /// The guest's operations come between the steps. If they close the tables, the reclaim begins again.
    fn reclaim_beside_the_guest(&mut self) -> u64 {
        let mut freed = 0;
        self.begin_small();
        loop {
            for _ in 0..self.rng.usize(..3) {
                self.step().unwrap();
            }
            match self.writer.reclaim(&mut self.seen) {
                Ok(step) if step.has_ended => {
                    assert_eq!(step.done, step.total);
                    return freed + step.freed_clusters;
                }
                Ok(step) => assert!(step.done < step.total, "{step:?}"),
                Err(ReclaimError::Ended) => {
                    freed += 1;
                    self.begin_small();
                }
                Err(error) => panic!("{error:?}"),
            }
        }
    }
}

/// A life ends with a full reserve; in the next one, leaks are freed.
#[track_caller]
fn lives(kind: Kind, all: fn(&crate::write::tests::disk::Content) -> u64) {
    let made = make(kind);
    for seed in 0..SEEDS.now() {
        let mut world = World::new(&made, seed);
        for _ in 0..STEPS {
            world.step().unwrap();
        }
        // The reserve is not empty.
        world.reopen().unwrap();
        world.claim(&[0]).unwrap();
        world.writer.refill(40, &mut world.seen).unwrap();
        if seed % 2 == 0 {
            world.kill();
        } else {
            let content = world.disk.crashed();
            world = world.reborn(content);
        }
        let before = unreferenced(&world.disk.now());
        let freed = world.reclaim_beside_the_guest();
        assert!(before > 30 && freed > 0, "{before} leaks, {freed} freed");
        world.assert_view();
        for _ in 0..STEPS {
            world.step().unwrap();
        }
        world.close().unwrap();
        assert_sound(&world.disk.now());
        assert_eq!(all(&world.disk.now()), 0, "{kind:?} {seed}");
    }
}

/// A cluster that a snapshot or other compressed data use, too, may keep a count that is too high.
#[test]
fn leaks_are_freed_beside_a_snapshot() {
    lives(Kind::PLAIN, unreferenced);
    lives(Kind { extended: true, ..Kind::PLAIN }, unreferenced);
    lives(Kind { version: 2, ..Kind::PLAIN }, unreferenced);
}

#[test]
fn nothing_is_left_where_each_cluster_has_one_reference() {
    lives(Kind { refcount_order: 0, snapshot: false, ..Kind::PLAIN }, leaks);
}

#[test]
fn all_widths_of_counts() {
    for refcount_order in [1, 3, 6] {
        lives(Kind { refcount_order, ..Kind::PLAIN }, unreferenced);
    }
}

/// All steps, without a guest.
fn run<F: crate::WriteAt>(writer: &mut Writer<F>) -> Result<Reclaimed, ReclaimError> {
    writer.begin_reclaim(&[])?;
    loop {
        let step = writer.reclaim(&mut ())?;
        if step.has_ended {
            return Ok(step);
        }
    }
}

#[test]
fn image_without_leaks_has_none_to_free() {
    let mut world = World::new(&make(Kind::PLAIN), 1);
    world.claim(&[0, 9, 13]).unwrap();
    world.begin_reclaim();
    let before = world.disk.calls();
    assert_eq!(run(&mut world.writer).unwrap().freed_clusters, 0);
    assert_eq!(world.disk.calls(), before, "a write or a sync for nothing");
    assert!(matches!(world.writer.reclaim(&mut world.seen), Err(ReclaimError::Ended)));
}

#[test]
fn clusters_that_wait_for_their_release_are_released_once() {
    let mut world = World::new(&make(Kind::PLAIN), 1);
    world.zero(1..2, true).unwrap();
    world.begin_small();
    // One waits since before the beginning, one since the middle.
    world.writer.reclaim(&mut world.seen).unwrap();
    world.zero(7..8, true).unwrap();
    while !world.writer.reclaim(&mut world.seen).unwrap().has_ended {}
    world.release().unwrap();
    world.release().unwrap();
    world.close().unwrap();
    assert_eq!(leaks(&world.disk.now()), 0);
}

#[test]
fn clusters_that_the_writer_still_collects_are_released_once() {
    let mut world = World::new(&make(Kind::PLAIN), 1);
    world.model.borrow_mut().allow_zeroes(8);
    let last = world.guest_range(8);
    world.writer.zero(last, true, &mut Under(world.kind), &mut world.seen).unwrap();
    assert_eq!(run(&mut world.writer).unwrap().freed_clusters, 0);
    world.close().unwrap();
    assert_eq!(leaks(&world.disk.now()), 0);
}

/// A count of any height without a reference, and clusters past the place of the first leak.
#[test]
fn leaks_with_any_count_are_freed_and_reused() {
    let mut bytes = make(Kind::PLAIN).bytes;
    bytes.extend(vec![0; 1024 + 20 * 4096]);
    let end = bytes.len() / 4096;
    for cluster in end - 15..end - 5 {
        count(&mut bytes, cluster, cluster as u64 * 7);
    }
    bytes[(end - 6) * 4096..][..4096].fill(0x77);
    let mut writer = open(bytes).unwrap();
    assert_eq!(run(&mut writer).unwrap().freed_clusters, 10);
    assert!(writer.file().bytes.borrow()[(end - 6) * 4096..][..4096].iter().all(|byte| *byte == 0));
    assert!(writer.reserve.lowest_free <= (end - 15) as u64);
    writer.close().unwrap();
    assert_eq!(report(&writer.file().bytes.borrow()), (0, 0));
}

/// Corruptions and leaks.
fn report(bytes: &[u8]) -> (u64, u64) {
    let (mut corruptions, mut leaks) = (0, 0);
    let plain = Plain { bytes: bytes.to_vec().into(), ..Plain::default() };
    let Ok(image) = Image::open(&plain) else { return (u64::MAX, 0) };
    check(&image, &mut |finding| match finding.severity() {
        Severity::Corruption => corruptions += 1,
        _ => leaks += 1,
    })
    .unwrap();
    (corruptions, leaks)
}

const BLOCK: usize = 2 << 12;
const L1: usize = 3 << 12;
const L2: usize = 6 << 12;
/// The snapshot's own table.
const SNAPSHOT_L2: usize = 8 << 12;

/// Damages an image that has a leak.
fn damaged(change: impl FnOnce(&mut Vec<u8>)) -> ReclaimError {
    let mut bytes = make(Kind::PLAIN).bytes;
    let free = bytes.len() / 4096 - 1;
    count(&mut bytes, free, 1);
    change(&mut bytes);
    let before = bytes.clone();
    let mut writer = open(bytes).unwrap();
    let error = run(&mut writer).unwrap_err();
    assert!(*writer.file().bytes.borrow() == before, "the file was changed: {error}");
    // The guest goes on.
    writer
        .claim(std::slice::from_ref(&(3 * 4096..4 * 4096)), &mut Under(Kind::PLAIN), &mut Seen::default())
        .unwrap();
    error
}

#[test]
fn entry_that_cannot_be_understood_ends_the_reclaim_and_frees_nothing() {
    for (place, entry, text) in [
        (L2 + 8, 1 << 63 | 0x7000 | 2, "L2 entry 1"),
        (L2 + 8, 1 << 63 | 0x7200, "L2 entry 1"),
        (SNAPSHOT_L2 + 16, 1 << 55, "a host cluster in the file"),
        (L2 + 8, 1 << 63 | L1 as u64, "a host cluster in the file"),
        (L2 + 8, 1 << 62 | BLOCK as u64, "a host cluster in the file"),
    ] {
        let error = damaged(|bytes| word(bytes, place, entry)).to_string();
        assert!(error.contains(text) && error.contains("nothing was freed"), "{error}");
    }
}

#[test]
fn reference_to_a_cluster_without_a_count_ends_the_reclaim_and_frees_nothing() {
    let bytes = make(Kind::PLAIN).bytes;
    // Data, compressed data; tables, except the one that the guest's claim needs.
    for cluster in [host(&bytes, 1), host(&bytes, 5), 4, 5, 7, 8] {
        let mut bytes = bytes.clone();
        let free = bytes.len() / 4096 - 1;
        count(&mut bytes, free, 1);
        count(&mut bytes, cluster, 0);
        let before = bytes.clone();
        let mut writer = open(bytes).unwrap();
        let error = run(&mut writer).unwrap_err().to_string();
        assert!(error.contains(&format!("refcount at {:#x} is 0x0", cluster * 4096)), "{error}");
        assert!(*writer.file().bytes.borrow() == before);
    }
}

#[test]
fn autoclear_bits_are_clear_and_the_file_ends_with_a_cluster_before_a_leak_is_freed() {
    let mut made = make(Kind { autoclear: 1 << 5, ..Kind::PLAIN });
    let last = made.bytes.len() / 4096;
    assert_ne!(made.bytes.len() % 4096, 0);
    count(&mut made.bytes, last, 1);
    let mut world = World::new(&made, 1);
    assert_eq!(run(&mut world.writer).unwrap().freed_clusters, 1);
    world.write(&[0, 1]).unwrap();
    world.close().unwrap();
    assert_eq!(leaks(&world.disk.now()), 0);
}

/// The entry that the killed process has changed leads to the leak again if power is lost.
#[test]
fn leak_is_not_punched_before_the_change_that_made_it_is_durable() {
    let mut world = World::new(&make(Kind { backing: false, ..Kind::PLAIN }), 1);
    world.claim(&[0]).unwrap();
    world.zero(1..2, true).unwrap();
    world.kill();
    assert!(run(&mut world.writer).unwrap().freed_clusters > 0);
}

#[test]
fn table_of_two_active_entries_is_refused() {
    let mut bytes = make(Kind::PLAIN).bytes;
    word(&mut bytes, L1 + 16, L2 as u64);
    let error = run(&mut open(bytes).unwrap()).unwrap_err();
    assert!(matches!(error, ReclaimError::DoubledTable), "{error:?}");
}

/// L1 entries without the copied bit although only the active L1 table leads there: a change copies their tables. The first
/// one's place is then the third one's.
#[test]
fn table_in_the_place_of_one_that_was_scanned_is_scanned_too() {
    let mut bytes = make(Kind::PLAIN).bytes;
    let end = bytes.len().next_multiple_of(4096);
    bytes.resize(end + 2 * 4096, 0);
    let (table, data) = (end / 4096, end / 4096 + 1);
    word(&mut bytes, end, 1 << 63 | (data as u64) << 12);
    [table, data].into_iter().for_each(|cluster| count(&mut bytes, cluster, 1));
    word(&mut bytes, L1, L2 as u64);
    word(&mut bytes, L1 + 16, end as u64);
    let mut writer = open(bytes).unwrap();
    let third = 2 * 512 * 4096;
    writer.begin_reclaim(&[]).unwrap();
    writer.reclaim.as_mut().unwrap().step = SMALL;
    writer.reclaim(&mut ()).unwrap();
    let (first, third) = (0..1, third + 4096..third + 4097);
    writer.claim(std::slice::from_ref(&first), &mut Under(Kind::PLAIN), &mut ()).unwrap();
    let unlinked = writer.take_unlinked().unwrap();
    writer.release(unlinked).unwrap();
    writer.refill(200, &mut ()).unwrap();
    writer.claim(std::slice::from_ref(&third), &mut Under(Kind::PLAIN), &mut ()).unwrap();
    assert_eq!(writer.l1_entry(2).unwrap().l2_table, Some(L2 as u64), "the test's own assumption");
    while !writer.reclaim(&mut ()).unwrap().has_ended {}
    let unlinked = writer.take_unlinked().unwrap();
    writer.release(unlinked).unwrap();
    writer.close().unwrap();
    assert_eq!(report(&writer.file().bytes.borrow()).0, 0);
}

#[test]
fn image_with_bitmaps_is_refused() {
    let mut bytes = make(Kind { backing: false, ..Kind::PLAIN }).bytes;
    let directory = [1_u32.to_be_bytes(), [0; 4]].concat();
    let data = [directory, 32_u64.to_be_bytes().into(), 0x3000_u64.to_be_bytes().into()].concat();
    let extension = extension(0x2385_2875, &data);
    bytes[112..112 + extension.len()].copy_from_slice(&extension);
    let error = run(&mut open(bytes).unwrap()).unwrap_err();
    assert!(matches!(error, ReclaimError::Bitmaps), "{error:?}");
}

/// The entry of a write that has failed may reach the disk later.
#[test]
fn failed_write_ends_the_reclaim_until_the_tables_are_read_again() {
    let mut world = World::new(&make(Kind::PLAIN), 1);
    world.claim(&[0]).unwrap();
    world.begin_small();
    let kind = std::io::ErrorKind::Other;
    world.disk.fail(crate::write::tests::disk::Fault { call: world.disk.calls().0, kind });
    let error = world.zero(1..2, true).unwrap_err();
    assert!(matches!(error, WriteError::Io { action: "write", .. }), "{error:?}");
    assert!(matches!(world.writer.reclaim(&mut world.seen), Err(ReclaimError::FailedWrite)));
    assert!(matches!(world.writer.begin_reclaim(&[]), Err(ReclaimError::FailedWrite)));
    let now = world.disk.now();
    world.model.borrow_mut().settle(&now);
    world.reopen().unwrap();
    run(&mut world.writer).unwrap();
}

const CASES: Size<u32> = Size { smoke: 400, full: 20_000 };

proptest! {
    #![proptest_config(ProptestConfig { cases: CASES.now(), failure_persistence: None, ..ProptestConfig::default() })]

    /// What a check finds wrong does not become more.
    #[test]
    fn reclaim_makes_no_damaged_image_worse(
        extended in any::<bool>(),
        changes in prop::collection::vec((super::hostile::place(), super::hostile::value(), prop::sample::select(vec![1_usize, 2, 4, 8])), 1..4),
    ) {
        let mut bytes = make(Kind { extended, ..Kind::PLAIN }).bytes;
        super::hostile::apply(&mut bytes, extended, changes);
        let before = report(&bytes);
        if let Ok(mut writer) = open(bytes) {
            let done = run(&mut writer);
            let after = report(&writer.file().bytes.borrow());
            prop_assert!(after.0 <= before.0 && after.1 <= before.1, "{before:?} {after:?} {done:?}");
        }
    }
}
