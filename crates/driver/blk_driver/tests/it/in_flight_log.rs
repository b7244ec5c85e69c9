//! The front-end's part of the in-flight log: it requests the log once, sends it to each back-end before the rings, and
//! drops it together with the rings.
//!
//! The back-ends of these tests have no disk and only record the messages. Tests with a disk: `reconnect.rs`.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

use std::error::Error;
use std::os::fd::OwnedFd;
use std::time::Duration;

use blk_driver::{
    ConnectError, Device, Event, MessageError, Options, Queue, Reconnect, ReconnectReport, Request, Work,
};

use crate::peers::script::{
    Character, LOG_BYTES, Message, Reaction, Script, code, log_description, log_memory, protocol,
};
use crate::peers::{PATIENCE, eventually};

fn patient(script: &Script) -> Options {
    Options { reconnect: Reconnect::For(PATIENCE), timeout: PATIENCE, ..Options::new(&script.socket) }
}

fn insisting(script: &Script) -> Options {
    Options { in_flight_log: Some(true), timeout: PATIENCE, ..Options::new(&script.socket) }
}

fn usual() -> Script {
    Script::start(Character::default(), |_| Reaction::Right)
}

/// The codes of one connection's relevant messages, in order.
fn log_and_rings(script: &Script, connection: usize) -> Vec<u32> {
    let wanted = [code::GET_INFLIGHT_FD, code::SET_INFLIGHT_FD, code::SET_VRING_NUM, code::SET_VRING_ENABLE];
    let messages = script.messages.lock().unwrap();
    let of_connection = messages.iter().filter(|message| message.connection == connection);
    of_connection.map(|message| message.code).filter(|code| wanted.contains(code)).collect()
}

/// The bodies of a connection's messages with code `code`.
fn bodies(script: &Script, connection: usize, code: u32) -> Vec<Vec<u8>> {
    let messages = script.messages.lock().unwrap();
    let wanted = messages.iter().filter(|message| message.connection == connection && message.code == code);
    wanted.map(|message| message.body.clone()).collect()
}

fn report(device: &Device) -> ReconnectReport {
    assert_eq!(device.next_event(PATIENCE), Some(Event::Disconnected));
    match device.next_event(PATIENCE) {
        Some(Event::Reconnected(report)) => report,
        other => panic!("{other:?}"),
    }
}

/// Whether the message is the one that ends the connection.
fn is_end(message: &Message) -> bool {
    message.code == code::GET_CONFIG && message.number > 15
}

/// A back-end that closes its first connection on demand, and reacts with `second` on later connections.
fn goes_and_comes_back(second: impl Fn(&Message) -> Reaction + Send + 'static) -> Script {
    Script::start(Character::default(), move |message| match message.connection {
        0 if is_end(message) => Reaction::Close,
        0 => Reaction::Right,
        _ => second(message),
    })
}

/// Makes the driver request the configuration, at which the back-end ends the connection.
fn end_connection(script: &Script) {
    let request = [2_u32, 1, 0].map(u32::to_ne_bytes).concat();
    rustix::io::write(script.passed(code::SET_BACKEND_REQ_FD), &request).unwrap();
}

/// Pushes a read that is never answered.
fn push_read(device: &Device, queue: &mut Queue) {
    let buffer = device.pool().take(4096).unwrap();
    queue.push(&Request::new(Work::Read { sector: 0, data: &[buffer.range()] }, 5)).unwrap();
    queue.submit();
}

fn inode(fd: &OwnedFd) -> u64 {
    rustix::fs::fstat(fd).unwrap().st_ino
}

const ANEW: [u32; 4] =
    [code::GET_INFLIGHT_FD, code::SET_INFLIGHT_FD, code::SET_VRING_NUM, code::SET_VRING_ENABLE];
const AS_IT_WAS: [u32; 3] = [code::SET_INFLIGHT_FD, code::SET_VRING_NUM, code::SET_VRING_ENABLE];

#[test]
fn log_is_asked_for_and_given_back_before_the_rings() {
    let script = usual();
    let two = Options { queues: 2, queue_size: 64, ..insisting(&script) };
    let (_device, _queues) = Device::connect(&two).unwrap();
    assert_eq!(log_and_rings(&script, 0)[..4], ANEW);
    let asked = [vec![0; 16], [2_u16, 64, 0, 0].map(u16::to_ne_bytes).concat()].concat();
    assert_eq!(bodies(&script, 0, code::GET_INFLIGHT_FD), std::slice::from_ref(&asked));
    let given = [&LOG_BYTES.to_ne_bytes(), &asked[8..]].concat();
    assert_eq!(bodies(&script, 0, code::SET_INFLIGHT_FD), [given]);
    assert_eq!(rustix::fs::fstat(script.passed(code::SET_INFLIGHT_FD)).unwrap().st_size, LOG_BYTES as i64);
}

#[test]
fn log_is_not_asked_for_where_nobody_waits_for_a_back_end_or_it_is_switched_off() {
    let script = usual();
    let _device = Device::connect(&Options::new(&script.socket)).unwrap();
    let off = Options { in_flight_log: Some(false), ..patient(&script) };
    drop(_device);
    let _device = Device::connect(&off).unwrap();
    assert!(!script.codes().contains(&code::GET_INFLIGHT_FD));
    let accepted = bodies(&script, 1, code::SET_PROTOCOL_FEATURES);
    assert_eq!(u64::from_ne_bytes(accepted[0][..].try_into().unwrap()) & protocol::INFLIGHT, 0);
}

#[test]
fn back_end_without_a_log_is_used_all_the_same_unless_one_is_insisted_on() {
    let character = Character { protocol: protocol::ALL & !protocol::INFLIGHT, ..Character::default() };
    let script = Script::start(character, |_| Reaction::Right);
    drop(Device::connect(&patient(&script)).unwrap());
    assert!(!script.codes().contains(&code::GET_INFLIGHT_FD));
    let error = Device::connect(&insisting(&script)).map(drop).unwrap_err();
    assert!(error.to_string().contains("VHOST_USER_PROTOCOL_F_INFLIGHT_SHMFD"), "{error}");
}

#[test]
fn answer_without_the_padding_is_taken() {
    let script = Script::start(Character::default(), |message| match message.code {
        code::GET_INFLIGHT_FD => {
            let body = log_description(message, LOG_BYTES, 0)[..20].to_vec();
            Reaction::ReplyWith(body, vec![log_memory(LOG_BYTES)])
        }
        _ => Reaction::Right,
    });
    assert!(Device::connect(&insisting(&script)).is_ok());
}

#[test]
fn log_of_no_bytes_is_none() {
    let script = Script::start(Character::default(), |message| match message.code {
        code::GET_INFLIGHT_FD => Reaction::Reply(log_description(message, 0, 0)),
        _ => Reaction::Right,
    });
    assert!(Device::connect(&patient(&script)).is_ok());
    assert!(!script.codes().contains(&code::SET_INFLIGHT_FD));
}

// ---- invalid answers

/// The error of a failed connect to a back-end that answers GET_INFLIGHT_FD this way.
fn failure(answer: impl Fn(&Message) -> Reaction + Send + 'static) -> ConnectError {
    let script = Script::start(Character::default(), move |message| match message.code {
        code::GET_INFLIGHT_FD => answer(message),
        _ => Reaction::Right,
    });
    Device::connect(&patient(&script)).map(drop).unwrap_err()
}

fn line(error: &(dyn Error + 'static)) -> String {
    let causes = std::iter::successors(Some(error), |&error: &&(dyn Error + 'static)| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

fn with_memory(description: Vec<u8>) -> Reaction {
    Reaction::ReplyWith(description, vec![log_memory(4096)])
}

#[test]
fn log_that_its_memory_does_not_hold_is_an_error_with_the_sizes() {
    let error = failure(|asked| with_memory(log_description(asked, 4097, 0)));
    assert!(error.to_string().contains("of 4097 bytes from byte 0 on, but its file has 4096"), "{error}");
    let error = failure(|asked| with_memory(log_description(asked, 4096, 8)));
    assert!(matches!(error, ConnectError::LogOutside { offset_bytes: 8, .. }), "{error}");
    let error = failure(|asked| with_memory(log_description(asked, u64::MAX, u64::MAX)));
    assert!(matches!(error, ConnectError::LogOutside { len_bytes: u64::MAX, .. }), "{error}");
}

#[test]
fn log_without_memory_is_an_error() {
    let error = failure(|asked| Reaction::Reply(log_description(asked, 4096, 0)));
    assert!(matches!(error, ConnectError::LogWithoutMemory { len_bytes: 4096 }), "{error}");
}

#[test]
fn log_for_more_or_larger_queues_than_were_asked_for_is_an_error_with_both_numbers() {
    let more = |at: usize| {
        failure(move |asked| {
            let mut description = log_description(asked, 4096, 0);
            description[at..at + 2].copy_from_slice(&u16::MAX.to_ne_bytes());
            with_memory(description)
        })
    };
    assert!(
        more(16).to_string().contains("for 65535 queues, but the driver requested one for 1"),
        "{}",
        more(16)
    );
    assert!(
        more(18)
            .to_string()
            .contains("for 65535 descriptors per queue, but the driver requested one for 256")
    );
}

#[test]
fn answers_of_other_lengths_and_with_more_descriptors_are_errors() {
    let message = |error| match error {
        ConnectError::Message(error) => error,
        other => panic!("{other}"),
    };
    let error = message(failure(|asked| with_memory(log_description(asked, 4096, 0)[..12].to_vec())));
    assert!(matches!(error, MessageError::Size { size_bytes: 12, .. }), "{error}");
    let error = message(failure(|asked| with_memory([log_description(asked, 4096, 0), vec![0]].concat())));
    assert!(matches!(error, MessageError::Size { size_bytes: 25, .. }), "{error}");
    let error = message(failure(|asked| {
        let two = (0..2).map(|_| log_memory(4096)).collect();
        Reaction::ReplyWith(log_description(asked, 4096, 0), two)
    }));
    assert!(matches!(error, MessageError::Descriptors { .. }), "{error}");
}

#[test]
fn log_that_the_back_end_does_not_take_back_is_an_error_that_names_the_message() {
    let script = Script::start(Character::default(), |message| match message.code {
        code::SET_INFLIGHT_FD => Reaction::Reply(1_u64.to_ne_bytes().to_vec()),
        _ => Reaction::Right,
    });
    let error = Device::connect(&patient(&script)).map(drop).unwrap_err();
    assert!(line(&error).contains("refused SET_INFLIGHT_FD with 1"), "{}", line(&error));
}

#[test]
fn back_end_that_hangs_or_dies_over_its_log_is_left_in_time() {
    let ends = |code: u32, reaction: fn() -> Reaction| {
        let script = Script::start(Character::default(), move |message| {
            if message.code == code { reaction() } else { Reaction::Right }
        });
        let hasty = Options { timeout: Duration::from_millis(300), ..insisting(&script) };
        Device::connect(&hasty).map(drop).unwrap_err()
    };
    for code in [code::GET_INFLIGHT_FD, code::SET_INFLIGHT_FD] {
        let error = ends(code, || Reaction::Hang);
        assert!(matches!(error, ConnectError::Message(MessageError::TimedOut { .. })), "{error}");
        let error = ends(code, || Reaction::Close);
        assert!(matches!(error, ConnectError::Message(MessageError::Closed { .. })), "{error}");
    }
}

// ---- the next back-end

#[test]
fn next_back_end_is_given_the_same_log_and_the_same_rings_and_is_rung_for_them() {
    let script = goes_and_comes_back(|_| Reaction::Right);
    let (device, mut queues) = Device::connect(&Options { queues: 2, ..patient(&script) }).unwrap();
    let (log, call) = (script.passed(code::SET_INFLIGHT_FD), script.passed(code::SET_VRING_CALL));
    push_read(&device, &mut queues[1]);
    let mut count = [0; 8];
    rustix::io::read(script.passed(code::SET_VRING_KICK), &mut count).expect("the request's own kick");
    end_connection(&script);
    let report = report(&device);
    assert_eq!((report.kept_rings, report.resubmitted, report.owners_waited_for), (true, 0, 0));
    assert_eq!(log_and_rings(&script, 1)[..3], AS_IT_WAS);
    assert_eq!(inode(&script.passed(code::SET_INFLIGHT_FD)), inode(&log));
    for code in [code::SET_INFLIGHT_FD, code::SET_VRING_ADDR, code::SET_VRING_NUM] {
        assert_eq!(bodies(&script, 0, code), bodies(&script, 1, code), "message {code}");
    }
    rustix::io::read(script.passed(code::SET_VRING_KICK), &mut count).expect("rung for what may be there");
    rustix::io::read(call, &mut count).expect("the owner looks for what the dead one had answered");
    assert_eq!(queues[1].in_flight(), 1);
}

/// The back-end signals to the driver that it cannot continue with the queue.
fn gives_its_queue_up(script: &Script) {
    rustix::io::write(script.passed(code::SET_VRING_ERR), &1_u64.to_ne_bytes()).unwrap();
}

#[test]
fn back_end_that_was_left_alive_does_not_share_its_rings_and_log_with_the_next_one() {
    let script = usual();
    let (device, mut queues) = Device::connect(&patient(&script)).unwrap();
    let log = script.passed(code::SET_INFLIGHT_FD);
    push_read(&device, &mut queues[0]);
    gives_its_queue_up(&script);
    let mut out = [blk_driver::Completion::default()];
    assert!(eventually(|| queues[0].completions(&mut out) == Ok(0) && log_and_rings(&script, 1).len() == 4));
    assert_eq!(log_and_rings(&script, 1), ANEW);
    let report = report(&device);
    assert_eq!((report.kept_rings, report.resubmitted), (false, 1));
    assert_ne!(inode(&script.passed(code::SET_INFLIGHT_FD)), inode(&log));
    assert_ne!(bodies(&script, 0, code::SET_VRING_ADDR), bodies(&script, 1, code::SET_VRING_ADDR));
}

#[test]
fn back_end_that_comes_back_without_a_log_gets_other_rings() {
    let script = goes_and_comes_back(|message| match message.code {
        code::GET_PROTOCOL_FEATURES => {
            Reaction::Reply((protocol::ALL & !protocol::INFLIGHT).to_ne_bytes().to_vec())
        }
        _ => Reaction::Right,
    });
    let (device, queues) = Device::connect(&patient(&script)).unwrap();
    end_connection(&script);
    assert!(eventually(|| log_and_rings(&script, 1).len() == 2));
    assert_eq!(log_and_rings(&script, 1), [code::SET_VRING_NUM, code::SET_VRING_ENABLE]);
    assert_ne!(bodies(&script, 0, code::SET_VRING_ADDR), bodies(&script, 1, code::SET_VRING_ADDR));
    drop((device, queues));
}

#[test]
fn log_that_the_next_back_end_refuses_is_not_offered_again() {
    let script = goes_and_comes_back(|message| match (message.connection, message.code) {
        (1, code::SET_INFLIGHT_FD) => Reaction::Reply(1_u64.to_ne_bytes().to_vec()),
        _ => Reaction::Right,
    });
    let (_device, _queues) = Device::connect(&patient(&script)).unwrap();
    end_connection(&script);
    assert!(eventually(|| log_and_rings(&script, 2).len() == 4));
    assert_eq!(log_and_rings(&script, 1), [code::SET_INFLIGHT_FD]);
    assert_eq!(log_and_rings(&script, 2), ANEW);
}

#[test]
fn back_end_that_dies_while_it_is_told_of_the_rings_leaves_them_and_the_log_to_the_next_one() {
    let script = goes_and_comes_back(|message| match (message.connection, message.code) {
        (1, code::SET_VRING_ENABLE) => Reaction::Close,
        _ => Reaction::Right,
    });
    let (device, _queues) = Device::connect(&patient(&script)).unwrap();
    let log = script.passed(code::SET_INFLIGHT_FD);
    end_connection(&script);
    assert!(report(&device).kept_rings);
    assert_eq!(log_and_rings(&script, 2), AS_IT_WAS);
    assert_eq!(inode(&script.passed(code::SET_INFLIGHT_FD)), inode(&log));
    assert_eq!(bodies(&script, 0, code::SET_VRING_ADDR), bodies(&script, 2, code::SET_VRING_ADDR));
}

/// A driver must not offer the same log forever, whether or not the back-end reports that it refuses the log.
#[test]
fn log_over_which_back_ends_keep_closing_the_connection_is_given_up() {
    for left_out in [0, protocol::REPLY_ACK] {
        let character = Character { protocol: protocol::ALL & !left_out, ..Character::default() };
        let script = Script::start(character, move |message| match (message.connection, message.code) {
            (0, _) if is_end(message) => Reaction::Close,
            (1..=3, code::SET_INFLIGHT_FD) => Reaction::Close,
            _ => Reaction::Right,
        });
        let (device, mut queues) = Device::connect(&patient(&script)).unwrap();
        let log = script.passed(code::SET_INFLIGHT_FD);
        push_read(&device, &mut queues[0]);
        end_connection(&script);
        let mut out = [blk_driver::Completion::default()];
        assert!(eventually(|| {
            queues[0].completions(&mut out) == Ok(0) && log_and_rings(&script, 4).len() == ANEW.len()
        }));
        for connection in 1..=3 {
            assert_eq!(log_and_rings(&script, connection), [code::SET_INFLIGHT_FD]);
        }
        assert_eq!(log_and_rings(&script, 4), ANEW);
        assert_ne!(inode(&script.passed(code::SET_INFLIGHT_FD)), inode(&log));
        let report = report(&device);
        assert_eq!((report.attempts, report.kept_rings, report.resubmitted), (4, false, 1));
    }
}

#[test]
fn back_end_that_hangs_while_it_is_told_of_the_rings_does_not_share_them_with_the_next_one() {
    let script = goes_and_comes_back(|message| match (message.connection, message.code) {
        (1, code::SET_VRING_ENABLE) => Reaction::Hang,
        _ => Reaction::Right,
    });
    let hasty = Options { timeout: Duration::from_millis(500), ..patient(&script) };
    let (_device, _queues) = Device::connect(&hasty).unwrap();
    end_connection(&script);
    assert!(eventually(|| log_and_rings(&script, 2).len() == 4));
    assert_eq!(log_and_rings(&script, 2), ANEW);
    assert_ne!(bodies(&script, 1, code::SET_VRING_ADDR), bodies(&script, 2, code::SET_VRING_ADDR));
}
