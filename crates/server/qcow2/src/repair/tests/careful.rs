//! What damaged entries may mean is not freed.

use crate::repair::tests::damage::{COPIED, DATA, Damaged, L1, L2, SHARED_L2};
use crate::repair::tests::rig::{assert_not_worse, run};
use crate::repair::{Note, Scope};
use crate::write::tests::images::Kind;

const COMPRESSED: u64 = 1 << 62;
const EXTENDED: Kind = Kind { extended: true, ..Kind::PLAIN };

#[track_caller]
fn assert_leaks_are_kept(image: &Damaged) {
    for scope in [Scope::Leaks, Scope::All] {
        let outcome = run(image.content(), scope);
        let [_, (_, freed), (_, leaks)] = outcome.sums();
        assert!(freed == 0 && leaks > 0, "{:?}", outcome.found);
        assert!(outcome.notes.contains(&Note::LeaksKept { leaks }), "{:?}", outcome.notes);
        assert_not_worse(&image.content(), &outcome.disk.now.borrow());
    }
}

/// The bits of the second word are also in the first one.
#[test]
fn compressed_cluster_with_subclusters_is_at_its_offset() {
    let mut image = Damaged::new(EXTENDED);
    let (at, offset) = (image.entry(DATA), image.at(image.host(DATA)));
    image.put(L2, at, COMPRESSED | offset);
    image.put(L2, at + 1, offset & offset.wrapping_neg());
    for scope in [Scope::Leaks, Scope::All] {
        let outcome = run(image.content(), scope);
        assert_eq!(outcome.sums(), [(1, 0), (0, 0), (1, 0)], "{:?}", outcome.found);
        assert_eq!(outcome.disk.calls.borrow().len(), 0);
    }
}

#[test]
fn subclusters_with_data_and_no_offset_may_be_anywhere() {
    for subclusters in [1, 1 << 32 | 1] {
        let mut image = Damaged::new(EXTENDED);
        let at = image.entry(DATA);
        image.put(L2, at, 0);
        image.put(L2, at + 1, subclusters);
        assert_leaks_are_kept(&image);
    }
}

#[test]
fn subclusters_with_data_that_are_also_zeroes_keep_their_cluster() {
    let mut image = Damaged::new(EXTENDED);
    let at = image.entry(DATA);
    image.put(L2, at + 1, u64::MAX);
    let outcome = run(image.content(), Scope::Leaks);
    assert_eq!(outcome.sums(), [(1, 0), (0, 0), (1, 0)], "{:?}", outcome.found);
}

/// The table to which the second entry should lead seems to be leaked.
#[test]
fn two_entries_for_one_table_hide_another_table() {
    let mut image = Damaged::new(Kind { snapshot: false, ..Kind::PLAIN });
    image.put(L1, 1, image.word(L1, 0));
    assert_leaks_are_kept(&image);
}

#[test]
fn data_in_the_cluster_of_a_table_hide_other_data() {
    for table in [L1, L2, SHARED_L2] {
        let mut image = Damaged::new(Kind::PLAIN);
        image.put(L2, DATA, image.at(table) | COPIED);
        assert_leaks_are_kept(&image);
    }
}
