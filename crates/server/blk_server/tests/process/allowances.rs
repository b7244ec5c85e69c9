//! Front-ends of one disk that use up the process's address space or descriptors: another disk's guest still works, and
//! so does the next front-end of their own disk.
//!
//! These tests run in their own program, one at a time, because the limits apply to the whole process.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

use std::os::fd::AsFd;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::rig::passed::{event, memfd, serves, table_of, works};
use crate::rig::{FrontEnd, Options, Rig, USER_BASE, code, eventually, feature, region_words};

const GIB: u64 = 1 << 30;
/// Connections of one disk.
const SESSIONS: usize = 8;
/// The usual limit of a process's descriptors.
const DESCRIPTORS: u64 = 1024;
/// A second connection that passes this many descriptors reaches the limit.
const MOST: usize = 700;

/// Waits until ended sessions of the first disk have released their resources, so that `left` sessions remain.
fn settle(rig: &Rig, left: usize) {
    assert!(eventually(|| rig.server.as_ref().unwrap().report().disks[0].sessions == left));
}

fn greedy(rig: &Rig) -> FrontEnd {
    let front_end = rig.connect();
    front_end.negotiate(feature::USUAL);
    front_end
}

/// Whether a guest of the second disk gets its memory and its queue, and works.
fn neighbour_is_served(rig: &Rig) -> bool {
    let mut front_end = rig.connect_to(1);
    front_end.negotiate(feature::USUAL);
    front_end.share_memory(GIB);
    serves(&mut front_end.start_queue(0, 256, feature::USUAL))
}

#[test]
fn connections_that_map_16_tib_each_do_not_keep_another_disks_guest_from_its_memory() {
    let _alone = crate::alone();
    let rig = Rig::start(Options { disks: 2, ..Options::default() });
    let sparse = memfd(1 << 44);
    let table = table_of(&[region_words(0, 1 << 44, USER_BASE, 0)]);
    let greedy: Vec<_> = (0..SESSIONS).map(|_| greedy(&rig)).collect();
    let mapped = greedy.iter().filter(|front_end| {
        // The server refuses the table and keeps the session, which may continue with less.
        front_end.acked(code::SET_MEM_TABLE, &table, &[sparse.as_fd()]) == 0
    });
    assert!((1..SESSIONS).contains(&mapped.count()));
    assert!(neighbour_is_served(&rig));
    drop(greedy);
    settle(&rig, 0);
    let again = self::greedy(&rig);
    again.ok(code::SET_MEM_TABLE, &table, &[sparse.as_fd()]);
    drop(again);
    settle(&rig, 0);
    assert!(works(&rig));
}

/// Sets the usual descriptor limit, and the old one when dropped.
struct FewDescriptors(Rlimit);

impl FewDescriptors {
    fn new() -> Self {
        let before = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, Rlimit { current: Some(DESCRIPTORS), ..before }).unwrap();
        Self(before)
    }
}

impl Drop for FewDescriptors {
    fn drop(&mut self) {
        let _ = setrlimit(Resource::Nofile, self.0);
    }
}

/// Passes up to `most` descriptors, each for another purpose, so that the server keeps them all. Returns the number
/// that it accepted before it ended the session.
fn pass(front_end: &FrontEnd, most: usize) -> usize {
    let event = event();
    let codes = [code::SET_VRING_CALL, code::SET_VRING_ERR, code::SET_VRING_KICK];
    let purposes = codes.iter().flat_map(|code| (0..256_u64).map(move |queue| (*code, queue.to_ne_bytes())));
    let kept = |&(code, queue): &(u32, [u8; 8])| {
        front_end.send_flags(code, 1 | 8, &queue, &[event.as_fd()]);
        front_end.receive().is_some_and(|answer| answer.u64() == 0)
    };
    purposes.take(most).take_while(kept).count()
}

/// Takes descriptors until not even one more connection works.
fn take_all_descriptors(rig: &Rig) -> Vec<FrontEnd> {
    let mut holding = Vec::new();
    loop {
        let front_end = greedy(rig);
        let kept = pass(&front_end, MOST);
        if kept == MOST {
            holding.push(front_end);
            continue;
        }
        drop(front_end);
        settle(rig, holding.len());
        let again = greedy(rig);
        assert_eq!(pass(&again, kept - 1), kept - 1);
        holding.push(again);
        return holding;
    }
}

#[test]
fn connections_that_pass_descriptors_do_not_keep_another_disks_guest_from_its_own() {
    let _alone = crate::alone();
    let _few = FewDescriptors::new();
    let rig = Rig::start(Options { disks: 2, queues: 256, ..Options::default() });
    let holding = take_all_descriptors(&rig);
    assert!(neighbour_is_served(&rig));
    drop(holding);
    settle(&rig, 0);
    assert_eq!(pass(&greedy(&rig), 256), 256);
    settle(&rig, 0);
    assert!(works(&rig));
}
