//! A front-end's messages, valid and invalid: which are accepted, which are refused, which end the session.
//!
//! Spec: vhost-user, "Header", "Front-end message types".
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

use std::os::fd::{AsFd, BorrowedFd};

use crate::rig;
use crate::rig::passed::{event, memfd, serves, table_of, works};
use crate::rig::{
    FrontEnd, MIB, Options, Rig, code, config_body, feature, ready, region_words, vring_addr, vring_state,
};

const REFUSED: u64 = 1;
const NEED_REPLY: u32 = 8;
const NO_FD: u64 = 1 << 8;
const WITH_WCE: u64 = feature::USUAL | feature::CONFIG_WCE;

fn negotiated(rig: &Rig) -> FrontEnd {
    let front_end = rig.connect();
    front_end.negotiate(feature::USUAL);
    front_end
}

fn is_alive(front_end: &FrontEnd) -> bool {
    front_end.ask_u64(code::GET_QUEUE_NUM) == 4
}

/// Sends the message with NEED_REPLY. Returns whether the server refuses it and the session continues.
fn is_refused(front_end: &FrontEnd, code: u32, body: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
    front_end.acked(code, body, fds) == REFUSED && is_alive(front_end)
}

/// Sends the message without NEED_REPLY on a separate connection. Returns whether the session ends.
fn ends_session(rig: &Rig, code: u32, body: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
    let front_end = negotiated(rig);
    front_end.send(code, body, fds);
    front_end.is_closed()
}

fn ends_connection(rig: &Rig, bytes: &[u8]) -> bool {
    let front_end = rig.connect();
    front_end.send_raw(bytes, &[]);
    front_end.is_closed()
}

fn header(code: u32, flags: u32, size: u32) -> Vec<u8> {
    [code, flags, size].into_iter().flat_map(u32::to_ne_bytes).collect()
}

#[test]
fn connection_that_ends_inside_a_header_or_a_body_leaves_the_disk_usable() {
    let rig = Rig::start(Options::default());
    rig.connect().send_raw(&header(code::GET_FEATURES, 1, 0)[..5], &[]);
    rig.connect().send_raw(&header(code::SET_FEATURES, 1, 8), &[]);
    rig.connect().send_raw(&[header(code::SET_FEATURES, 1, 8), vec![1, 2, 3]].concat(), &[]);
    assert!(works(&rig));
}

#[test]
fn half_a_message_then_silence_is_closed_while_others_are_served() {
    let rig = Rig::start(Options { disks: 2, ..Options::default() });
    let silent = rig.connect();
    silent.send_raw(&header(code::SET_FEATURES, 1, 8), &[]);
    let (_same_disk, mut guest) = ready(&rig, feature::USUAL);
    let other_disk = rig.connect_to(1);
    assert!(serves(&mut guest));
    assert_eq!(other_disk.ask_u64(code::GET_QUEUE_NUM), 4);
    assert!(silent.is_closed());
    assert!(serves(&mut guest));
}

#[test]
fn body_in_a_packet_of_its_own_is_accepted() {
    let rig = Rig::start(Options::default());
    let front_end = negotiated(&rig);
    front_end.send_raw(&header(code::SET_VRING_NUM, 1 | NEED_REPLY, 8), &[]);
    std::thread::sleep(rig::CALM);
    front_end.send_raw(&vring_state(0, 128), &[]);
    assert_eq!(front_end.receive().unwrap().u64(), 0);
}

#[test]
fn message_delivered_byte_by_byte_is_accepted_with_its_descriptor() {
    let rig = Rig::start(Options::default());
    let front_end = negotiated(&rig);
    let call = event();
    let bytes = [header(code::SET_VRING_CALL, 1 | NEED_REPLY, 8), vec![0; 8]].concat();
    front_end.send_raw(&bytes[..1], &[call.as_fd()]);
    bytes[1..].iter().for_each(|byte| front_end.send_raw(&[*byte], &[]));
    assert_eq!(front_end.receive().unwrap().u64(), 0);
}

#[test]
fn two_messages_in_one_packet_are_both_answered() {
    let rig = Rig::start(Options::default());
    let front_end = rig.connect();
    front_end.send_raw(&header(code::GET_QUEUE_NUM, 1, 0).repeat(2), &[]);
    let answers = [front_end.receive().unwrap().u64(), front_end.receive().unwrap().u64()];
    assert_eq!(answers, [4, 4]);
}

#[test]
fn oversized_message_ends_the_session() {
    let rig = Rig::start(Options::default());
    assert!(ends_connection(&rig, &header(code::SET_CONFIG, 1, 4097)));
    assert!(ends_connection(&rig, &header(code::SET_CONFIG, 1, u32::MAX)));
    assert!(works(&rig));
}

#[test]
fn message_of_another_version_ends_the_session() {
    let rig = Rig::start(Options::default());
    assert!(ends_connection(&rig, &header(code::GET_FEATURES, 0, 0)));
    assert!(ends_connection(&rig, &header(code::GET_FEATURES, 2, 0)));
    assert!(ends_connection(&rig, &header(code::GET_FEATURES, 3, 0)));
    assert!(works(&rig));
}

#[test]
fn unknown_request_ends_the_session() {
    let rig = Rig::start(Options::default());
    assert!(ends_connection(&rig, &header(0, 1, 0)));
    assert!(ends_connection(&rig, &header(9999, 1, 0)));
    assert!(ends_connection(&rig, &header(u32::MAX, 1, 0)));
    assert!(works(&rig));
}

#[test]
fn request_of_a_feature_not_offered_is_refused() {
    const POSTCOPY_ADVISE: u32 = 28;
    const NET_SET_MTU: u32 = 20;
    let rig = Rig::start(Options::default());
    let front_end = negotiated(&rig);
    assert!(is_refused(&front_end, POSTCOPY_ADVISE, &[], &[]));
    assert!(is_refused(&front_end, NET_SET_MTU, &[0; 8], &[]));
    assert!(ends_session(&rig, NET_SET_MTU, &[0; 8], &[]));
}

#[test]
fn body_of_a_wrong_size_is_refused_for_every_request_that_has_one() {
    let rig = Rig::start(Options::default());
    let front_end = negotiated(&rig);
    let sizes = [
        (code::SET_FEATURES, 8),
        (code::SET_PROTOCOL_FEATURES, 8),
        (code::SET_MEM_TABLE, 40),
        (code::SET_VRING_NUM, 8),
        (code::SET_VRING_ADDR, 40),
        (code::SET_VRING_BASE, 8),
        (code::SET_VRING_KICK, 8),
        (code::SET_VRING_CALL, 8),
        (code::SET_VRING_ERR, 8),
        (code::SET_VRING_ENABLE, 8),
        (code::SET_CONFIG, 13),
        (code::ADD_MEM_REG, 40),
        (code::REM_MEM_REG, 40),
    ];
    for (code, right) in sizes {
        for wrong in [0, 4, right - 1, right + 1, 4096] {
            // The first byte is 1, so that a memory table announces one region.
            let mut body = vec![0; wrong];
            body.iter_mut().take(1).for_each(|byte| *byte = 1);
            assert!(is_refused(&front_end, code, &body, &[]), "request {code} with {wrong} bytes");
        }
    }
    assert!(ends_session(&rig, code::GET_VRING_BASE, &[0; 7], &[]));
}

#[test]
fn more_than_32_descriptors_end_the_session() {
    let rig = Rig::start(Options::default());
    let front_end = negotiated(&rig);
    let fds: Vec<_> = (0..33).map(|_| event()).collect();
    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    front_end.send(code::SET_VRING_CALL, &[0; 8], &fds);
    assert!(front_end.is_closed());
    assert!(works(&rig));
}

#[test]
fn missing_descriptors_are_refused() {
    let rig = Rig::start(Options::default());
    let front_end = negotiated(&rig);
    let table = table_of(&[region_words(0, MIB, rig::USER_BASE, 0)]);
    let single = [vec![0; 8], region_words(0, MIB, rig::USER_BASE, 0)].concat();
    assert!(is_refused(&front_end, code::SET_MEM_TABLE, &table, &[]));
    assert!(is_refused(&front_end, code::ADD_MEM_REG, &single, &[]));
    assert!(is_refused(&front_end, code::SET_VRING_KICK, &[0; 8], &[]));
    assert!(is_refused(&front_end, code::SET_VRING_CALL, &[0; 8], &[]));
    assert!(is_refused(&front_end, code::SET_VRING_ERR, &[0; 8], &[]));
    assert!(is_refused(&front_end, code::SET_BACKEND_REQ_FD, &[], &[]));
    assert!(is_refused(&front_end, code::SET_VRING_KICK, &NO_FD.to_ne_bytes(), &[]));
}

#[test]
fn surplus_descriptors_are_refused() {
    let rig = Rig::start(Options::default());
    let front_end = negotiated(&rig);
    let (fd, memory) = (event(), memfd(MIB));
    let table = table_of(&[region_words(0, MIB, rig::USER_BASE, 0)]);
    let two = [memory.as_fd(), memory.as_fd()];
    let wanted = (feature::USUAL & front_end.ask_u64(code::GET_FEATURES)).to_ne_bytes();
    assert!(is_refused(&front_end, code::SET_FEATURES, &wanted, &[fd.as_fd()]));
    assert!(is_refused(&front_end, code::SET_VRING_NUM, &vring_state(0, 64), &[fd.as_fd()]));
    assert!(is_refused(&front_end, code::SET_VRING_CALL, &[0; 8], &[fd.as_fd(), fd.as_fd()]));
    assert!(is_refused(&front_end, code::SET_VRING_CALL, &NO_FD.to_ne_bytes(), &[fd.as_fd()]));
    assert!(is_refused(&front_end, code::SET_MEM_TABLE, &table, &two));
    assert!(ends_session(&rig, code::GET_FEATURES, &[], &[fd.as_fd()]));
}

#[test]
fn queue_out_of_range_is_refused_by_every_request_that_names_one() {
    let rig = Rig::start(Options::default());
    let front_end = negotiated(&rig);
    let fd = event();
    for code in [code::SET_VRING_NUM, code::SET_VRING_BASE, code::SET_VRING_ENABLE] {
        assert!(is_refused(&front_end, code, &vring_state(4, 2), &[]));
        assert!(is_refused(&front_end, code, &vring_state(256, 2), &[]));
        assert!(is_refused(&front_end, code, &[0xff; 8], &[]));
    }
    for code in [code::SET_VRING_KICK, code::SET_VRING_CALL, code::SET_VRING_ERR] {
        assert!(is_refused(&front_end, code, &4u64.to_ne_bytes(), &[fd.as_fd()]));
        assert!(is_refused(&front_end, code, &255u64.to_ne_bytes(), &[fd.as_fd()]));
    }
    let mut addresses = [0; 40];
    addresses[..4].copy_from_slice(&256u32.to_ne_bytes());
    assert!(is_refused(&front_end, code::SET_VRING_ADDR, &addresses, &[]));
    assert!(ends_session(&rig, code::GET_VRING_BASE, &vring_state(4, 0), &[]));
    assert!(ends_session(&rig, code::GET_VRING_BASE, &vring_state(256, 0), &[]));
}

#[test]
fn configuration_is_given_in_the_sizes_that_front_ends_ask_for() {
    let rig = Rig::start(Options::default());
    let front_end = negotiated(&rig);
    let whole = front_end.config(0, 256);
    let sizes = [57, 60, 96].map(|bytes| front_end.config(0, bytes));
    assert_eq!(whole[..8], (16 * MIB / 512).to_le_bytes());
    assert_eq!(sizes.each_ref().map(Vec::len), [57, 60, 96]);
    assert!(sizes.iter().all(|bytes| whole.starts_with(bytes)));
    assert_eq!(front_end.config(34, 2), 4u16.to_le_bytes());
}

#[test]
fn configuration_beyond_the_limit_is_answered_with_nothing() {
    let rig = Rig::start(Options::default());
    let front_end = negotiated(&rig);
    assert!(front_end.config(0, 257).is_empty());
    assert!(front_end.config(250, 7).is_empty());
    assert!(front_end.config(u32::MAX, 8).is_empty());
    assert!(is_alive(&front_end));
}

#[test]
fn write_cache_is_set_through_the_configuration_and_read_back() {
    let rig = Rig::start(Options::default());
    let front_end = rig.connect();
    front_end.negotiate(WITH_WCE);
    let before = front_end.config(32, 1);
    let set = front_end.set_config(32, &[0]);
    assert_eq!((before, set, front_end.config(32, 1)), (vec![1], 0, vec![0]));
}

#[test]
fn other_writes_to_the_configuration_are_refused() {
    let rig = Rig::start(Options::default());
    let front_end = rig.connect();
    front_end.negotiate(WITH_WCE);
    let too_short = &config_body(32, &[0; 4])[..14];
    assert_eq!(front_end.set_config(32, &[2]), REFUSED);
    assert_eq!(front_end.set_config(32, &[0, 0]), REFUSED);
    assert_eq!(front_end.set_config(0, &[0; 8]), REFUSED);
    assert_eq!(front_end.set_config(u32::MAX, &[0]), REFUSED);
    assert!(is_refused(&front_end, code::SET_CONFIG, too_short, &[]));
    assert_eq!(front_end.config(32, 1), [1]);
}

#[test]
fn write_cache_stays_without_config_wce() {
    let rig = Rig::start(Options::default());
    let front_end = negotiated(&rig);
    assert_eq!(front_end.set_config(32, &[0]), REFUSED);
    assert_eq!(front_end.config(32, 1), [1]);
}

#[test]
fn features_not_offered_or_without_version_1_are_refused() {
    let rig = Rig::start(Options::default());
    let front_end = negotiated(&rig);
    let not_offered = (feature::VERSION_1 | 1 << 35).to_ne_bytes();
    let legacy = (feature::FLUSH | feature::PROTOCOL).to_ne_bytes();
    assert!(is_refused(&front_end, code::SET_FEATURES, &not_offered, &[]));
    assert!(is_refused(&front_end, code::SET_FEATURES, &legacy, &[]));
    assert!(ends_session(&rig, code::SET_FEATURES, &legacy, &[]));
    assert!(works(&rig));
}

#[test]
fn protocol_features_not_offered_are_refused() {
    let rig = Rig::start(Options::default());
    let all = u64::MAX.to_ne_bytes();
    assert!(is_refused(&negotiated(&rig), code::SET_PROTOCOL_FEATURES, &all, &[]));
    assert!(ends_session(&rig, code::SET_PROTOCOL_FEATURES, &all, &[]));
}

#[test]
fn queue_size_that_is_no_power_of_two_or_above_the_limit_is_refused() {
    let rig = Rig::start(Options::default());
    let front_end = negotiated(&rig);
    for num in [0, 1, 3, 255, 257, 512, 65_536, 65_538, u32::MAX] {
        assert!(is_refused(&front_end, code::SET_VRING_NUM, &vring_state(0, num), &[]), "{num}");
    }
    front_end.ok(code::SET_VRING_NUM, &vring_state(0, 2), &[]);
    front_end.ok(code::SET_VRING_NUM, &vring_state(0, 256), &[]);
}

#[test]
fn queue_enabled_before_it_has_addresses_and_kick_runs_once_it_has_them() {
    let rig = Rig::start(Options::default());
    let mut front_end = negotiated(&rig);
    front_end.share_memory(16 * MIB);
    front_end.ok(code::SET_VRING_ENABLE, &vring_state(0, 1), &[]);
    let mut guest = front_end.new_guest(0, 256, feature::USUAL);
    front_end.announce_queue(&guest);
    assert!(serves(&mut guest));
}

#[test]
fn queue_kicked_before_there_is_memory_runs_once_there_is() {
    let rig = Rig::start(Options::default());
    let mut front_end = negotiated(&rig);
    let index = 0u64.to_ne_bytes();
    let kick = event();
    front_end.ok(code::SET_VRING_NUM, &vring_state(0, 256), &[]);
    front_end.ok(code::SET_VRING_KICK, &index, &[kick.as_fd()]);
    front_end.ok(code::SET_VRING_ENABLE, &vring_state(0, 1), &[]);
    front_end.share_memory(16 * MIB);
    let mut guest = front_end.new_guest(0, 256, feature::USUAL);
    front_end.ok(code::SET_VRING_CALL, &index, &[guest.call.as_fd()]);
    front_end.ok(code::SET_VRING_ADDR, &vring_addr(0, &guest.layout), &[]);
    guest.kick = kick;
    assert!(serves(&mut guest));
}

#[test]
fn base_of_a_queue_never_set_up_is_what_was_set_or_zero() {
    let rig = Rig::start(Options::default());
    let front_end = rig.connect();
    let fresh = front_end.stop_queue(3);
    front_end.send(code::SET_VRING_BASE, &vring_state(3, 77), &[]);
    assert_eq!((fresh, front_end.stop_queue(3)), (0, 77));
}

#[test]
fn repeated_features_and_call_descriptors_leave_the_queue_running() {
    let rig = Rig::start(Options::default());
    let (front_end, mut guest) = ready(&rig, feature::USUAL);
    let features = (feature::USUAL & front_end.ask_u64(code::GET_FEATURES)).to_ne_bytes();
    assert!(serves(&mut guest));
    for _ in 0..3 {
        front_end.ok(code::SET_FEATURES, &features, &[]);
        front_end.ok(code::SET_VRING_CALL, &0u64.to_ne_bytes(), &[guest.call.as_fd()]);
        front_end.ok(code::SET_VRING_ENABLE, &vring_state(0, 1), &[]);
    }
    assert!(serves(&mut guest));
}

#[test]
fn front_end_without_protocol_features_needs_no_enable() {
    let rig = Rig::start(Options::default());
    let mut front_end = rig.connect();
    let bits = feature::USUAL & !feature::PROTOCOL & front_end.ask_u64(code::GET_FEATURES);
    // The test needs NEED_REPLY to see that a message was processed; everything else is as in an old front-end.
    front_end.negotiate(feature::USUAL);
    front_end.ok(code::SET_FEATURES, &bits.to_ne_bytes(), &[]);
    front_end.share_memory(16 * MIB);
    let mut guest = front_end.new_guest(0, 256, bits);
    front_end.announce_queue(&guest);
    assert!(serves(&mut guest));
}

/// Marsaglia's xorshift64: the same sequence in every run.
struct Garbage(u64);

impl Garbage {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    fn bytes(&mut self, count: u64) -> Vec<u8> {
        (0..count).map(|_| self.next() as u8).collect()
    }

    /// Mostly small numbers, so that many messages are nearly valid.
    fn words(&mut self, count: u64) -> Vec<u8> {
        let word = |g: &mut Self| if g.below(4) == 0 { g.next() as u32 } else { g.below(5) as u32 };
        (0..count).flat_map(|_| word(self).to_ne_bytes()).collect()
    }

    fn message(&mut self) -> Vec<u8> {
        let (code, flags) = (self.below(46) as u32, if self.below(2) == 0 { 1 } else { 9 });
        let words = [0, 2, 2, 2, 3, 4, 10, 10, 12][self.below(9) as usize];
        [header(code, flags, words as u32 * 4), self.words(words)].concat()
    }
}

#[test]
fn garbage_never_hurts_a_front_end_that_comes_after_it() {
    let rig = Rig::start(Options::default());
    let mut garbage = Garbage(0x1234_5678_9abc_def1);
    let (eventfd, memory) = (event(), memfd(MIB));
    for _ in 0..300 {
        let front_end = rig.connect();
        if garbage.below(4) == 0 {
            let count = garbage.below(64);
            front_end.send_raw(&garbage.bytes(count), &[]);
            continue;
        }
        front_end.negotiate(feature::USUAL);
        for _ in 0..garbage.below(12) {
            let passed = [eventfd.as_fd(), memory.as_fd()];
            let fds = &passed[garbage.below(2) as usize..][..garbage.below(2) as usize];
            front_end.send_raw(&garbage.message(), fds);
        }
    }
    assert!(works(&rig));
}
