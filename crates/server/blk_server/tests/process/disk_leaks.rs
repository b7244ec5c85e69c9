//! Removed disks leave nothing behind: no descriptors, threads, socket files.
//!
//! There is only one test, because it counts the resources of the whole process.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

use crate::rig;
use crate::rig::disks::count;
use crate::rig::passed::serves;
use crate::rig::{Options, Rig, eventually};

fn possessions() -> (usize, usize) {
    (count("/proc/self/fd"), count("/proc/self/task"))
}

/// Adds and removes a disk; every other time with a guest that uses it and is disconnected.
fn come_and_go(rig: &Rig, step: u32) {
    rig.add(1).unwrap();
    let guest = step.is_multiple_of(2).then(|| rig.guest_of(1));
    if let Some((_front_end, mut guest)) = guest {
        assert!(serves(&mut guest));
        rig.remove(1).unwrap();
    } else {
        let _looks = rig.connect_to(1);
        rig.remove(1).unwrap();
    }
    assert!(!rig.socket_of(1).exists());
}

#[test]
fn hundred_disks_in_a_row_leave_no_descriptor_or_thread_behind() {
    let _alone = crate::alone();
    let rig = Rig::start(Options { workers: 2, ..Options::default() });
    (0..4).for_each(|step| come_and_go(&rig, step));
    let mut before = possessions();
    assert!(eventually(|| {
        std::thread::sleep(rig::CALM);
        std::mem::replace(&mut before, possessions()) == before
    }));
    (0..100).for_each(|step| come_and_go(&rig, step));
    assert!(eventually(|| possessions() == before), "{:?}, {before:?} before", possessions());
    assert!(serves(&mut rig.guest_of(0).1));
}
