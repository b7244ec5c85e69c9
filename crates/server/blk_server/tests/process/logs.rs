//! Log lines that a guest or a front-end can cause: one line for one mistake, few for many.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::os::fd::AsFd;
use std::sync::Arc;

use io_engine::{Fault, Verb, When};
use rustix::io::Errno;

use crate::log_lines::{keep_lines, lines_with};
use crate::rig;
use crate::rig::format::Format;
use crate::rig::fuse_disk::{Call, FuseDisk};
use crate::rig::in_flight_log::Log;
use crate::rig::passed::{serves, works};
use crate::rig::raw_guest::faulty;
use crate::rig::{Options, PATIENCE, Rig, code, feature, kind, ready, vring_addr, vring_state};

#[test]
fn driver_without_version_1_is_refused_with_one_line() {
    let _alone = keep_lines();
    let rig = Rig::start(Options::default());
    let front_end = rig.connect();
    front_end.negotiate(feature::USUAL);
    let legacy = (feature::FLUSH | feature::PROTOCOL).to_ne_bytes();
    assert_eq!(front_end.acked(code::SET_FEATURES, &legacy, &[]), 1);
    assert_eq!(lines_with("0x40000200 without VERSION_1"), 1);
}

#[test]
fn driver_without_version_1_that_tries_for_ever_is_refused_with_one_line() {
    let _alone = keep_lines();
    let rig = Rig::start(Options::default());
    let legacy = (feature::CONFIG_WCE | feature::PROTOCOL).to_ne_bytes();
    for _ in 0..20 {
        // QEMU does not set NEED_REPLY: its session ends, and QEMU connects again.
        let front_end = rig.connect();
        front_end.send(code::SET_FEATURES, &legacy, &[]);
        assert!(front_end.is_closed());
    }
    assert_eq!(lines_with("0x40000800 without VERSION_1"), 1);
}

#[test]
fn ring_that_has_no_room_in_its_log_is_warned_of_once() {
    let _alone = keep_lines();
    let rig = Rig::start(Options { queue_size: 1024, ..Options::default() });
    for _ in 0..3 {
        let mut front_end = Log::new().front_end(&rig, Format::Split, u64::MAX);
        front_end.share_memory(16 * rig::MIB);
        assert!(serves(&mut front_end.start_queue(0, 512, feature::USUAL)));
        assert!(serves(&mut front_end.start_queue(0, 512, feature::USUAL)));
    }
    assert_eq!(lines_with("no room for queue 0 with 512 descriptors"), 1);
}

#[test]
fn ring_that_is_started_outside_memory_again_and_again_logs_a_few_lines() {
    let _alone = keep_lines();
    let rig = Rig::start(Options::default());
    let mut front_end = rig.connect();
    front_end.negotiate(feature::USUAL);
    front_end.share_memory(16 * rig::MIB);
    let guest = front_end.new_guest(0, 256, feature::USUAL);
    let mut layout = guest.layout;
    layout.used.0 += 1 << 40;
    front_end.announce_queue(&guest);
    front_end.ok(code::SET_VRING_ADDR, &vring_addr(0, &layout), &[]);
    front_end.ok(code::SET_VRING_ENABLE, &vring_state(0, 1), &[]);
    for _ in 0..200 {
        front_end.ok(code::SET_VRING_KICK, &0u64.to_ne_bytes(), &[guest.kick.as_fd()]);
    }
    let lines = lines_with("queue stopped until");
    assert!((1..=20).contains(&lines), "{lines} lines");
}

#[test]
fn front_ends_that_send_garbage_again_and_again_log_a_few_lines() {
    let _alone = keep_lines();
    let rig = Rig::start(Options::default());
    for _ in 0..200 {
        let front_end = rig.connect();
        front_end.send_raw(&[0xff; 12], &[]);
        assert!(front_end.is_closed());
    }
    let lines = lines_with("message version 3");
    assert!((1..=20).contains(&lines), "{lines} lines");
    assert!(works(&rig));
}

#[test]
fn last_sync_of_a_removal_and_of_a_stop_that_fails_is_told() {
    let _alone = keep_lines();
    for stops in [false, true] {
        let Some(host) = FuseDisk::mount(4 << 20, Arc::new(|| 0)) else { return };
        let mut rig = Rig::start(Options { existing: Some(host.path()), ..Options::buffered() });
        host.fail(Call::Sync, 0..0, fuser::Errno::EIO);
        if stops {
            assert_eq!(rig.stop().not_flushed.len(), 1);
        } else {
            rig.running().remove_disk("test0", false, PATIENCE).unwrap_err();
        }
        assert_eq!(lines_with("the image could not be synced"), 1 + usize::from(stops));
    }
}

#[test]
fn failed_sync_is_told_at_once_in_one_line_that_says_what_to_do() {
    let _alone = keep_lines();
    let (options, fake) = faulty(Options::buffered());
    let rig = Rig::start(options);
    let (_front_end, mut guest) = ready(&rig, feature::USUAL);
    fake.inject(When::Verb(Verb::Sync), Fault::Errno(Errno::IO), 1);
    (0..3).for_each(|_| assert_eq!(guest.request(kind::FLUSH, 0, &[], 0).status, Some(1)));
    assert_eq!(lines_with("check the host's storage, restart the server"), 1);
    assert_eq!(lines_with("flush after a failed sync"), 2);
}
