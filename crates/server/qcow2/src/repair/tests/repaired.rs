//! What is repaired where it is, and what is left.

use crate::header::Header;
use crate::repair::tests::damage::{
    BLOCK, COPIED, DATA, Damaged, L1, L2, LEAKS, SHARED, SHARED_L2, SNAPSHOT_TABLE, ZERO, repairable,
};
use crate::repair::tests::rig::{Disk, Outcome, assert_not_worse, run, run_on};
use crate::repair::{Note, RepairError, Scope};
use crate::write::tests::images::{Kind, make};

fn damaged(damage: impl FnOnce(&mut Damaged)) -> Damaged {
    let mut image = Damaged::new(Kind::PLAIN);
    damage(&mut image);
    image
}

fn all(image: &Damaged) -> Outcome {
    run(image.content(), Scope::All)
}

fn leaks(image: &Damaged) -> Outcome {
    run(image.content(), Scope::Leaks)
}

/// The clusters in which a file has changed.
fn changed(image: &Damaged, outcome: &Outcome) -> Vec<usize> {
    let bytes = image.geometry.cluster_bytes() as usize;
    let after = outcome.bytes();
    let both = image.bytes.chunks(bytes).zip(after.chunks(bytes));
    both.enumerate().filter(|(_, (old, new))| old != new).map(|(cluster, _)| cluster).collect()
}

#[test]
fn everything_that_can_be_repaired_is() {
    for (what, image) in repairable() {
        let before = image.content();
        let outcome = run(before.clone(), Scope::All);
        let [found, _, left] = outcome.sums();
        assert!(found != (0, 0), "{what}");
        assert_eq!(left, (0, 0), "{what}: {:?}", outcome.left);
        assert_not_worse(&before, &outcome.disk.now.borrow());
        let again = run(outcome.disk.now.borrow().clone(), Scope::All);
        assert_eq!((again.sums(), again.disk.calls.borrow().len()), ([(0, 0); 3], 0), "{what}");
    }
}

#[test]
fn leaks_are_freed_and_only_counts_change() {
    let [free, high, falls] = LEAKS.map(|(_, damage)| damaged(damage));
    // A copied bit is wrong as long as the count is 2.
    for (image, corruptions) in [(free, 0), (high, 1)] {
        let outcome = leaks(&image);
        assert_eq!(outcome.sums(), [(corruptions, 1), (corruptions, 1), (0, 0)]);
        assert_eq!(changed(&image, &outcome), [BLOCK as usize]);
    }
    let outcome = leaks(&falls);
    assert_eq!(outcome.sums(), [(0, 1), (0, 1), (0, 0)]);
    assert_eq!(changed(&falls, &outcome), [BLOCK as usize, L2 as usize]);
}

#[test]
fn repair_of_leaks_leaves_corruptions_as_they_are() {
    let image = damaged(|image| {
        image.set_count(image.clusters() - 2, 1);
        image.set_count(image.host(SHARED), 1);
        image.put(L1, 0, image.word(L1, 0) & !COPIED);
        image.bytes[79] |= 3;
    });
    let outcome = leaks(&image);
    // The copied bit of the shared data is wrong, too.
    assert_eq!(outcome.sums(), [(3, 1), (0, 1), (3, 0)]);
    assert_eq!(changed(&image, &outcome), [BLOCK as usize]);
    let after = Damaged { bytes: outcome.bytes(), ..image };
    assert_eq!(after.count(after.host(SHARED)), 1);
}

#[test]
fn dirty_and_corrupt_bits_are_cleared_when_no_corruption_is_left() {
    let image = damaged(|image| {
        image.bytes[79] |= 3;
        image.set_count(image.host(SHARED), 1);
    });
    let outcome = all(&image);
    assert_eq!((outcome.sums()[2], &outcome.notes[..]), ((0, 0), &[Note::MarksCleared][..]));
    let header = Header::read(&*outcome.disk.now.borrow()).unwrap();
    assert!(!header.incompatible.dirty && !header.incompatible.corrupt);
    let outcome = leaks(&damaged(|image| image.bytes[79] |= 3));
    assert_eq!((outcome.sums(), outcome.disk.calls.borrow().len()), ([(0, 0); 3], 0));
    let image = damaged(|image| {
        image.bytes[79] |= 3;
        image.put(L2, DATA, 1 << 40);
    });
    let outcome = all(&image);
    assert_eq!(outcome.sums()[2], (1, 1), "{:?}", outcome.left);
    assert_eq!(outcome.bytes()[79], image.bytes[79]);
}

#[test]
fn unknown_autoclear_bits_are_cleared_before_another_change() {
    let mut image = Damaged::new(Kind { autoclear: 1 << 5, ..Kind::PLAIN });
    assert_eq!(all(&image).disk.calls.borrow().len(), 0);
    image.set_count(image.host(DATA), 2);
    let outcome = all(&image);
    assert_eq!(Header::read(&*outcome.disk.now.borrow()).unwrap().autoclear.unknown, 0);
    let calls: Vec<usize> = outcome.disk.calls.borrow().iter().map(Vec::len).collect();
    // A sync, the bits, a sync, a count, a sync.
    assert_eq!(calls, [0, 1, 0, 1, 0]);
    let bits = 1 << 5;
    let mut image = Damaged::new(Kind { autoclear: bits, ..Kind::PLAIN });
    image.bytes[79] |= 1;
    let header = Header::read(&*all(&image).disk.now.borrow()).unwrap();
    assert_eq!((header.autoclear.unknown, header.incompatible.dirty), (0, false));
    image.put(L2, DATA, 1 << 40);
    assert_eq!(all(&image).disk.calls.borrow().len(), 0, "nothing else is changed");
}

#[test]
fn version_2_is_repaired() {
    let mut image = Damaged::new(Kind { version: 2, ..Kind::PLAIN });
    let header = image.bytes[..512].to_vec();
    image.set_count(image.host(SHARED), 1);
    let outcome = all(&image);
    assert_eq!(outcome.sums(), [(2, 0), (2, 0), (0, 0)]);
    assert_eq!(outcome.bytes()[..512], header);
}

#[test]
fn what_a_damaged_entry_may_mean_is_not_freed() {
    let entry = |word: u64| move |image: &mut Damaged| image.put(L2, DATA, word);
    let l1 = |word: u64| move |image: &mut Damaged| image.put(L1, 0, word);
    let snapshot = |image: &mut Damaged| image.put(SNAPSHOT_TABLE, 4, 1);
    let images = [
        damaged(entry(1 << 40 | COPIED)),
        damaged(entry((9 << 12) + 512)),
        damaged(l1(1 << 40)),
        damaged(l1(512)),
        damaged(snapshot),
    ];
    for image in images {
        for scope in [Scope::Leaks, Scope::All] {
            let outcome = run(image.content(), scope);
            let [(_, leaks), (_, freed), (corruptions, left)] = outcome.sums();
            assert!(leaks > 0 && corruptions > 0, "{:?}", outcome.found);
            assert_eq!((freed, left), (0, leaks));
            assert_eq!(outcome.notes, [Note::LeaksKept { leaks }]);
            assert_not_worse(&image.content(), &outcome.disk.now.borrow());
        }
    }
}

#[test]
fn counts_are_raised_although_an_entry_is_damaged() {
    let image = damaged(|image| {
        image.put(L2, DATA, 1 << 40);
        image.set_count(image.host(SHARED), 1);
    });
    let outcome = all(&image);
    assert_eq!(outcome.sums(), [(3, 1), (2, 0), (1, 1)], "{:?}", outcome.left);
}

#[test]
fn entry_without_data_reads_as_zeroes_and_its_cluster_is_freed() {
    for extended in [false, true] {
        let mut image = Damaged::new(Kind { extended, ..Kind::PLAIN });
        let at = image.entry(ZERO);
        let (offset, flag) = (image.at(image.clusters() - 2), u64::from(!extended));
        image.put(L2, at, (offset + 512) | COPIED | flag);
        image.set_count(image.clusters() - 2, 1);
        let outcome = all(&image);
        assert_eq!(outcome.sums(), [(1, 1), (1, 1), (0, 0)], "{:?}", outcome.left);
        let [Note::Zeroed { bad, .. }] = outcome.notes[..] else { panic!("{:?}", outcome.notes) };
        assert_eq!(bad.index, ZERO);
        let calls: Vec<usize> = outcome.disk.calls.borrow().iter().map(Vec::len).collect();
        assert_eq!(calls, [0, 1, 0, 1, 0], "the entry is durable before the count falls");
        let sound = Damaged::new(Kind { extended, ..Kind::PLAIN });
        assert_eq!(Damaged { bytes: outcome.bytes(), ..image }.word(L2, at), sound.word(L2, at));
    }
}

/// QEMU does not, either.
#[test]
fn entry_with_data_and_reserved_bits_stays() {
    let image = damaged(|image| image.put(L2, DATA, image.word(L2, DATA) | 4));
    let outcome = all(&image);
    assert_eq!((outcome.sums(), changed(&image, &outcome)), ([(1, 0), (0, 0), (1, 0)], vec![]));
}

#[test]
fn count_that_its_width_does_not_allow_stays_and_no_copied_bit_is_set() {
    let mut image = Damaged::new(Kind { refcount_order: 0, snapshot: false, ..Kind::PLAIN });
    let same = image.word(L2, DATA) & !COPIED;
    image.put(L2, DATA, same);
    image.put(L2, SHARED, same);
    let other = image.word(L2, 7) & !COPIED;
    image.put(L2, 7, other);
    let outcome = all(&image);
    let after = Damaged { bytes: outcome.bytes(), ..image };
    assert_eq!([DATA, SHARED, 7].map(|entry| after.word(L2, entry)), [same, same, other]);
    assert!(outcome.sums()[2].0 > 0);
}

#[test]
fn shared_data_are_counted_before_their_copied_bits_are_cleared() {
    let image = damaged(|image| image.put(L2, ZERO, image.word(L2, DATA)));
    let outcome = all(&image);
    assert_eq!(outcome.sums()[2], (0, 0), "{:?}", outcome.left);
    let after = Damaged { bytes: outcome.bytes(), ..image };
    assert_eq!(after.count(after.host(DATA)), 2);
    assert_eq!(after.word(L2, DATA) & COPIED, 0);
}

/// The L1 table is also a guest's cluster.
#[test]
fn table_that_something_else_uses_is_not_changed() {
    let image = damaged(|image| {
        image.put(L2, DATA, image.at(L1));
        image.put(L1, 0, image.word(L1, 0) & !COPIED);
    });
    let outcome = all(&image);
    assert!(outcome.sums()[2].0 > 0);
    assert!(!changed(&image, &outcome).contains(&(L1 as usize)));
}

#[test]
fn nothing_is_repaired_if_a_table_cannot_be_read() {
    let image = damaged(|image| image.set_count(image.clusters() - 2, 1));
    let disk = Disk::of(image.content());
    disk.unreadable.set(Some(image.at(SHARED_L2)));
    let outcome = run_on(disk, Scope::All);
    assert!(matches!(outcome.result, Err(RepairError::Unreadable { count: 2 })), "{:?}", outcome.result);
    assert_eq!((outcome.before.leaks > 0, outcome.disk.calls.borrow().len()), (true, 0));
}

/// A table that one walk cannot read has references which that walk does not count.
#[test]
fn one_failed_read_at_any_time_frees_nothing_that_is_used() {
    for (what, image) in repairable() {
        for scope in [Scope::Leaks, Scope::All] {
            let before = image.content();
            let reads = run(before.clone(), scope).disk.reads.get();
            for failing in 0..reads {
                let disk = Disk::of(before.clone());
                disk.failing_read.set(Some(failing));
                let outcome = run_on(disk, scope);
                let is_noticed =
                    outcome.result.as_ref().map_or(true, |repaired| repaired.after.check_errors > 0);
                assert!(is_noticed, "{what}: {scope:?}, read {failing}");
                assert_not_worse(&before, &outcome.disk.now.borrow());
            }
        }
    }
}

#[test]
fn full_file_system_is_an_error_and_a_later_repair_succeeds() {
    for (what, image) in repairable() {
        let calls = run(image.content(), Scope::All).disk.calls.borrow().len();
        for away in 0..calls {
            let disk = Disk::of(image.content());
            disk.away.set(Some(away));
            let outcome = run_on(disk, Scope::All);
            assert!(outcome.result.is_err(), "{what}: {away}");
            let again = run(outcome.disk.now.borrow().clone(), Scope::All);
            assert_eq!(again.sums()[2], (0, 0), "{what}: {away}");
        }
    }
}

#[test]
fn sound_image_is_not_written() {
    for kind in [Kind::PLAIN, Kind { version: 2, ..Kind::PLAIN }] {
        let content = crate::write::tests::disk::Content::of(&make(kind).bytes);
        let outcome = run(content, Scope::All);
        assert_eq!((outcome.sums(), outcome.disk.calls.borrow().len()), ([(0, 0); 3], 0));
    }
}
