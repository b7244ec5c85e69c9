//! The file grows past its counts: new refcount blocks, and a longer refcount table.

use crate::write::tests::disk::Content;
use crate::write::tests::images::{Kind, make};
use crate::write::tests::model::assert_sound;
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
