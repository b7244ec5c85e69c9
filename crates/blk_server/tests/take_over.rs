//! Sessions that freeze, go on after all, or go on in another server; and what is refused instead.
//!
//! Both servers are in this process: what travels between real ones is given by hand. Not here: processes, images and sockets that
//! are handed over (`bareblk/tests/take_over`).
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

mod rig;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use blk_server::{DiskState, Hold, HoldWhat, Server, SessionState};
use io_engine::{FakeHandle, Fault, Verb, When};
use rig::dirty::{self, begin};
use rig::format::Format;
use rig::in_flight_log::Log;
use rig::passed::{Pending, add_transfer, faulty, hold, let_go, serves};
use rig::raw_guest;
use rig::{FrontEnd, Guest, MIB, Options, PATIENCE, Rig, code, eventually, feature, kind, ready};
use rustix::io::Errno;
use serde_json::{Value, json};

const SOON: Duration = Duration::from_millis(100);
const HOLD: Hold = Hold { what: HoldWhat::Any, retry_after: None };
const BOTH: [Format; 2] = [Format::Split, Format::Packed];
const OK: u8 = 0;
/// A guest that may switch its write cache off.
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

// ---- here

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
fn session_in_the_middle_of_a_message_is_not_frozen_and_hears_its_end() {
    let rig = Rig::start(Options::default());
    let front_end = rig.connect();
    let header: Vec<u8> = [code::GET_FEATURES, 1, 0].into_iter().flat_map(u32::to_ne_bytes).collect();
    front_end.send_raw(&header[..5], &[]);
    // Until its thread is in the message.
    std::thread::sleep(SOON);
    assert!(why_not(&rig).contains("is still busy with a message"));
    front_end.send_raw(&header[5..], &[]);
    assert!(front_end.receive().is_some());
    drop(server(&rig).freeze(PATIENCE).unwrap());
    assert_ne!(front_end.ask_u64(code::GET_FEATURES), 0);
}

#[test]
fn migrating_guest_stays_and_is_handed_over_later() {
    let rig = Rig::start(Options::default());
    let mut front_end = rig.connect();
    let features = Format::Split.usual();
    front_end.negotiate(features);
    front_end.share_memory(dirty::MEMORY_BYTES);
    let mut guest = front_end.start_queue(0, 64, features);
    let rings = [(0, guest.layout)];
    let log = dirty::Log::new();
    log.give(&front_end);
    // The next message may be the one that has stores noted, and the log's file is nowhere but here.
    assert!(why_not(&rig).contains("migrating"), "{}", why_not(&rig));
    begin(&front_end, &rings, features, &log);
    assert!(why_not(&rig).contains("migrating"), "{}", why_not(&rig));
    assert!(serves(&mut guest));
    dirty::end(&front_end, &rings, features);
    drop(server(&rig).freeze(PATIENCE).unwrap());
    assert!(serves(&mut guest));
}

/// A disk whose writes fail and are held.
fn holding(format: Format, log: Option<&Log>) -> (Rig, FakeHandle, FrontEnd, Guest, Pending) {
    let (options, fake) = raw_guest::faulty(Options { hold: Some(HOLD), ..Options::buffered() });
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
    assert!(eventually(|| server(&rig).report().disks[0].queues[0].counters.held == 1));
    (rig, fake, front_end, guest, pending)
}

#[test]
fn held_requests_without_a_log_keep_their_session_here() {
    for format in BOTH {
        let (rig, fake, _front_end, mut guest, pending) = holding(format, None);
        assert!(why_not(&rig).contains("queue 0 holds 1 requests"), "{}", why_not(&rig));
        fake.clear();
        assert_eq!(server(&rig).resume_disk("test0", PATIENCE).unwrap(), 1);
        guest.next_used().unwrap();
        assert_eq!(pending.status(&guest), OK);
    }
}

// ---- there

type Part = (String, DiskState, Vec<(Value, Vec<OwnedFd>)>);

/// Freezes all, and gives it up.
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

/// The old one's sessions end by themselves, and with the last of them the image's lock.
fn patient(mut options: Options) -> Options {
    options.image.lock_timeout = PATIENCE;
    options
}

/// Another server goes on with it.
fn hand_on(rig: &mut Rig, options: Options) {
    let (name, disk, sessions) = parts_of(rig);
    rig.start_server(patient(options));
    server(rig).restore_disk(&name, &disk).unwrap();
    for (state, fds) in sessions {
        let state: SessionState = serde_json::from_value(state).unwrap();
        let session = server(rig).rebuild(&name, state, fds).unwrap();
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
        // Write-through, by the guest's choice.
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
fn held_requests_go_along_in_the_log_and_are_done_there() {
    for format in BOTH {
        for log in [Log::new(), Log::larger_than_asked()] {
            let (mut rig, _fake, front_end, mut guest, pending) = holding(format, Some(&log));
            hand_on(&mut rig, Options::buffered());
            guest.next_used().unwrap();
            assert_eq!(pending.status(&guest), OK);
            assert!(serves(&mut guest));
            // Said once more, as the front-end knows it: the same one.
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
    let changes: [(&str, Value, &str); 8] = [
        ("/socket", json!(99), "descriptor 99 of"),
        ("/vrings/0/kick", json!(0), "not there, or named twice"),
        ("/vrings/0/call", json!(1), "not there, or named twice"),
        ("/vrings/0/queue_size", json!(3), "a power of two"),
        ("/negotiated", json!(1_u64 << 63), "not offered"),
        ("/protocol", json!(1_u64 << 63), "not offered"),
        ("/regions/0/size_bytes", json!(1_u64 << 40), "memory region"),
        ("/regions/0/file_offset_bytes", json!(u64::MAX), "memory region"),
    ];
    for (place, value, said) in changes {
        let mut rig = Rig::start(Options::default());
        let (_front_end, _guest) = ready(&rig, Format::Split.usual());
        let (name, _, mut sessions) = parts_of(&mut rig);
        rig.start_server(patient(Options::default()));
        let (mut state, fds) = sessions.remove(0);
        *state.pointer_mut(place).unwrap() = value;
        let state: SessionState = serde_json::from_value(state).unwrap();
        let why = server(&rig).rebuild(&name, state, fds).unwrap_err().to_string();
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
    let session = server(&rig).rebuild(&name, state, fds).unwrap();
    let pending = write(&mut guest);
    guest.submit();
    drop(session);
    assert!(front_end.is_closed());
    assert_eq!(pending.status(&guest), 0xff);
}
