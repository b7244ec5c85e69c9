//! Back-ends that answer with garbage, hang, or die between two messages. The driver returns a precise error in time.
//!
//! The time limits are far above the time needed: a driver that hangs fails the test, but a slow machine does not.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

use std::error::Error;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use blk_driver::{
    Completion, ConnectError, Device, Event, MemoryError, MessageError, Options, Queue, QueueError,
    Reconnect, Request, RequestError, UserMemory, Work,
};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};
use virtio_blk::{DeviceConfig, features};

use crate::peers;
use crate::peers::script::{Character, Message, Reaction, Script, code, protocol, reply};
use crate::peers::{PATIENCE, eventually};

/// Limit for an exchange that is meant to time out.
const SHORT: Duration = Duration::from_millis(300);
/// Limit for an exchange in which some steps must first succeed in time: long enough for a machine under load.
const MODEST: Duration = Duration::from_secs(2);

fn options(script: &Script) -> Options {
    Options { timeout: PATIENCE, ..Options::new(&script.socket) }
}

fn hasty(script: &Script) -> Options {
    Options { timeout: SHORT, ..options(script) }
}

fn modest(script: &Script) -> Options {
    Options { timeout: MODEST, ..options(script) }
}

/// A script that uses `reaction` for messages with `code`, and answers all other messages correctly.
fn on(code: u32, reaction: impl Fn(&Message) -> Reaction + Send + 'static) -> Script {
    Script::start(Character::default(), move |message| {
        if message.code == code { reaction(message) } else { Reaction::Right }
    })
}

/// The error of a failed connect, which must occur within the test's own time limit.
fn failure(options: &Options) -> ConnectError {
    let start = Instant::now();
    let error = Device::connect(options).map(drop).unwrap_err();
    assert!(start.elapsed() < PATIENCE, "{error}");
    error
}

fn message_failure(options: &Options) -> MessageError {
    match failure(options) {
        ConnectError::Message(error) => error,
        other => panic!("{other}"),
    }
}

fn with_config(config: DeviceConfig) -> Script {
    Script::start(Character { config, ..Character::default() }, |_| Reaction::Right)
}

/// An error with all of its causes.
fn line(error: &(dyn Error + 'static)) -> String {
    let causes = std::iter::successors(Some(error), |&error: &&(dyn Error + 'static)| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

#[test]
fn back_end_that_does_everything_right_is_connected_to_in_order() {
    let script = Script::start(Character::default(), |_| Reaction::Right);
    let (device, queues) = Device::connect(&options(&script)).unwrap();
    assert_eq!((device.info().num_queues, queues.len()), (4, 1));
    drop(device);
    let expected = [
        code::GET_FEATURES,
        code::GET_PROTOCOL_FEATURES,
        code::SET_PROTOCOL_FEATURES,
        code::SET_OWNER,
        code::GET_QUEUE_NUM,
        code::GET_MAX_MEM_SLOTS,
        code::SET_BACKEND_REQ_FD,
        code::GET_CONFIG,
        code::SET_FEATURES,
        code::ADD_MEM_REG,
        code::ADD_MEM_REG,
        code::SET_VRING_NUM,
        code::SET_VRING_BASE,
        code::SET_VRING_ADDR,
        code::SET_VRING_CALL,
        code::SET_VRING_ERR,
        code::SET_VRING_KICK,
        code::SET_VRING_ENABLE,
        code::GET_VRING_BASE,
        code::RESET_DEVICE,
    ];
    assert_eq!(script.codes(), expected);
}

#[test]
fn back_end_with_nothing_but_configuration_is_connected_to_all_the_same() {
    let character = Character { protocol: protocol::CONFIG, ..Character::default() };
    let script = Script::start(character, |_| Reaction::Right);
    let (device, queues) = Device::connect(&options(&script)).unwrap();
    assert_eq!((device.info().num_queues, queues.len()), (1, 1));
    assert!(eventually(|| script.codes().contains(&code::SET_VRING_ENABLE)));
    let codes = script.codes();
    assert!(codes.contains(&code::SET_MEM_TABLE));
    assert!(!codes.contains(&code::ADD_MEM_REG) && !codes.contains(&code::GET_QUEUE_NUM));
    assert!(script.messages.lock().unwrap().iter().all(|message| !message.need_reply));
}

#[test]
fn packed_ring_starts_with_both_wrap_counters_at_1() {
    let script = Script::start(Character::default(), |_| Reaction::Right);
    let packed = Options { packed: Some(true), ..options(&script) };
    let (_device, _queues) = Device::connect(&packed).unwrap();
    let messages = script.messages.lock().unwrap();
    let base = messages.iter().find(|message| message.code == code::SET_VRING_BASE).unwrap();
    assert_eq!(base.u32_at(4), 0x8000_8000);
}

#[test]
fn garbage_instead_of_a_reply_is_not_a_reply() {
    let script = on(code::GET_FEATURES, |_| Reaction::Bytes(vec![0xff; 4096]));
    let error = message_failure(&options(&script));
    assert!(matches!(error, MessageError::NotAReply { code: u32::MAX, flags: u32::MAX, .. }), "{error}");
    assert!(error.to_string().contains("GET_FEATURES"), "{error}");
}

#[test]
fn reply_to_another_request_is_not_a_reply() {
    let script = on(code::GET_FEATURES, |_| Reaction::Bytes(reply(code::GET_QUEUE_NUM, &[0; 8])));
    assert!(matches!(message_failure(&options(&script)), MessageError::NotAReply { code: 17, .. }));
}

#[test]
fn request_that_comes_back_is_not_a_reply() {
    let request = [code::GET_FEATURES, 1, 8, 0, 0].map(u32::to_ne_bytes).concat();
    let script = on(code::GET_FEATURES, move |_| Reaction::Bytes(request.clone()));
    assert!(matches!(message_failure(&options(&script)), MessageError::NotAReply { flags: 1, .. }));
}

#[test]
fn reply_of_another_size_is_refused_and_nothing_is_allocated_for_it() {
    let huge = [code::GET_FEATURES, 5, u32::MAX].map(u32::to_ne_bytes).concat();
    let script = on(code::GET_FEATURES, move |_| Reaction::Bytes(huge.clone()));
    let error = message_failure(&options(&script));
    assert!(matches!(error, MessageError::Size { size_bytes: u32::MAX, wanted_bytes: 8, .. }), "{error}");
}

#[test]
fn reply_without_a_body_is_refused() {
    let script = on(code::GET_QUEUE_NUM, |_| Reaction::Reply(vec![]));
    assert!(matches!(message_failure(&options(&script)), MessageError::Size { size_bytes: 0, .. }));
}

#[test]
fn reply_with_descriptors_is_refused() {
    let script = on(code::GET_FEATURES, |_| Reaction::WithDescriptor);
    assert!(matches!(message_failure(&options(&script)), MessageError::Descriptors { .. }));
}

#[test]
fn two_replies_to_one_request_are_found_out_at_the_next() {
    let twice = reply(code::GET_FEATURES, &peers::script::FEATURES.to_ne_bytes()).repeat(2);
    let script = on(code::GET_FEATURES, move |_| Reaction::Bytes(twice.clone()));
    assert!(matches!(message_failure(&options(&script)), MessageError::NotAReply { code: 1, .. }));
}

#[test]
fn back_end_that_drips_its_reply_byte_by_byte_is_not_waited_for() {
    let script = on(code::GET_FEATURES, |_| Reaction::Drip(SHORT / 4));
    let error = message_failure(&hasty(&script));
    assert!(matches!(error, MessageError::TimedOut { limit: SHORT, .. }), "{error}");
}

#[test]
fn reply_in_single_bytes_that_is_in_time_is_taken() {
    let script = on(code::GET_FEATURES, |_| Reaction::Drip(Duration::ZERO));
    assert!(Device::connect(&options(&script)).is_ok());
}

/// Number of messages until a connection with one queue is established.
const MESSAGES: usize = 18;

#[test]
fn back_end_that_hangs_at_any_message_is_left_in_time() {
    let hang_at = |at: usize| {
        let hang =
            move |message: &Message| if message.number == at { Reaction::Hang } else { Reaction::Right };
        let script = Script::start(Character::default(), hang);
        matches!(message_failure(&hasty(&script)), MessageError::TimedOut { .. })
    };
    assert_eq!((0..MESSAGES).filter(|&at| !hang_at(at)).collect::<Vec<_>>(), [] as [usize; 0]);
}

#[test]
fn back_end_that_dies_at_any_message_is_an_error_that_names_it() {
    let die_at = |at: usize| {
        let die =
            move |message: &Message| if message.number == at { Reaction::Close } else { Reaction::Right };
        let script = Script::start(Character::default(), die);
        matches!(message_failure(&options(&script)), MessageError::Closed { .. })
    };
    assert_eq!((0..MESSAGES).filter(|&at| !die_at(at)).collect::<Vec<_>>(), [] as [usize; 0]);
}

#[test]
fn back_end_that_refuses_a_message_is_an_error_that_names_it() {
    let script = on(code::SET_VRING_NUM, |_| Reaction::Reply(22_u64.to_ne_bytes().to_vec()));
    let error = message_failure(&options(&script));
    assert!(matches!(error, MessageError::Refused { value: 22, .. }), "{error}");
    assert!(error.to_string().contains("SET_VRING_NUM"), "{error}");
}

#[test]
fn listener_whose_backlog_is_full_is_not_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let make = || socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::NONBLOCK, None).unwrap();
    let (listener, address) = (make(), SocketAddrUnix::new(&path).unwrap());
    bind(&listener, &address).unwrap();
    listen(&listener, 0).unwrap();
    let waiting: Vec<_> = (0..8).map(|_| make()).collect();
    assert!(waiting.iter().any(|socket| connect(socket, &address) == Err(rustix::io::Errno::AGAIN)));
    let error = failure(&Options { timeout: SHORT, ..Options::new(&path) });
    assert!(line(&error).contains("timed out"), "{}", line(&error));
}

#[test]
fn nobody_listening_is_an_error_that_names_the_socket() {
    let error = failure(&Options::new("/nonexistent/socket"));
    assert!(error.to_string().contains("/nonexistent/socket"), "{error}");
}

#[test]
fn queue_numbers_that_cannot_be_are_refused() {
    let with = |queues| {
        let script = Script::start(Character { queues, ..Character::default() }, |_| Reaction::Right);
        failure(&options(&script)).to_string()
    };
    assert!(with(0).contains("GET_QUEUE_NUM) 0"), "{}", with(0));
    assert!(with(65535).contains("65535"), "{}", with(65535));
    assert!(with(u64::MAX).contains("18446744073709551615"));
}

#[test]
fn configuration_of_zeroes_is_refused() {
    let error = failure(&options(&with_config(DeviceConfig::from_bytes(&[]))));
    assert!(matches!(error, ConnectError::Config { field: "blk_size", value: 0 }), "{error}");
}

#[test]
fn block_size_of_gigabytes_is_refused() {
    let config = DeviceConfig { blk_size: 1 << 30, ..Character::default().config };
    let error = failure(&options(&with_config(config)));
    assert!(matches!(error, ConnectError::Config { field: "blk_size", value: 0x4000_0000 }), "{error}");
}

#[test]
fn capacity_beyond_64_bits_is_refused() {
    let config = DeviceConfig { capacity_sectors: u64::MAX, ..Character::default().config };
    let error = failure(&options(&with_config(config)));
    assert!(matches!(error, ConnectError::Config { field: "capacity", .. }), "{error}");
}

#[test]
fn back_end_that_gives_no_configuration_of_any_size_is_refused() {
    let script = on(code::GET_CONFIG, |_| Reaction::Reply(vec![]));
    assert!(matches!(failure(&options(&script)), ConnectError::NoConfig { .. }));
}

#[test]
fn back_end_with_a_short_configuration_is_asked_for_less() {
    let short = |message: &Message| {
        if message.u32_at(4) > 36 { Reaction::Reply(vec![]) } else { Reaction::Right }
    };
    let script = on(code::GET_CONFIG, short);
    let (device, _queues) = Device::connect(&options(&script)).unwrap();
    assert_eq!((device.info().num_queues, device.info().capacity_sectors), (4, 2048));
}

#[test]
fn back_end_with_too_few_memory_slots_is_refused_with_both_numbers() {
    let script = Script::start(Character { slots: 1, ..Character::default() }, |_| Reaction::Right);
    let error = failure(&options(&script));
    assert!(
        matches!(error, ConnectError::Memory(MemoryError::TooManyRegions { count: 2, max: 1 })),
        "{error}"
    );
}

#[test]
fn options_that_cannot_be_are_refused_before_connecting() {
    let with = |queues, queue_size| failure(&Options { queues, queue_size, ..Options::new("/nonexistent") });
    assert!(matches!(with(0, 64), ConnectError::NoQueues));
    assert!(matches!(with(1, 3), ConnectError::QueueSize { size: 3, .. }));
    assert!(matches!(with(1, 2048), ConnectError::QueueSize { max: 1024, .. }));
}

/// Submits one read to a device that never answers.
fn in_flight(device: &Device, queue: &mut Queue) {
    let buffer = device.pool().take(4096).unwrap();
    queue.push(&Request::new(Work::Read { sector: 0, data: &[buffer.range()] }, 5)).unwrap();
    queue.submit();
}

/// The request ends with `Lost`, then the queue reports that the back-end has disconnected.
fn ends_lost(queue: &mut Queue) {
    let mut out = [Completion::default()];
    assert_eq!(queue.wait(&mut out, PATIENCE), Ok(1));
    assert_eq!((out[0].token, out[0].result), (5, Err(RequestError::Lost)));
    assert_eq!(queue.wait(&mut out, PATIENCE), Err(QueueError::Disconnected { queue: 0 }));
}

#[test]
fn device_whose_back_end_hangs_is_dropped_in_time_and_its_queue_ends() {
    let script = on(code::GET_VRING_BASE, |_| Reaction::Hang);
    let (device, mut queues) = Device::connect(&modest(&script)).unwrap();
    in_flight(&device, &mut queues[0]);
    let start = Instant::now();
    drop(device);
    assert!(start.elapsed() < PATIENCE);
    ends_lost(&mut queues[0]);
}

fn user_memory() -> UserMemory {
    let fd = rustix::fs::memfd_create("user", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, 65536).unwrap();
    UserMemory { fd, offset_bytes: 0, len_bytes: 65536, addr: 0x5555_0000_0000 }
}

/// Reacts to the third memory region; the first two are rings and pool.
fn on_third_region(reaction: fn() -> Reaction) -> Script {
    let seen = std::sync::atomic::AtomicUsize::new(0);
    on(code::ADD_MEM_REG, move |_| match seen.fetch_add(1, std::sync::atomic::Ordering::SeqCst) {
        2 => reaction(),
        _ => Reaction::Right,
    })
}

#[test]
fn memory_that_the_back_end_refuses_is_not_registered_and_the_device_goes_on() {
    let script = on_third_region(|| Reaction::Reply(1_u64.to_ne_bytes().to_vec()));
    let (device, _queues) = Device::connect(&options(&script)).unwrap();
    let error = device.register(user_memory()).unwrap_err();
    assert!(line(&error).contains("refused ADD_MEM_REG with 1"), "{}", line(&error));
    assert!(device.register(user_memory()).is_ok(), "the next time it is taken");
    assert!(device.unregister(0x5555_0000_0000).is_ok());
    assert_eq!(device.next_event(Duration::ZERO), None);
}

#[test]
fn back_end_that_hangs_when_it_is_given_memory_is_gone() {
    let script = on_third_region(|| Reaction::Hang);
    let (device, mut queues) = Device::connect(&modest(&script)).unwrap();
    in_flight(&device, &mut queues[0]);
    assert!(matches!(device.register(user_memory()), Err(MemoryError::Disconnected)));
    assert_eq!(device.next_event(PATIENCE), Some(Event::Disconnected));
    assert!(matches!(device.next_event(PATIENCE), Some(Event::GaveUp { .. })));
    ends_lost(&mut queues[0]);
    assert!(matches!(device.register(user_memory()), Err(MemoryError::Disconnected)));
}

#[test]
fn device_takes_as_many_regions_as_a_back_end_without_slots_and_no_more() {
    let character = Character { protocol: protocol::CONFIG | protocol::REPLY_ACK, ..Character::default() };
    let script = Script::start(character, |_| Reaction::Right);
    let (device, _queues) = Device::connect(&options(&script)).unwrap();
    let at = |number: u64| UserMemory { addr: 0x5555_0000_0000 + number * 65536, ..user_memory() };
    (0..6).for_each(|number| device.register(at(number)).unwrap());
    let error = device.register(at(6)).unwrap_err();
    assert!(matches!(error, MemoryError::TooManyRegions { count: 9, max: 8 }), "{error}");
    assert!(device.unregister(0x5555_0000_0000).is_ok());
    assert!(device.register(at(6)).is_ok());
}

/// The back-end's end of its channel, once it has arrived.
fn channel(script: &Script) -> UnixStream {
    let channel = UnixStream::from(script.passed(code::SET_BACKEND_REQ_FD));
    channel.set_read_timeout(Some(PATIENCE)).unwrap();
    channel
}

#[test]
fn garbage_on_the_channel_ends_the_channel_and_not_the_device() {
    let script = Script::start(Character::default(), |_| Reaction::Right);
    let (device, _queues) = Device::connect(&options(&script)).unwrap();
    let mut channel = channel(&script);
    channel.write_all(&[0xff; 64]).unwrap();
    assert!(matches!(channel.read(&mut [0]), Ok(0) | Err(_)), "closed");
    assert!(device.register(user_memory()).is_ok());
    assert_eq!(device.next_event(Duration::ZERO), None);
}

#[test]
fn changed_configuration_that_makes_no_sense_is_not_taken() {
    let zeroes = |message: &Message| match message.number {
        0..=17 => Reaction::Right,
        _ => Reaction::Reply(vec![0; message.body.len()]),
    };
    let script = on(code::GET_CONFIG, zeroes);
    let (device, _queues) = Device::connect(&options(&script)).unwrap();
    let before = device.info();
    let mut channel = channel(&script);
    channel.write_all(&[2_u32, 9, 0].map(u32::to_ne_bytes).concat()).unwrap();
    channel.read_exact(&mut [0; 20]).unwrap();
    assert!(eventually(|| script.codes().iter().filter(|&&code| code == code::GET_CONFIG).count() == 2));
    assert_eq!(device.next_event(SHORT), None);
    assert_eq!(device.info(), before);
}

#[test]
fn back_end_that_hangs_when_asked_for_its_changed_configuration_is_gone() {
    let hang = |message: &Message| if message.number < 18 { Reaction::Right } else { Reaction::Hang };
    let script = on(code::GET_CONFIG, hang);
    let (device, _queues) = Device::connect(&modest(&script)).unwrap();
    channel(&script).write_all(&[2_u32, 1, 0].map(u32::to_ne_bytes).concat()).unwrap();
    assert_eq!(device.next_event(PATIENCE), Some(Event::Disconnected));
}

#[test]
fn back_end_that_cannot_go_on_with_a_queue_is_left_and_its_requests_are_lost() {
    let script = Script::start(Character::default(), |_| Reaction::Right);
    let (device, mut queues) = Device::connect(&options(&script)).unwrap();
    in_flight(&device, &mut queues[0]);
    rustix::io::write(script.passed(code::SET_VRING_ERR), &1_u64.to_ne_bytes()).unwrap();
    assert_eq!(device.next_event(PATIENCE), Some(Event::Disconnected));
    ends_lost(&mut queues[0]);
}

#[test]
fn queue_that_is_dropped_is_stopped_at_the_back_end_and_the_others_go_on() {
    let script = Script::start(Character::default(), |_| Reaction::Right);
    let two = Options { queues: 2, ..options(&script) };
    let (device, mut queues) = Device::connect(&two).unwrap();
    drop(queues.remove(0));
    assert!(eventually(|| script.codes().contains(&code::GET_VRING_BASE)));
    let messages = script.messages.lock().unwrap().clone();
    let stopped: Vec<u32> =
        messages.iter().filter(|m| m.code == code::GET_VRING_BASE).map(|m| m.u32_at(0)).collect();
    assert_eq!(stopped, [0]);
    assert!(device.register(user_memory()).is_ok());
    assert_eq!(device.next_event(Duration::ZERO), None);
}

#[test]
fn device_that_is_dropped_with_all_its_queues_does_not_wait_for_each_of_them() {
    let config = DeviceConfig { num_queues: 16, ..Character::default().config };
    let slow = |message: &Message| match message.code {
        code::GET_VRING_BASE => Reaction::Drip(Duration::from_millis(20)),
        _ => Reaction::Right,
    };
    let script = Script::start(Character { queues: 16, config, ..Character::default() }, slow);
    let sixteen = Options { queues: 16, ..modest(&script) };
    let (device, queues) = Device::connect(&sixteen).unwrap();
    drop(queues);
    assert!(eventually(|| script.codes().contains(&code::GET_VRING_BASE)), "one is under way");
    drop(device);
    let asked = script.codes().iter().filter(|&&code| code == code::GET_VRING_BASE).count();
    // The driver waits for the stop in progress, and for as many further stops as are answered within the limit of one
    // message.
    assert!(asked < 16, "all {asked} queues were waited for");
}

#[test]
fn limits_longer_than_the_clock_are_no_limits() {
    let script = Script::start(Character::default(), |_| Reaction::Right);
    let endless =
        Options { timeout: Duration::MAX, reconnect: Reconnect::For(Duration::MAX), ..options(&script) };
    assert!(Device::connect(&endless).is_ok());
}

/// A back-end that closes its first connection once it is established, and reacts with `second` on later connections.
fn comes_back(second: fn(&Message) -> Reaction) -> Script {
    Script::start(Character::default(), move |message| match (message.connection, message.code) {
        // The connection is good until the driver registers memory.
        (0, code::ADD_MEM_REG) if message.number > 11 => Reaction::Close,
        (0, _) => Reaction::Right,
        _ => second(message),
    })
}

/// Connects to `script`, loses the connection, and returns the reason of `GaveUp`.
fn reason_to_give_up(script: &Script) -> String {
    let patient = Options { reconnect: Reconnect::For(MODEST), ..options(script) };
    let (device, mut queues) = Device::connect(&patient).unwrap();
    in_flight(&device, &mut queues[0]);
    assert!(device.register(user_memory()).is_err());
    assert_eq!(device.next_event(PATIENCE), Some(Event::Disconnected));
    let Some(Event::GaveUp { reason }) = device.next_event(PATIENCE) else { panic!("not given up") };
    ends_lost(&mut queues[0]);
    reason
}

#[test]
fn back_end_that_comes_back_without_a_feature_in_use_is_given_up_with_the_reason() {
    let script = comes_back(|message| match message.code {
        code::GET_FEATURES => {
            Reaction::Reply((peers::script::FEATURES & !features::FLUSH).to_ne_bytes().to_vec())
        }
        _ => Reaction::Right,
    });
    let reason = reason_to_give_up(&script);
    assert!(reason.contains("it lacks 0x200"), "{reason}");
}

#[test]
fn back_end_that_comes_back_with_fewer_queues_is_given_up_with_the_reason() {
    let script = comes_back(|message| match message.code {
        code::GET_QUEUE_NUM => Reaction::Reply(0_u64.to_ne_bytes().to_vec()),
        _ => Reaction::Right,
    });
    let reason = reason_to_give_up(&script);
    assert!(reason.contains("GET_QUEUE_NUM"), "{reason}");
}

#[test]
fn disk_that_comes_back_smaller_is_given_up_with_both_sizes() {
    let script = comes_back(|message| match message.code {
        code::GET_CONFIG => {
            let config = DeviceConfig { capacity_sectors: 1024, ..Character::default().config };
            Reaction::Reply(
                [message.body[..12].to_vec(), config.read(0, message.u32_at(4)).unwrap()].concat(),
            )
        }
        _ => Reaction::Right,
    });
    let reason = reason_to_give_up(&script);
    assert!(reason.contains("capacity in sectors fell from 2048 to 1024"), "{reason}");
}

#[test]
fn back_end_that_hangs_when_it_comes_back_is_given_up_in_time() {
    let script = comes_back(|_| Reaction::Hang);
    let reason = reason_to_give_up(&script);
    assert!(reason.contains("GET_FEATURES"), "{reason}");
}

#[test]
fn device_dropped_while_its_back_end_hangs_in_a_reconnect_is_dropped_at_once() {
    let script = comes_back(|_| Reaction::Hang);
    let patient =
        Options { reconnect: Reconnect::For(100 * PATIENCE), timeout: 100 * PATIENCE, ..options(&script) };
    let (device, _queues) = Device::connect(&patient).unwrap();
    assert!(device.register(user_memory()).is_err());
    assert!(eventually(|| script.messages.lock().unwrap().iter().any(|message| message.connection == 1)));
    let start = Instant::now();
    drop(device);
    assert!(start.elapsed() < PATIENCE);
}
