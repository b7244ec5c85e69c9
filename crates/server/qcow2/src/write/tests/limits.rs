//! What the writer does where there is no room, and where the file cannot be read.

use std::io::ErrorKind;
use std::ops::Range;
use std::slice::from_ref;

use crate::write::error::WriteError;
use crate::write::tests::disk::Fault;
use crate::write::tests::hostile::open;
use crate::write::tests::images::{Kind, make};
use crate::write::tests::model::{assert_sound, leaks};
use crate::write::tests::world::{Seen, Under, World};

const CLUSTER: u64 = 4096;

/// The cells of the images that these tests use: one has nothing, one has data, and the L2 table of one is missing.
const NOTHING: u64 = 0;
const DATA: u64 = 1;
const NO_TABLE: u64 = 2 * 512;

fn range(cell: u64) -> Range<u64> {
    cell * CLUSTER..(cell + 1) * CLUSTER
}

#[test]
fn counts_that_a_crash_left_past_the_end_of_the_file_are_passed() {
    let kind = Kind { refcount_order: 0, snapshot: false, ..Kind::PLAIN };
    let mut bytes = make(kind).bytes;
    // The block of counts is the third cluster. The file has few of the clusters that it counts.
    bytes[2 * 4096..][..1024].fill(0xff);
    let mut writer = open(bytes).unwrap();
    let mut seen = Seen::default();
    writer.claim(from_ref(&range(NOTHING)), &mut Under(kind), &mut seen).unwrap();
    let entry = seen.entries[&NOTHING];
    let host = (entry.cluster & !(1 << 63)) / CLUSTER;
    assert_eq!(host, 8 * 1024);
    assert!(seen.file_bytes > host * CLUSTER);
}

#[test]
fn full_set_of_tables_refuses_a_table_before_anything_is_written() {
    let kind = Kind::PLAIN;
    let mut writer = open(make(kind).bytes).unwrap();
    let mut seen = Seen::default();
    writer.claim(from_ref(&range(NOTHING)), &mut Under(kind), &mut seen).unwrap();
    let mut cluster = 1 << 40;
    while writer.metadata.has_room(1) {
        writer.metadata.add(cluster..cluster + 1).unwrap();
        cluster += 1;
    }
    let before = writer.file().bytes.borrow().clone();
    let error = writer.claim(from_ref(&range(NO_TABLE)), &mut Under(kind), &mut seen).unwrap_err();
    assert_eq!(error.io_error().map(std::io::Error::kind), Some(ErrorKind::StorageFull), "{error:?}");
    assert!(*writer.file().bytes.borrow() == before, "the file has changed");
    // Where the table is there, the guest goes on.
    writer.claim(from_ref(&range(3)), &mut Under(kind), &mut seen).unwrap();
    writer.close().unwrap();
}

#[test]
fn view_forgets_an_entry_that_cannot_be_read_after_its_write_failed() {
    let kind = Kind::PLAIN;
    let mut writer = open(make(kind).bytes).unwrap();
    let mut seen = Seen::default();
    // The reserve is full after this one, so that the next change begins with the write of the entry.
    writer.claim(from_ref(&range(NOTHING)), &mut Under(kind), &mut seen).unwrap();
    seen.entries.insert(DATA, crate::RawL2Entry::default());
    writer.file().is_away.set(true);
    let error = writer.zero(range(DATA), true, &mut Under(kind), &mut seen).unwrap_err();
    assert!(matches!(error, WriteError::Io { action: "write", .. }), "{error:?}");
    assert!(!seen.entries.contains_key(&DATA), "the view has {:?}", seen.entries[&DATA]);
    // The image goes on when its file is back.
    writer.file().is_away.set(false);
    writer.claim(from_ref(&range(DATA)), &mut Under(kind), &mut seen).unwrap();
    assert!(seen.entries[&DATA].is_in_place(&writer.header().geometry));
}

/// The entry's write fails because the file system is full: the cluster that it would have led to is not lost.
#[test]
fn full_file_system_leaks_no_cluster() {
    let made = make(Kind { backing: false, ..Kind::PLAIN });
    let (mut with_entry, mut without) = (false, false);
    for seed in 0..8 {
        let mut world = World::new(&made, seed);
        world.claim(&[1]).unwrap();
        world.write(&[0]).unwrap();
        world.disk.fail(Fault { call: world.disk.calls().0, kind: ErrorKind::StorageFull });
        // The third cell has zeroes and no host cluster: the first call writes its entry.
        let error = world.claim(&[3]).unwrap_err();
        assert!(error.is_full(), "{error:?}");
        let is_stored = world.seen.entries[&3].is_in_place(&made.header.geometry);
        (with_entry, without) = (with_entry | is_stored, without | !is_stored);
        world.assert_view();
        world.close().unwrap();
        assert_sound(&world.disk.now());
        assert_eq!(leaks(&world.disk.now()), 0, "{seed}");
    }
    assert!(with_entry && without, "only one outcome was tried");
}

#[test]
fn refcount_table_grows_to_its_limit_and_no_further() {
    let kind = Kind { refcount_order: 6, ..Kind::PLAIN };
    let most = (8 << 20) / CLUSTER;
    for (clusters, expected) in [(1_599, Some(most)), (most, None)] {
        let mut bytes = make(kind).bytes;
        bytes.truncate(bytes.len() - 1024);
        let mut writer = open(bytes).unwrap();
        let offset = writer.counts.place().0;
        writer.counts.moved_to(offset, vec![0; (clusters * CLUSTER / 8) as usize]);
        let planned = writer.plan_table(clusters * CLUSTER / 8 * 512);
        match (planned, expected) {
            (Ok(new), Some(most)) => assert_eq!(new.entries * 8 / CLUSTER, most),
            (Err(error), None) => assert!(error.is_full(), "{error:?}"),
            (planned, _) => panic!("{clusters}: {:?}", planned.map(|new| new.entries)),
        }
    }
}
