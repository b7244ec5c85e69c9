//! Sessions that freeze and then continue, in the same server or in another one; and upgrades that are refused.
//!
//! Both servers are in this process: the test itself passes their messages.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use blk_server::{
    DiskLimits, DiskState, LiveUpgradeError, ParkPolicy, ParkWhat, Rebuilt, Server, SessionState,
};
use io_engine::{FakeHandle, Fault, Verb, When};
use rustix::io::Errno;
use serde_json::{Value, json};

use crate::rig;
use crate::rig::dirty::{self, begin};
use crate::rig::format::Format;
use crate::rig::in_flight_log::Log;
use crate::rig::passed::{
    Pending, add_transfer, event, faulty, hold, let_go, serves, take_signals, transfer, works,
};
use crate::rig::raw_guest;
use crate::rig::{
    FrontEnd, Guest, MIB, Options, PATIENCE, Rig, code, eventually, feature, kind, ready, vring_state,
};

const SOON: Duration = Duration::from_millis(100);
const HOLD: ParkPolicy = ParkPolicy { what: ParkWhat::Any, retry_after: None };
const BOTH: [Format; 2] = [Format::Split, Format::Packed];
const OK: u8 = 0;
/// The features of a guest that may disable its write cache.
const CONFIG_WCE: u64 = feature::CONFIG_WCE | feature::FLUSH;

fn server(rig: &Rig) -> &Server {
    rig.server.as_ref().unwrap()
}

fn why_not(rig: &Rig) -> String {
    server(rig).freeze(SOON).unwrap_err().to_string()
}

fn write(guest: &mut Guest) -> Pending {
    add_transfer(guest, kind::OUT, 0, 8 * MIB, 4096)
}

// ---- in the same server

#[test]
fn guest_goes_on_after_a_freeze_that_came_to_nothing() {
    for format in BOTH {
        let rig = Rig::start(Options::default());
        let (_front_end, mut guest) = ready(&rig, format.usual());
        assert!(serves(&mut guest));
        for _ in 0..3 {
            drop(server(&rig).freeze(PATIENCE).unwrap());
            assert!(serves(&mut guest));
        }
    }
}

#[test]
fn nothing_is_served_and_nobody_accepted_while_all_is_frozen() {
    let rig = Rig::start(Options::default());
    let (front_end, mut guest) = ready(&rig, Format::Split.usual());
    let frozen = server(&rig).freeze(PATIENCE).unwrap();
    let pending = write(&mut guest);
    guest.submit();
    front_end.send(code::GET_FEATURES, &[], &[]);
    let second = rig.connect();
    second.send(code::GET_FEATURES, &[], &[]);
    std::thread::sleep(SOON);
    assert_eq!(pending.status(&guest), 0xff);
    assert_eq!(server(&rig).report().disks[0].sessions, 1);
    drop(frozen);
    guest.next_used().unwrap();
    assert_eq!(pending.status(&guest), OK);
    assert!(front_end.receive().is_some() && second.receive().is_some());
}

#[test]
fn queue_that_does_not_drain_goes_on_and_is_named() {
    let (options, fake) = faulty();
    let rig = Rig::start(options);
    let (_front_end, mut guest) = ready(&rig, Format::Split.usual());
    hold(&fake);
    let pending = write(&mut guest);
    guest.submit();
    assert!(eventually(|| server(&rig).report().disks[0].queues[0].counters.in_flight == 1));
    assert!(why_not(&rig).contains("queue 0 still has requests in flight after"), "{}", why_not(&rig));
    let_go(&fake);
    guest.next_used().unwrap();
    assert_eq!(pending.status(&guest), OK);
    assert!(serves(&mut guest));
}

#[test]
fn sessions_that_are_cut_off_end_and_others_wait_until_it_is_clear_who_serves() {
    let (options, fake) = faulty();
    let rig = Rig::start(options);
    let (front_end, mut guest) = ready(&rig, Format::Split.usual());
    hold(&fake);
    write(&mut guest);
    guest.submit();
    assert!(eventually(|| server(&rig).report().disks[0].queues[0].counters.in_flight == 1));
    let cut = ["test0".to_owned()];
    std::thread::scope(|scope| {
        let cutting = scope.spawn(|| server(&rig).cut_off(&cut, PATIENCE));
        // The freeze waits for requests in flight.
        std::thread::sleep(SOON);
        let_go(&fake);
        cutting.join().unwrap().unwrap();
    });
    assert!(front_end.is_closed());
    let second = rig.connect();
    second.send(code::GET_FEATURES, &[], &[]);
    let mut frozen = server(&rig).freeze(PATIENCE).unwrap();
    assert!(frozen.take_parts().iter().all(|(_, _, sessions)| sessions.is_empty()));
    // The ended session soon leaves the list; the new session is not frozen.
    assert!(eventually(|| server(&rig).report().disks[0].sessions == 0));
    drop(frozen);
    assert!(second.receive().is_some());
    assert!(works(&rig));
}

#[test]
fn disk_that_is_not_there_cannot_be_cut_off_and_the_others_go_on() {
    let rig = Rig::start(Options::default());
    let names = ["test0", "x"].map(str::to_owned);
    assert!(server(&rig).cut_off(&names, PATIENCE).unwrap_err().to_string().contains('x'));
    assert!(works(&rig));
}

/// A disk whose writes fail and are parked.
fn holding(format: Format, log: Option<&Log>) -> (Rig, FakeHandle, FrontEnd, Guest, Pending) {
    let (options, fake) = raw_guest::faulty(Options { park: Some(HOLD), ..Options::buffered() });
    let rig = Rig::start(options);
    let (front_end, mut guest) = match log {
        None => ready(&rig, format.usual()),
        Some(log) => {
            let mut front_end = log.front_end(&rig, format, u64::MAX);
            front_end.share_memory(16 * MIB);
            let guest = front_end.start_queue(0, 256, format.usual());
            (front_end, guest)
        }
    };
    fake.inject(When::Verb(Verb::Write), Fault::Errno(Errno::NOSPC), u64::MAX);
    let pending = write(&mut guest);
    guest.submit();
    assert!(eventually(|| server(&rig).report().disks[0].queues[0].counters.parked == 1));
    (rig, fake, front_end, guest, pending)
}

#[test]
fn parked_requests_without_a_log_keep_their_session_here() {
    for format in BOTH {
        let (rig, fake, _front_end, mut guest, pending) = holding(format, None);
        assert!(why_not(&rig).contains("queue 0 has 1 parked requests"), "{}", why_not(&rig));
        fake.clear();
        assert_eq!(server(&rig).resume_disk("test0", PATIENCE).unwrap(), 1);
        guest.next_used().unwrap();
        assert_eq!(pending.status(&guest), OK);
    }
}

// ---- in another server

type Part = (String, DiskState, Vec<(Value, Vec<OwnedFd>)>);

/// Freezes every session and takes its state.
fn parts_of(rig: &mut Rig) -> Part {
    let server = rig.server.take().unwrap();
    let mut frozen = server.freeze(PATIENCE).unwrap();
    let (name, state, sessions) = frozen.take_parts().remove(0);
    let travel = |handed: blk_server::Handed| {
        let fds = handed.fds.iter().map(|fd| fd.try_clone().unwrap()).collect();
        (serde_json::to_value(&handed.state).unwrap(), fds)
    };
    let sessions = sessions.into_iter().map(travel).collect();
    drop(frozen.give_up());
    (name, state, sessions)
}

/// Sends the first part of a message with its descriptors; returns the rest.
fn send_half(front_end: &FrontEnd, code: u32, body: &[u8], fds: &[BorrowedFd<'_>], half: usize) -> Vec<u8> {
    const NEED_REPLY: u32 = 1 | 8;
    let size = u32::try_from(body.len()).unwrap();
    let header = [code, NEED_REPLY, size].into_iter().flat_map(u32::to_ne_bytes);
    let mut bytes: Vec<u8> = header.chain(body.iter().copied()).collect();
    let rest = bytes.split_off(half);
    front_end.send_raw(&bytes, fds);
    // Gives the session's thread time to receive them. If it has not, the descriptors move with the socket.
    std::thread::sleep(SOON);
    rest
}

/// The new server waits for the image's lock until the old server's last session has ended.
fn patient(mut options: Options) -> Options {
    options.image.lock_timeout = PATIENCE;
    options
}

/// Rebuilds a session, and waits until it is complete.
fn rebuild(
    rig: &Rig,
    disk: &str,
    state: SessionState,
    fds: Vec<OwnedFd>,
) -> Result<Rebuilt, LiveUpgradeError> {
    let session = server(rig).rebuild(disk, state, fds)?;
    session.wait_prepared().map(|()| session)
}

/// Another server takes over.
fn hand_on(rig: &mut Rig, options: Options) {
    let (name, disk, sessions) = parts_of(rig);
    rig.start_server(patient(options));
    server(rig).restore_disk(&name, &disk).unwrap();
    for (state, fds) in sessions {
        let state: SessionState = serde_json::from_value(state).unwrap();
        let session = rebuild(rig, &name, state, fds).unwrap();
        session.go();
        assert!(session.wait_started().is_ok());
    }
}

#[test]
fn guest_and_front_end_go_on_in_another_server() {
    for format in BOTH {
        let mut rig = Rig::start(Options::default());
        let (front_end, mut guest) = ready(&rig, format.usual() | CONFIG_WCE);
        assert!(serves(&mut guest));
        // The guest chose write-through.
        assert_eq!(front_end.set_config(32, &[0]), 0);
        for _ in 0..2 {
            hand_on(&mut rig, Options::default());
            assert!(serves(&mut guest));
            assert_eq!(front_end.config(32, 1), [0]);
        }
        assert_ne!(front_end.stop_queue(0), 0);
    }
}

#[test]
fn what_was_used_of_the_limits_counts_in_another_server() {
    let mut limits = DiskLimits::default();
    limits.own.set("bps", Some(1));
    let mut rig = Rig::start(Options::buffered());
    server(&rig).limit_disk("test0", limits.clone()).unwrap();
    let (_front_end, mut guest) = ready(&rig, Format::Split.usual());
    // Two requests use up the credit of 1 MiB.
    for _ in 0..3 {
        add_transfer(&mut guest, kind::IN, 0, 8 * MIB, 512 << 10);
    }
    guest.submit();
    assert!((0..2).all(|_| guest.next_used().is_some()));
    let (name, disk, sessions) = parts_of(&mut rig);
    rig.start_server(patient(Options::buffered()));
    server(&rig).limit_disk("test0", limits).unwrap();
    server(&rig).restore_disk(&name, &disk).unwrap();
    for (state, fds) in sessions {
        let session = rebuild(&rig, &name, serde_json::from_value(state).unwrap(), fds).unwrap();
        session.go();
        assert!(session.wait_started().is_ok());
    }
    std::thread::sleep(SOON);
    assert!(guest.ring.pop_used().unwrap().is_none(), "a live upgrade gives no credit");
    server(&rig).limit_disk("test0", DiskLimits::default()).unwrap();
    assert!(guest.next_used().is_some());
}

#[test]
fn half_a_message_goes_along_with_its_descriptors() {
    for half in [5, 12, 17] {
        let mut rig = Rig::start(Options::default());
        let (front_end, mut guest) = ready(&rig, Format::Split.usual());
        let call = event();
        let rest = send_half(&front_end, code::SET_VRING_CALL, &[0; 8], &[call.as_fd()], half);
        // Freezes and cancels once before the real upgrade.
        drop(server(&rig).freeze(PATIENCE).unwrap());
        hand_on(&mut rig, Options::default());
        assert_eq!(take_signals(&call), 0);
        front_end.send_raw(&rest, &[]);
        assert_eq!(front_end.receive().unwrap().u64(), 0);
        assert_ne!(take_signals(&call), 0);
        guest.call = call;
        assert!(serves(&mut guest));
    }
}

#[test]
fn half_a_message_is_heard_to_its_end_after_a_freeze_that_came_to_nothing() {
    let rig = Rig::start(Options::default());
    let (front_end, _guest) = ready(&rig, Format::Split.usual());
    let call = event();
    let rest = send_half(&front_end, code::SET_VRING_CALL, &[0; 8], &[call.as_fd()], 13);
    let frozen = server(&rig).freeze(PATIENCE).unwrap();
    front_end.send_raw(&rest, &[]);
    drop(frozen);
    assert_eq!(front_end.receive().unwrap().u64(), 0);
    assert_ne!(take_signals(&call), 0);
}

/// A guest whose front-end has sent a dirty log.
fn with_dirty_log(rig: &Rig, format: Format) -> (FrontEnd, Guest, dirty::Log) {
    let mut front_end = rig.connect();
    front_end.negotiate(format.usual());
    front_end.share_memory(dirty::MEMORY_BYTES);
    let guest = front_end.start_queue(0, 64, format.usual());
    let log = dirty::Log::new();
    log.give(&front_end);
    (front_end, guest, log)
}

#[test]
fn migrating_guest_goes_along_and_stores_are_noted_there() {
    for format in BOTH {
        let mut rig = Rig::start(Options::default());
        let (front_end, mut guest, log) = with_dirty_log(&rig, format);
        let rings = [(0, guest.layout)];
        let changed = event();
        front_end.ok(code::SET_LOG_FD, &[], &[changed.as_fd()]);
        begin(&front_end, &rings, format.usual(), &log);
        hand_on(&mut rig, Options::default());
        let _ = (log.take(), take_signals(&changed));
        assert_eq!(transfer(&mut guest, kind::IN, 0, 8 * MIB, 4096), OK);
        assert!(log.take().contains(&(8 * MIB)) && take_signals(&changed) > 0);
        dirty::end(&front_end, &rings, format.usual());
        assert!(serves(&mut guest));
    }
}

/// A log that the front-end never uses must not keep its session in the old server forever.
#[test]
fn dirty_log_that_is_not_used_yet_goes_along_and_is_used_there() {
    for format in BOTH {
        let mut rig = Rig::start(Options::default());
        let (front_end, mut guest, log) = with_dirty_log(&rig, format);
        hand_on(&mut rig, Options::default());
        assert!(serves(&mut guest) && log.take().is_empty());
        dirty::log_all(&front_end, format.usual(), true);
        assert_eq!(transfer(&mut guest, kind::IN, 0, 8 * MIB, 4096), OK);
        assert!(log.take().contains(&(8 * MIB)));
    }
}

/// Two sessions of one disk. The second session tried to start rings that the first session has.
fn two_sessions(rig: &mut Rig) -> (Part, [(FrontEnd, Guest); 2]) {
    let first = ready(rig, Format::Split.usual());
    let mut front_end = rig.connect();
    front_end.negotiate(Format::Split.usual());
    front_end.share_memory(16 * MIB);
    let guest = front_end.new_guest(0, 256, Format::Split.usual());
    front_end.announce_queue(&guest);
    let mut part = parts_of(rig);
    // The state of a session whose front-end enabled the queue and was refused, because the other session had the
    // rings.
    let waiting = part.2.iter_mut().find(|(state, _)| state["vrings"][0]["enabled"] == json!(false)).unwrap();
    waiting.0["vrings"][0]["enabled"] = json!(true);
    (part, [first, (front_end, guest)])
}

#[test]
fn rings_stay_with_the_session_that_has_them_however_the_others_go_on() {
    let mut rig = Rig::start(Options::default());
    let ((name, disk, mut sessions), [mut first, mut second]) = two_sessions(&mut rig);
    rig.start_server(patient(Options::default()));
    server(&rig).restore_disk(&name, &disk).unwrap();
    // The session that waits for the rings continues first.
    sessions.sort_by_key(|(state, _)| state["has_lease"] == json!(true));
    for (state, fds) in sessions {
        let state: SessionState = serde_json::from_value(state).unwrap();
        let session = rebuild(&rig, &name, state, fds).unwrap();
        session.go();
        session.wait_started().unwrap();
    }
    assert!(serves(&mut first.1));
    // Then the other session may start them.
    first.0.stop_queue(0);
    second.0.ok(code::SET_VRING_ENABLE, &vring_state(0, 1), &[]);
    assert!(serves(&mut second.1));
}

#[test]
fn two_sessions_that_both_claim_the_rings_are_refused() {
    let mut rig = Rig::start(Options::default());
    let ((name, _, sessions), _front_ends) = two_sessions(&mut rig);
    rig.start_server(patient(Options::default()));
    let rebuilt = sessions.into_iter().map(|(mut state, fds)| {
        state["has_lease"] = json!(true);
        rebuild(&rig, &name, serde_json::from_value(state).unwrap(), fds)
    });
    let rebuilt: Vec<_> = rebuilt.collect();
    assert!(rebuilt[0].is_ok());
    let why = rebuilt[1].as_ref().unwrap_err().to_string();
    assert!(why.contains("has started rings of this disk and did not stop them"), "{why}");
}

#[test]
fn parked_requests_go_along_in_the_log_and_are_done_there() {
    for format in BOTH {
        for log in [Log::new(), Log::larger_than_asked()] {
            let (mut rig, _fake, front_end, mut guest, pending) = holding(format, Some(&log));
            hand_on(&mut rig, Options::buffered());
            guest.next_used().unwrap();
            assert_eq!(pending.status(&guest), OK);
            assert!(serves(&mut guest));
            // The front-end sends the same log again.
            log.give(&front_end);
        }
    }
}

/// A guest whose front-end reconnects.
fn reconnected(rig: &Rig, guest: &Guest, features: u64) -> FrontEnd {
    let mut front_end = rig.connect();
    front_end.negotiate(features);
    front_end.share(Arc::clone(guest.view.memory()));
    front_end.announce_queue(guest);
    front_end.ok(code::SET_VRING_ENABLE, &rig::vring_state(0, 1), &[]);
    front_end
}

fn writeback(front_end: &FrontEnd) -> u8 {
    front_end.config(32, 1)[0]
}

#[test]
fn guest_that_never_switched_its_cache_off_keeps_it_on_there_and_after_it_reconnects() {
    for format in BOTH {
        let (mut rig, features) = (Rig::start(Options::default()), format.usual() | CONFIG_WCE);
        let (front_end, mut guest) = ready(&rig, features);
        assert!(serves(&mut guest));
        for _ in 0..2 {
            hand_on(&mut rig, Options::default());
            assert!(serves(&mut guest));
            assert_eq!(writeback(&front_end), 1);
        }
        drop(front_end);
        let front_end = reconnected(&rig, &guest, features);
        assert!(serves(&mut guest));
        assert_eq!(writeback(&front_end), 1);
    }
}

#[test]
fn guest_whose_ring_failed_to_start_may_have_chosen_elsewhere_there_too() {
    for format in BOTH {
        let (mut rig, features) = (Rig::start(Options::default()), format.usual() | CONFIG_WCE);
        let (_front_end, mut guest) = ready(&rig, features);
        assert!(serves(&mut guest));
        rig.stop();
        rig.start_server(Options::default());
        let mut front_end = rig.connect();
        front_end.negotiate(features);
        front_end.share(Arc::clone(guest.view.memory()));
        let mut layout = guest.layout;
        layout.used.0 += 1 << 40;
        front_end.announce_queue(&guest);
        front_end.ok(code::SET_VRING_ADDR, &rig::vring_addr(0, &layout), &[]);
        front_end.ok(code::SET_VRING_ENABLE, &rig::vring_state(0, 1), &[]);
        assert!(guest.err_signalled());
        hand_on(&mut rig, Options::default());
        front_end.announce_queue(&guest);
        assert!(serves(&mut guest));
        assert_eq!(writeback(&front_end), 0);
    }
}

#[test]
fn state_that_no_front_end_could_have_made_is_refused_and_the_disk_serves_others() {
    let half = |bytes: Vec<u8>, fds: Value| json!({"bytes": bytes, "fds": fds, "left_ms": 1});
    let header = |size: u32| [1, 1, size].into_iter().flat_map(u32::to_ne_bytes).collect::<Vec<u8>>();
    let changes: [(&str, Value, &str); 13] = [
        ("/socket", json!(99), "descriptor 99 of"),
        ("/vrings/0/kick", json!(0), "missing, or used twice"),
        ("/vrings/0/call", json!(1), "missing, or used twice"),
        ("/vrings/0/queue_size", json!(3), "a power of two"),
        ("/negotiated", json!(1_u64 << 63), "not offered"),
        ("/protocol", json!(1_u64 << 63), "not offered"),
        ("/regions/0/size_bytes", json!(1_u64 << 40), "memory region"),
        ("/regions/0/file_offset_bytes", json!(u64::MAX), "memory region"),
        ("/half", half(vec![0; 12], json!([])), "message version"),
        ("/half", half(header(1 << 20), json!([])), "at most"),
        ("/half", half([header(0), vec![0; 1]].concat(), json!([])), "request 1 has 13 bytes"),
        ("/half", half(vec![0; 1], json!([0])), "missing, or used twice"),
        ("/dirty_log", json!({"fd": 99, "mmap_bytes": 8, "offset_bytes": 0}), "descriptor 99 of"),
    ];
    for (place, value, said) in changes {
        let mut rig = Rig::start(Options::default());
        let (_front_end, _guest) = ready(&rig, Format::Split.usual());
        let (name, _, mut sessions) = parts_of(&mut rig);
        rig.start_server(patient(Options::default()));
        let (mut state, fds) = sessions.remove(0);
        *state.pointer_mut(place).unwrap() = value;
        let state: SessionState = serde_json::from_value(state).unwrap();
        let why = rebuild(&rig, &name, state, fds).unwrap_err().to_string();
        assert!(why.contains(said), "{place}: {why}");
        assert_eq!(server(&rig).report().disks[0].sessions, 0);
        let (_front_end, mut guest) = ready(&rig, Format::Split.usual());
        assert!(serves(&mut guest));
    }
}

#[test]
fn session_that_is_not_let_go_touches_nothing_and_ends() {
    let mut rig = Rig::start(Options::default());
    let (front_end, mut guest) = ready(&rig, Format::Split.usual());
    let (name, _, mut sessions) = parts_of(&mut rig);
    rig.start_server(patient(Options::default()));
    let (state, fds) = sessions.remove(0);
    let state = serde_json::from_value(state).unwrap();
    let session = rebuild(&rig, &name, state, fds).unwrap();
    let pending = write(&mut guest);
    guest.submit();
    drop(session);
    assert!(front_end.is_closed());
    assert_eq!(pending.status(&guest), 0xff);
}
