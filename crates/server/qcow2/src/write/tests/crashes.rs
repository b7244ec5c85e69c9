//! Random operations, with a loss of power after each call to the disk, and a second life after some.

use xtask::sizes::Size;

use crate::write::tests::images::{Kind, make};
use crate::write::tests::model::{assert_sound, leaks};
use crate::write::tests::world::World;

const STEPS: Size<usize> = Size { smoke: 25, full: 120 };
const SEEDS: Size<u64> = Size { smoke: 2, full: 40 };

/// Random operations in two lives, with a crash between them, and a clean end.
#[track_caller]
fn lives(kind: Kind) {
    let (made, mut all) = (make(kind), 0);
    for seed in 0..SEEDS.now() {
        let mut world = World::new(&made, seed);
        for life in 0..3 {
            for _ in 0..STEPS.now() {
                world.step().unwrap();
                world.assert_view();
            }
            let content = if life == 1 { world.disk.now() } else { world.disk.crashed() };
            world = world.reborn(content);
        }
        let crashes = world.model.borrow().crashes();
        assert!(crashes > STEPS.now() as u64, "{crashes} crashes");
        all += crashes;
    }
    println!("{kind:?}: {all} images after crashes checked");
}

#[test]
fn images_that_tests_make_are_sound_and_have_no_leaks() {
    for kind in [Kind::PLAIN, Kind { extended: true, ..Kind::PLAIN }, Kind { version: 2, ..Kind::PLAIN }] {
        let made = make(kind);
        let content = crate::write::tests::disk::Content::of(&made.bytes);
        assert_sound(&content);
        assert_eq!(leaks(&content), 0, "{kind:?}");
    }
}

#[test]
fn version_3_with_snapshot_and_backing_file() {
    lives(Kind::PLAIN);
}

#[test]
fn version_3_with_autoclear_bits() {
    lives(Kind { autoclear: 1 << 5, backing: false, ..Kind::PLAIN });
}

#[test]
fn version_2_with_backing_file() {
    lives(Kind { version: 2, ..Kind::PLAIN });
}

#[test]
fn version_2_without_backing_file() {
    lives(Kind { version: 2, backing: false, ..Kind::PLAIN });
}

#[test]
fn extended_l2_entries() {
    lives(Kind { extended: true, ..Kind::PLAIN });
}

#[test]
fn all_widths_of_counts() {
    for refcount_order in [1, 2, 3, 5, 6] {
        lives(Kind { refcount_order, ..Kind::PLAIN });
    }
    lives(Kind { refcount_order: 0, snapshot: false, ..Kind::PLAIN });
}

/// Nothing is leaked by a clean end, also of clusters that were shared, compressed or discarded.
#[test]
fn closed_image_has_no_leaks() {
    for seed in 0..SEEDS.now() {
        let mut world = World::new(&make(Kind::PLAIN), seed);
        for _ in 0..STEPS.now() {
            world.step().unwrap();
        }
        world.close().unwrap();
        assert_eq!(leaks(&world.disk.now()), 0);
        assert_sound(&world.disk.now());
    }
}
