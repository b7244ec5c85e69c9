//! The file grows past its counts: new refcount blocks, and a longer refcount table. The disk grows: a longer L1 table.

use crate::header::Header;
use crate::image::read_l1;
use crate::write::tests::disk::Content;
use crate::write::tests::images::{Kind, make};
use crate::write::tests::model::{assert_sound, leaks, read_cells};
use crate::write::tests::world::World;

/// An image whose file has so many clusters, of which the writer takes none that it has already.
fn world(clusters: u64, seed: u64) -> World {
    let kind = Kind { refcount_order: 6, ..Kind::PLAIN };
    let mut made = make(kind);
    made.bytes.truncate(made.bytes.len() - 1024);
    let mut world = World::new(&made, seed);
    let mut content = Content::of(&made.bytes);
    content.len = clusters << kind.cluster_bits();
    world = world.reborn(content);
    world.writer.reserve.lowest_free = clusters;
    world
}

#[test]
fn refcount_block_is_added() {
    for seed in 0..2 {
        let mut world = world(512 - 3, seed);
        for _ in 0..8 {
            world.step().unwrap();
        }
        world.claim(&[0, 9, 13]).unwrap();
        assert!(world.writer.counts.has_block(512));
        world.close().unwrap();
        assert_sound(&world.disk.now());
    }
}

#[test]
fn refcount_table_is_moved_and_the_old_one_is_freed() {
    let mut world = world(512 * 512 - 3, 1);
    let old = world.writer.counts.place();
    world.claim(&[0, 9, 13]).unwrap();
    let new = world.writer.counts.place();
    assert!(new.0 > old.0 && new.1 > old.1, "{old:?} {new:?}");
    assert_eq!(world.writer.counts.of(&mut world.writer.blocks, old.0 >> 12).unwrap(), 0);
    for _ in 0..3 {
        world.step().unwrap();
    }
    let now = world.disk.crashed();
    let mut world = world.reborn(now);
    assert_eq!(world.writer.counts.place(), new);
    world.write(&[1]).unwrap();
}

/// The disk gets larger, with a loss of power after each call; a guest goes on before and after. What is new is zeroes,
/// although the backing file is longer.
#[test]
fn disk_grows_and_what_is_new_reads_as_zeroes() {
    for (kind, backing_past) in [
        (Kind::PLAIN, 3 << 20),
        (Kind { extended: true, ..Kind::PLAIN }, 3 << 20),
        (Kind { backing: false, ..Kind::PLAIN }, 0),
        (Kind { version: 2, backing: false, snapshot: false, ..Kind::PLAIN }, 0),
    ] {
        for more in [4096 + 512, 5 << 20, 3 << 30] {
            let mut world = World::new(&make(kind), 1);
            let before = world.header().size_bytes;
            for _ in 0..5 {
                world.step().unwrap();
            }
            world.grow(before + more, before + backing_past).unwrap();
            world.assert_view();
            for _ in 0..5 {
                world.step().unwrap();
            }
            world.close().unwrap();
            let content = world.disk.now();
            let header = Header::read(&content).unwrap();
            assert_eq!(header.size_bytes, before + more);
            assert_eq!(header.l1, world.header().l1);
            let cluster_bytes = header.geometry.cluster_bytes();
            let l1 = read_l1(&content, header.l1).unwrap();
            let new: Vec<u64> =
                (before.div_ceil(cluster_bytes)..).take(1 + more.min(8 << 20) as usize / 4096).collect();
            for numbers in read_cells(&content, &header, &l1, kind, &new) {
                let is_hidden = numbers.iter().all(|number| *number == 0);
                assert!(is_hidden || kind.backing && more > backing_past, "{kind:?} {more}: {numbers:?}");
            }
            assert_sound(&content);
            assert_eq!(leaks(&content), 0);
        }
    }
}

#[test]
fn sizes_beyond_the_format_and_smaller_ones_change_nothing() {
    let mut world = World::new(&make(Kind::PLAIN), 1);
    let before = world.header().clone();
    assert!(world.grow(u64::MAX / 2, 0).is_err());
    let mut old = World::new(&make(Kind { version: 2, ..Kind::PLAIN }), 1);
    assert!(old.grow(before.size_bytes * 2, 0).is_err(), "version 2 with a snapshot");
    world.grow(before.size_bytes, 0).unwrap();
    world.grow(512, 0).unwrap();
    assert_eq!((world.header().size_bytes, world.header().l1), (before.size_bytes, before.l1));
    world.write(&[1]).unwrap();
}
