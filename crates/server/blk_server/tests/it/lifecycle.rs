//! The server's lifecycle: stops under load, its socket files, and disks that grow.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use blk_server::{ServerError, SocketConfig, SocketError, Wce};
use disk_image::{HostOpener, Image, ImageOptions, Opener};
use io_engine::{EngineConfig, Fault, IoUringEngine, When};

use crate::rig;
use crate::rig::format::{Format, on_both_formats};
use crate::rig::passed::{add_transfer, faulty, hold, let_go, serves, works};
use crate::rig::{CALM, MIB, Options, PATIENCE, Rig, code, eventually, feature, kind, ready, vring_state};

const OK: u8 = 0;

#[test]
fn stop_finishes_what_is_in_flight_and_is_clean() {
    let (options, engine) = faulty();
    let mut rig = Rig::start(options);
    let (_front_end, mut guest) = ready(&rig, feature::USUAL);
    hold(&engine);
    let pending: Vec<_> =
        (0..4).map(|n| add_transfer(&mut guest, kind::OUT, n * 8, (8 + n) * MIB, 4096)).collect();
    guest.submit();
    assert!(eventually(|| engine.hanging() == 4));
    let server = rig.server.take().unwrap();
    let stopping = std::thread::spawn(move || server.stop(PATIENCE));
    std::thread::sleep(CALM);
    assert!(!stopping.is_finished());
    let_go(&engine);
    assert!(stopping.join().unwrap().is_clean());
    assert!(pending.iter().all(|pending| pending.status(&guest) == OK));
    assert!(!rig.socket.exists());
}

on_both_formats! {
    requests_put_after_the_stop_began_stay_in_the_ring_for_the_next_server,
}

fn requests_put_after_the_stop_began_stay_in_the_ring_for_the_next_server(ring: Format) {
    let (options, engine) = faulty();
    let mut rig = Rig::start(options);
    let (_front_end, mut guest) = ready(&rig, ring.usual());
    let witness = rig.connect();
    assert_eq!(witness.ask_u64(code::GET_QUEUE_NUM), 4);
    hold(&engine);
    let first = add_transfer(&mut guest, kind::IN, 0, 8 * MIB, 4096);
    guest.submit();
    assert!(eventually(|| engine.hanging() == 1));
    let server = rig.server.take().unwrap();
    let stopping = std::thread::spawn(move || server.stop(PATIENCE));
    assert!(witness.is_closed());
    std::thread::sleep(10 * CALM); // the worker gets the command a moment later
    let late = add_transfer(&mut guest, kind::IN, 0, 9 * MIB, 4096);
    guest.submit();
    guest.kick();
    std::thread::sleep(CALM);
    let_go(&engine);
    assert!(stopping.join().unwrap().is_clean());
    assert_eq!((first.status(&guest), late.status(&guest)), (OK, 0xff));

    rig.start_server(Options::default());
    let mut next = rig.connect();
    next.negotiate(ring.usual());
    rig::passed::share(&mut next, guest.view.memory().regions().to_vec());
    next.announce_queue(&guest);
    next.ok(code::SET_VRING_ENABLE, &vring_state(0, 1), &[]);
    guest.wait_for(first.token);
    guest.wait_for(late.token);
    assert_eq!(late.status(&guest), OK);
}

#[test]
fn stop_with_a_request_that_never_ends_reports_the_disk_and_removes_the_socket() {
    let (options, engine) = faulty();
    let mut rig = Rig::start(options);
    let (_front_end, mut guest) = ready(&rig, feature::USUAL);
    engine.inject(When::Always, Fault::Stick, 1);
    add_transfer(&mut guest, kind::IN, 0, 8 * MIB, 4096);
    guest.submit();
    assert!(eventually(|| engine.hanging() == 1));
    let report = rig.server.take().unwrap().stop(Duration::from_millis(300));
    assert_eq!(report.unfinished, ["test0"]);
    assert!(!rig.socket.exists());
    let_go(&engine);
}

#[test]
fn session_that_waits_for_its_turn_is_stopped_without_having_had_it() {
    let (options, engine) = faulty();
    let mut rig = Rig::start(options);
    let (_first, mut guest) = ready(&rig, feature::USUAL);
    let mut second = rig.connect();
    second.negotiate(feature::USUAL);
    second.share_memory(16 * MIB);
    let mut waiting = second.new_guest(0, 256, feature::USUAL);
    let unserved = add_transfer(&mut waiting, kind::IN, 0, 8 * MIB, 4096);
    waiting.ring.publish();
    second.announce_queue(&waiting);
    second.send_flags(code::SET_VRING_ENABLE, 9, &vring_state(0, 1), &[]);
    assert!(serves(&mut guest));
    let calls = engine.calls();
    std::thread::sleep(CALM);
    assert!(rig.stop().is_clean());
    assert_eq!((unserved.status(&waiting), engine.calls()), (0xff, calls));
}

#[test]
fn stop_does_not_wait_for_the_rest_of_a_message() {
    let mut rig = Rig::start(Options::default());
    let halfway = rig.connect();
    halfway.send_raw(&[1, 0, 0], &[]);
    std::thread::sleep(CALM);
    // A partial message may take five seconds, but the stop has less.
    let report = rig.server.take().unwrap().stop(Duration::from_secs(3));
    assert!(report.is_clean());
    assert!(halfway.is_closed());
}

/// `stop` must release everything that a session holds. Otherwise the next server finds the image locked, and the old
/// server removes the new server's socket.
#[test]
fn server_can_be_started_again_at_once_under_a_connected_front_end() {
    let mut rig = Rig::start(Options::default());
    for _ in 0..20 {
        let (_front_end, mut guest) = ready(&rig, feature::USUAL);
        assert!(serves(&mut guest));
        assert!(rig.stop().is_clean());
        rig.start_server(Options::default());
    }
    std::thread::sleep(CALM);
    assert!(works(&rig));
}

fn grow(rig: &Rig, bytes: u64) {
    std::fs::File::options().write(true).open(&rig.image).unwrap().set_len(bytes).unwrap();
    rig.server.as_ref().unwrap().refresh_capacities();
}

#[test]
fn image_that_grew_is_announced_on_the_back_end_channel_and_usable() {
    let rig = Rig::start(Options::default());
    let (front_end, mut guest) = ready(&rig, feature::USUAL);
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    ours.set_read_timeout(Some(PATIENCE)).unwrap();
    front_end.ok(code::SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()]);
    grow(&rig, 32 * MIB);
    let mut message = [0; 12];
    ours.read_exact(&mut message).unwrap();
    let words = message.as_chunks().0.iter().map(|word| u32::from_ne_bytes(*word)).collect::<Vec<_>>();
    assert_eq!(words, [2, 1, 0]);
    assert_eq!(front_end.config(0, 8), (32 * MIB / 512).to_le_bytes());
    assert_eq!(guest.read(31 * MIB / 512, 4096).status, Some(OK));
}

#[test]
fn image_that_did_not_grow_is_not_announced() {
    let rig = Rig::start(Options::default());
    let (front_end, _guest) = ready(&rig, feature::USUAL);
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    ours.set_read_timeout(Some(CALM)).unwrap();
    front_end.ok(code::SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()]);
    rig.server.as_ref().unwrap().refresh_capacities();
    assert!(ours.read_exact(&mut [0; 1]).is_err());
}

#[test]
fn back_end_channel_that_nobody_reads_holds_up_nobody() {
    let rig = Rig::start(Options::default());
    let (front_end, mut guest) = ready(&rig, feature::USUAL);
    let (ours, theirs) = UnixStream::pair().unwrap();
    theirs.set_nonblocking(true).unwrap();
    while rustix::io::write(&theirs, &[0; 12]).is_ok() {}
    theirs.set_nonblocking(false).unwrap();
    front_end.ok(code::SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()]);
    std::thread::scope(|scope| {
        let growing = scope.spawn(|| (17..27).for_each(|mib| grow(&rig, mib * MIB)));
        // With five seconds for each, this would take longer than `PATIENCE`.
        assert!(eventually(|| growing.is_finished()));
    });
    assert_eq!(front_end.config(0, 8), (26 * MIB / 512).to_le_bytes());
    assert!(serves(&mut guest));
    drop(ours);
}

#[test]
fn back_end_channel_that_is_closed_hurts_no_one() {
    let rig = Rig::start(Options::default());
    let (front_end, mut guest) = ready(&rig, feature::USUAL);
    let (ours, theirs) = UnixStream::pair().unwrap();
    drop(ours);
    front_end.ok(code::SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()]);
    grow(&rig, 17 * MIB);
    assert!(serves(&mut guest));
}

#[test]
fn back_end_channel_that_is_no_connected_unix_stream_is_refused_and_the_one_of_before_stays() {
    let rig = Rig::start(Options::default());
    let (front_end, mut guest) = ready(&rig, feature::USUAL);
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    ours.set_read_timeout(Some(PATIENCE)).unwrap();
    front_end.ok(code::SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()]);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let stream = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let path = rig.folder.path().join("l");
    let (listening, datagram) = (UnixListener::bind(path), UnixDatagram::unbound().unwrap());
    let unfit: [OwnedFd; 6] = [
        rig::passed::event(),
        std::io::pipe().unwrap().1.into(),
        std::fs::File::open(&rig.image).unwrap().into(),
        stream.into(),
        datagram.into(),
        listening.unwrap().into(),
    ];
    for unfit in &unfit {
        assert_eq!(front_end.acked(code::SET_BACKEND_REQ_FD, &[], &[unfit.as_fd()]), 1);
    }
    grow(&rig, 17 * MIB);
    ours.read_exact(&mut [0; 12]).unwrap();
    assert!(serves(&mut guest));
    front_end.send(code::SET_BACKEND_REQ_FD, &[], &[unfit[0].as_fd()]);
    assert!(front_end.is_closed());
}

/// Tries to serve another image on `socket`.
fn bind(rig: &Rig, socket: &Path) -> Result<(), ServerError> {
    let path = rig.folder.path().join("other.raw");
    std::fs::File::create(&path).unwrap().set_len(MIB).unwrap();
    let opener: Arc<dyn Opener> = Arc::new(HostOpener);
    let image = Image::open(opener.as_ref(), &ImageOptions::new(&path)).unwrap();
    let serial = image.default_serial();
    let (name, wce) = ("other".into(), Wce::Guest);
    let disk = blk_server::DiskConfig {
        name,
        image,
        serial,
        queues: 1,
        queue_size: 64,
        wce,
        engine: None,
        workers: None,
        coalescing: None,
        park: None,
    };
    let socket = SocketConfig { path: socket.to_owned(), mode: 0o600, uid: None, gid: None };
    let engine = || Ok(Box::new(IoUringEngine::new(EngineConfig::default())?) as Box<dyn io_engine::Engine>);
    let engine = blk_server::EngineSource::new("io_uring", 1024, Box::new(engine));
    let workers = vec![blk_server::WorkerOptions::default()];
    let config = blk_server::ServerConfig {
        engine,
        workers,
        poll: Duration::ZERO,
        balance: blk_server::Balance::Auto,
    };
    blk_server::Server::start(&config, &opener, vec![(disk, socket)]).map(drop)
}

#[test]
fn socket_of_a_running_server_is_refused_and_stays() {
    let rig = Rig::start(Options::default());
    let refused = bind(&rig, &rig.socket);
    assert!(matches!(refused, Err(ServerError::Socket(SocketError::InUse { .. }))), "{refused:?}");
    assert!(works(&rig));
}

#[test]
fn socket_left_by_a_dead_server_is_replaced() {
    let rig = Rig::start(Options::default());
    let stale = std::env::temp_dir().join(format!("{}-stale", std::process::id()));
    drop(UnixListener::bind(&stale).unwrap());
    assert!(stale.exists());
    bind(&rig, &stale).unwrap();
    assert!(!stale.exists());
}

#[test]
fn file_or_folder_in_the_place_of_the_socket_is_refused_and_stays() {
    let rig = Rig::start(Options::default());
    let file = rig.folder.path().join("other.raw");
    let short = std::env::temp_dir().join(format!("{}-file", std::process::id()));
    std::fs::write(&short, "kept").unwrap();
    let refused = bind(&rig, &short);
    assert!(matches!(refused, Err(ServerError::Socket(SocketError::NotASocket { .. }))), "{refused:?}");
    assert_eq!(std::fs::read(&short).unwrap(), b"kept");
    std::fs::remove_file(&short).unwrap();
    std::fs::create_dir(&short).unwrap();
    let refused = bind(&rig, &short);
    assert!(matches!(refused, Err(ServerError::Socket(SocketError::NotASocket { .. }))), "{refused:?}");
    std::fs::remove_dir(&short).unwrap();
    assert!(file.exists());
}
