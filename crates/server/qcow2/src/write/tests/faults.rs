//! One call to the disk fails: nothing is lost, and later operations succeed, or all refuse.

use std::io::ErrorKind;

use xtask::sizes::Size;

use crate::write::error::WriteError;
use crate::write::tests::disk::Fault;
use crate::write::tests::images::{Kind, Made, make};
use crate::write::tests::world::World;

const STEPS: Size<usize> = Size { smoke: 8, full: 24 };
/// In a smoke test, not every call fails.
const STRIDE: Size<usize> = Size { smoke: 5, full: 1 };
const SEEDS: Size<u64> = Size { smoke: 1, full: 8 };

/// Returns whether the script has so many calls.
fn script(made: &Made, seed: u64, fault: Fault) -> bool {
    let mut world = World::new(made, seed);
    world.disk.fail(fault);
    let mut is_stopped = false;
    for _ in 0..STEPS.now() {
        let had_failed = world.disk.has_failed();
        match world.step() {
            // Writes in place go on, and some steps do nothing.
            Ok(()) if is_stopped => {
                let synced = world.writer.sync();
                assert!(
                    matches!(synced, Err(WriteError::Stopped { .. })),
                    "a change after an error that ended all"
                );
            }
            Ok(()) => {}
            Err(error) => {
                assert!(world.disk.has_failed(), "{error:?} without a fault");
                assert!(!had_failed || is_stopped, "{error:?} long after {fault:?}");
                is_stopped |= matches!(world.writer.sync(), Err(WriteError::Stopped { .. }));
                if !is_stopped {
                    world.assert_view();
                }
                let now = world.disk.now();
                world.model.borrow_mut().settle(&now);
            }
        }
    }
    let has_failed = world.disk.has_failed();
    // A second life, with what is there.
    let now = world.disk.now();
    let mut world = world.reborn(now);
    (0..STEPS.now()).for_each(|_| world.step().unwrap());
    has_failed
}

fn every_call(kind: Kind, error: ErrorKind) {
    let made = make(kind);
    for seed in 0..SEEDS.now() {
        let mut call = seed % STRIDE.now() as u64;
        while script(&made, seed, Fault { call, kind: error }) {
            call += STRIDE.now() as u64;
        }
        assert!(call > STEPS.now() as u64, "only {call} calls");
    }
}

#[test]
fn full_file_system_at_each_call() {
    every_call(Kind { autoclear: 1 << 5, ..Kind::PLAIN }, ErrorKind::StorageFull);
}

#[test]
fn error_at_each_call() {
    every_call(Kind { version: 2, backing: false, ..Kind::PLAIN }, ErrorKind::Other);
}

#[test]
fn error_at_each_call_with_extended_l2_entries() {
    every_call(Kind { extended: true, snapshot: false, ..Kind::PLAIN }, ErrorKind::Other);
}
