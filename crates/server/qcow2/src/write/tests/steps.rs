//! Single operations: what they do to the disk, and how often.

use crate::tables::{L2Entry, RawL2Entry};
use crate::write::error::WriteError;
use crate::write::tests::images::{Kind, make};
use crate::write::tests::world::World;

fn world(kind: Kind) -> World {
    World::new(&make(kind), 1)
}

fn entry(world: &mut World, cell: usize) -> RawL2Entry {
    let mut entry = [RawL2Entry::default()];
    world.writer.slice(world.cells[cell], &mut entry, &mut world.seen).unwrap();
    entry[0]
}

/// Writes and syncs that an operation costs.
fn cost(world: &mut World, operation: impl FnOnce(&mut World)) -> (u64, u64) {
    let before = world.disk.calls();
    operation(world);
    let after = world.disk.calls();
    (after.0 - after.1 - (before.0 - before.1), after.1 - before.1)
}

#[test]
fn claims_of_a_batch_share_one_sync_and_the_writes_of_entries() {
    let mut world = world(Kind::PLAIN);
    // The first claim fills the reserve.
    world.claim(&[3]).unwrap();
    // Nothing, shared, compressed, compressed: four copies, to adjacent clusters. All entries are in one block.
    let cost = cost(&mut world, |world| world.claim(&[0, 2, 5, 6]).unwrap());
    assert_eq!(cost, (1 + 1, 1));
}

#[test]
fn claims_of_zeroes_need_no_sync() {
    let mut world = world(Kind { backing: false, ..Kind::PLAIN });
    world.claim(&[3]).unwrap();
    let cost = cost(&mut world, |world| world.claim(&[0]).unwrap());
    assert_eq!(cost, (1, 0));
}

#[test]
fn claim_of_what_is_in_place_writes_nothing() {
    let mut world = world(Kind::PLAIN);
    world.claim(&[7]).unwrap();
    let cost = cost(&mut world, |world| world.claim(&[1]).unwrap());
    assert_eq!(cost, (0, 0));
    assert!(world.seen.entries[&1].is_in_place(&world.header().geometry));
}

#[test]
fn zeroes_without_unmap_keep_the_host_cluster_which_a_claim_uses_again() {
    for extended in [false, true] {
        let mut world = world(Kind { extended, ..Kind::PLAIN });
        let before = entry(&mut world, 1);
        world.zero(1..2, false).unwrap();
        let kept = entry(&mut world, 1);
        let Ok(L2Entry::Standard(cluster)) = L2Entry::decode(kept, &world.header().geometry) else {
            panic!()
        };
        assert!(cluster.host_offset.is_some() && cluster.allocated == 0, "{cluster:?}");
        world.claim(&[1]).unwrap();
        assert_eq!(entry(&mut world, 1), before);
    }
}

#[test]
fn zeroes_with_unmap_free_the_host_cluster() {
    let mut world = world(Kind::PLAIN);
    let Ok(L2Entry::Standard(cluster)) = L2Entry::decode(entry(&mut world, 1), &world.header().geometry)
    else {
        panic!()
    };
    let host = cluster.host_offset.unwrap() >> 12;
    world.zero(1..2, true).unwrap();
    assert_eq!(world.writer.counts.of(&mut world.writer.blocks, host).unwrap(), 1);
    world.release().unwrap();
    assert_eq!(world.writer.counts.of(&mut world.writer.blocks, host).unwrap(), 0);
    // The lowest free cluster is used first.
    world.reopen().unwrap();
    world.claim(&[0]).unwrap();
    world.assert_view();
}

#[test]
fn version_2_has_no_zeroes_over_a_backing_file() {
    let mut world = world(Kind { version: 2, ..Kind::PLAIN });
    let zeroed = world.zero(1..2, true);
    assert!(matches!(zeroed, Err(WriteError::NoZeroFlag)), "{zeroed:?}");
    world.claim(&[0]).unwrap();
}

#[test]
fn closed_writer_goes_on_and_the_file_is_cut_off() {
    let mut world = world(Kind::PLAIN);
    world.write(&[0]).unwrap();
    let long = world.disk.now().len;
    world.close().unwrap();
    assert!(world.disk.now().len < long);
    world.write(&[9, 13]).unwrap();
    world.close().unwrap();
}

#[test]
fn ranges_past_the_disk_and_parts_of_clusters_are_ignored() {
    let mut world = world(Kind::PLAIN);
    let end = world.header().size_bytes;
    let (below, view) = (&mut crate::write::tests::world::Under(world.kind), &mut world.seen);
    world.writer.claim(&[end..end + 10, 5..5, u64::MAX - 1..u64::MAX], below, view).unwrap();
    assert_eq!(world.writer.zero(4097..8191, true, below, view).unwrap(), 8191);
    assert_eq!(world.writer.zero(u64::MAX - 1..u64::MAX, true, below, view).unwrap(), u64::MAX);
    assert!(view.entries.is_empty());
}
