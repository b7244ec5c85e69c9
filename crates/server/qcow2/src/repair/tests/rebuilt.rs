//! New refcount tables, and files that are larger than a window of counters.

use crate::header::Header;
use crate::repair::rebuild::expect_storable;
use crate::repair::tests::damage::{DATA, Damaged, L2, SHARED, STRUCTURES, TABLE};
use crate::repair::tests::rig::{Disk, assert_not_worse, run, run_on};
use crate::repair::{Note, RepairError, Scope};
use crate::write::WriteAt;
use crate::write::tests::disk::{Content, Item};
use crate::write::tests::images::Kind;

#[test]
fn unusable_structures_are_replaced_behind_the_end_of_the_file() {
    for (what, damage) in STRUCTURES {
        let mut image = Damaged::new(Kind::PLAIN);
        let clusters = image.clusters();
        damage(&mut image);
        let outcome = run(image.content(), Scope::All);
        let [Note::Rebuilt { table_offset, clusters: 2 }] = outcome.notes[..] else {
            panic!("{what}: {:?}, {:?}", outcome.notes, outcome.left)
        };
        assert_eq!(table_offset, image.at(clusters + 1), "{what}");
        let header = Header::read(&*outcome.disk.now.borrow()).unwrap();
        assert_eq!((header.refcount_table.offset, header.refcount_table.count), (table_offset, 1));
    }
}

/// What seems leaked may be the block that the table does not name.
#[test]
fn repair_of_leaks_does_not_build_a_table() {
    for (what, damage) in STRUCTURES.into_iter().skip(1) {
        let mut image = Damaged::new(Kind::PLAIN);
        image.set_count(image.clusters() - 2, 1);
        damage(&mut image);
        let outcome = run(image.content(), Scope::Leaks);
        assert_eq!(outcome.disk.calls.borrow().len(), 0, "{what}");
    }
}

#[test]
fn table_is_not_built_while_an_entry_is_damaged() {
    let mut image = Damaged::new(Kind::PLAIN);
    image.put(TABLE, 0, 0);
    image.put(L2, DATA, 1 << 40);
    let outcome = run(image.content(), Scope::All);
    assert!(matches!(outcome.result, Err(RepairError::NotRebuilt)), "{:?}", outcome.result);
    assert_eq!(outcome.disk.calls.borrow().len(), 0);
}

#[test]
fn table_is_not_built_with_counts_that_its_width_does_not_allow() {
    let mut image = Damaged::new(Kind { refcount_order: 0, snapshot: false, ..Kind::PLAIN });
    image.put(TABLE, 0, 0);
    image.put(L2, SHARED, image.word(L2, DATA));
    let cluster = image.host(DATA);
    let outcome = run(image.content(), Scope::All);
    let expected = (cluster, 2, 1);
    let Err(RepairError::TooManyReferences { cluster, references, most }) = outcome.result else { panic!() };
    assert_eq!((cluster, references, most), expected);
    assert_eq!(outcome.disk.calls.borrow().len(), 0);
}

/// The new block and the new table would be there, before the header names them.
#[test]
fn table_is_not_built_where_the_old_one_leads_to() {
    let damages = [(0, true), (1, true), (2, false), (0, false)];
    for (behind, is_block) in damages {
        let mut image = Damaged::new(Kind { autoclear: 1 << 5, ..Kind::PLAIN });
        let offset = image.at(image.clusters() + behind);
        if is_block {
            image.put(TABLE, 0, offset);
        } else {
            image.bytes[48..56].copy_from_slice(&offset.to_be_bytes());
        }
        let outcome = run(image.content(), Scope::All);
        let is_refused = matches!(outcome.result, Err(RepairError::Overtaken));
        assert_eq!(is_refused, behind < 2, "{:?}", outcome.result);
        assert_eq!(outcome.disk.calls.borrow().is_empty(), behind < 2);
    }
}

/// The length is known before references are counted, which may need as much memory as the table.
#[test]
fn length_is_checked_before_references() {
    let mut image = Damaged::new(Kind { refcount_order: 0, snapshot: false, ..Kind::PLAIN });
    image.put(TABLE, 0, 0);
    image.put(L2, SHARED, image.word(L2, DATA));
    let disk = Disk::of(image.content());
    WriteAt::set_len(&disk, 1 << 48).unwrap();
    let outcome = run_on(disk, Scope::All);
    assert!(matches!(outcome.result, Err(RepairError::TooLong { .. })), "{:?}", outcome.result);
}

#[test]
fn counts_that_cannot_be_stored_are_named() {
    let text = |references| expect_storable(5, references, 3).map_err(|error| error.to_string());
    let high = "cluster 5 has 4 references, but a reference count of this image is at most 3";
    let uncounted = "cluster 5 has more references than a check counts";
    let expected = [Ok(()), Err(high.to_owned()), Err(uncounted.to_owned())];
    assert_eq!([Some(3), Some(4), None].map(text), expected);
}

/// An image with clusters of 512 bytes, so that a window of counters covers 8 GiB. The guest's first cluster is at 9 GiB.
fn far(refcount_entry: u64) -> Content {
    const GIB: u64 = 1 << 30;
    let fields = crate::tests::headers::Fields {
        cluster_bits: 9,
        size: 1 << 14,
        l1: (3 << 9, 1),
        refcounts: (1 << 9, 1),
        ..Default::default()
    };
    let mut content = Content::of(&fields.bytes()[..512]);
    let mut words = |offset: u64, words: &[u64]| {
        let mut data: Vec<u8> = words.iter().flat_map(|word| word.to_be_bytes()).collect();
        data.resize(512, 0);
        content.apply(&Item::Sector { offset, data: data.into() });
    };
    words(1 << 9, &[refcount_entry]);
    words(2 << 9, &[0x0001_0001_0001_0001, 0x0002_0001 << 32]);
    words(3 << 9, &[(4 << 9) | 1 << 63]);
    words(4 << 9, &[(9 * GIB) | 1 << 63, 5 << 9]);
    words(5 << 9, &[1]);
    words(9 * GIB, &[2]);
    content
}

/// The cluster at 9 GiB has no block, and the table of one cluster ends before it.
#[test]
fn references_in_several_windows_are_counted() {
    let content = far(2 << 9);
    let outcome = run(content.clone(), Scope::All);
    assert_eq!(outcome.sums()[2], (0, 0), "{:?}", outcome.left);
    let [Note::Rebuilt { .. }] = outcome.notes[..] else { panic!("{:?}", outcome.notes) };
    assert_not_worse(&content, &outcome.disk.now.borrow());
}

#[test]
fn file_that_no_table_can_describe_is_refused() {
    let content = far(0);
    let disk = Disk::of(content);
    // 8 MiB are entries for 2^20 blocks, of 256 clusters of 512 bytes each.
    WriteAt::set_len(&disk, 1 << 37).unwrap();
    let outcome = run_on(disk, Scope::All);
    assert!(matches!(outcome.result, Err(RepairError::TooLong { .. })), "{:?}", outcome.result);
}
