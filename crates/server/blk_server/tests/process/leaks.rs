//! Ended sessions leave nothing behind: no descriptors, threads, mappings.
//!
//! There is only one test, because it counts the resources of the whole process.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

use std::os::fd::AsFd;

use crate::rig;
use crate::rig::passed::{add_transfer, event, works};
use crate::rig::{MIB, Options, Rig, code, eventually, feature, kind, ready};

fn count(folder: &str) -> usize {
    std::fs::read_dir(folder).unwrap().count()
}

fn mapped_memories() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains("memfd:")).count()
}

fn possessions() -> (usize, usize, usize) {
    (count("/proc/self/fd"), count("/proc/self/task"), mapped_memories())
}

/// Disconnects at a bad moment, which `step` selects.
fn come_and_go(rig: &Rig, step: u32) {
    match step % 5 {
        0 => drop(rig.connect()),
        1 => rig.connect().negotiate(feature::USUAL),
        2 => {
            let front_end = rig.connect();
            front_end.negotiate(feature::USUAL);
            (0..10).for_each(|_| {
                front_end.send(code::SET_VRING_CALL, &0u64.to_ne_bytes(), &[event().as_fd()]);
            });
        }
        3 => {
            let (_front_end, mut guest) = ready(rig, feature::USUAL);
            (0..8).for_each(|n| {
                add_transfer(&mut guest, kind::IN, n, 8 * MIB + n * 4096, 4096);
            });
            guest.submit();
        }
        _ => {
            let (front_end, _guest) = ready(rig, feature::USUAL);
            // The server refuses the message and closes its descriptors.
            let fds = [event(), event()];
            front_end.send(code::SET_MEM_TABLE, &[1; 8], &[fds[0].as_fd(), fds[1].as_fd()]);
            assert!(front_end.is_closed());
        }
    }
}

#[test]
fn hundreds_of_sessions_leave_no_descriptor_thread_or_mapping_behind() {
    let _alone = crate::alone();
    let rig = Rig::start(Options { workers: 2, ..Options::default() });
    (0..10).for_each(|step| come_and_go(&rig, step));
    assert!(works(&rig));
    // The last session's thread may still be exiting.
    let mut before = possessions();
    let settled = |before: &mut (usize, usize, usize)| {
        let now = possessions();
        std::mem::replace(before, now) == now
    };
    assert!(eventually(|| {
        std::thread::sleep(rig::CALM);
        settled(&mut before)
    }));
    (0..500).for_each(|step| come_and_go(&rig, step));
    assert!(eventually(|| possessions() == before), "{:?}, {before:?} before", possessions());
    assert!(works(&rig));
}
