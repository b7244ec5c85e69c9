//! `live_upgrade`: frames with descriptors of all kinds, on the channel over which a server replaces another.
//!
//! `input → frames, complete or cut, descriptors → a socket → read by both servers → sessions rebuilt and dropped`
//!
//! - Each frame is read as a message or as a one-line error of limited length. No read waits for data that never
//!   arrives.
//! - A message has as many descriptors as announced, and is unchanged after being written and read again.
//! - A session is rebuilt or refused in one line. Afterwards all its descriptors are closed.

use std::fs::File;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::OnceLock;

use bareblk::inputs::{LiveUpgradeFrame, live_upgrade_frame};
use blk_server::Server;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::SendFlags;
use tempfile::TempDir;

use crate::input::{Input, Seed};
use crate::vhost_user::{disk_server, is_settled, open_fds};

const MOST_FRAMES: usize = 16;
const MOST_BODY_BYTES: u16 = 0xfff;
const MOST_FDS: usize = 16;
const MAGIC: &[u8] = b"bbto";
/// Maximum length of an error relative to the input: the error may repeat the input with escapes.
const MOST_TIMES: usize = 16;
const MOST_MORE: usize = 4096;
const MEMFD_BYTES: u64 = 0x1_0000;

/// The server that replaces another. It has one disk and keeps no state of a run.
fn server() -> &'static Server {
    static SERVER: OnceLock<(Server, TempDir)> = OnceLock::new();
    let made = SERVER.get_or_init(|| {
        let folder = tempfile::Builder::new().prefix("bareblk-fuzz-").tempdir().expect("a folder");
        let image = folder.path().join("disk.raw");
        let file = File::create_new(&image).expect("an image");
        file.set_len(MEMFD_BYTES).expect("room for the image");
        (disk_server(&image, &folder.path().join("disk.sock"), false), folder)
    });
    &made.0
}

/// Runs the target once.
pub(crate) fn run(bytes: &[u8]) {
    let server = server();
    let before = open_fds();
    let mut input = Input::new(bytes);
    let (there, here) = UnixStream::pair().expect("a socket");
    let fds = Descriptors::new();
    for _ in 0..MOST_FRAMES {
        if input.is_empty() || !frame(&there, &fds, &mut input) {
            break;
        }
    }
    there.shutdown(Shutdown::Write).expect("a socket");
    let room = bytes.len() * MOST_TIMES + MOST_MORE;
    let one_line = |why: &str| {
        assert!(!why.is_empty() && !why.contains(char::is_control), "not exactly one line: {why:?}");
        assert!(why.len() <= room, "{} bytes for {}: {why}", why.len(), bytes.len());
    };
    loop {
        match live_upgrade_frame(&here, server) {
            Ok(frame) => {
                check(&frame, server);
                frame.session.and_then(Result::err).iter().for_each(|why| one_line(why));
            }
            Err(why) => break one_line(&why),
        }
    }
    drop((there, here, fds));
    assert!(is_settled(before), "{} descriptors were open, now {}", before, open_fds());
}

/// Checks that the frame is unchanged after being written and read again.
fn check(frame: &LiveUpgradeFrame, server: &Server) {
    assert!(frame.descriptors <= MOST_FDS, "{} descriptors, none of them sent", frame.descriptors);
    let (there, here) = UnixStream::pair().expect("a socket");
    let len = u32::try_from(frame.body.len()).expect("a small frame").to_le_bytes();
    send(&there, &[MAGIC, &len, &[0; 4], frame.body.as_bytes()].concat(), &[]);
    let again = live_upgrade_frame(&here, server).expect("a frame that was read before");
    assert_eq!((again.name, &again.body, again.descriptors), (frame.name, &frame.body, 0));
}

/// One descriptor of each kind.
struct Descriptors([OwnedFd; 5]);

impl Descriptors {
    fn new() -> Self {
        let memory = memfd_create("fuzz", MemfdFlags::CLOEXEC).expect("a memfd");
        ftruncate(&memory, MEMFD_BYTES).expect("a memfd");
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd");
        let (socket, _) = UnixStream::pair().expect("a socket");
        let null = File::open("/dev/null").expect("/dev/null");
        let folder = File::open("/").expect("a folder");
        Self([socket.into(), memory, event, null.into(), folder.into()])
    }
}

/// Sends a valid or invalid frame. Returns `false` if nothing more can be sent.
fn frame(to: &UnixStream, known: &Descriptors, input: &mut Input<'_>) -> bool {
    let shape = input.u8();
    if shape & 1 != 0 {
        let len = input.below(64);
        return send(to, input.take(len), &[]);
    }
    let fds: Vec<_> = (0..input.below(MOST_FDS + 1)).map(|_| known.0[input.below(5)].as_fd()).collect();
    let len = input.u16() & MOST_BODY_BYTES;
    let body = input.take(len.into());
    let said = |wrong: bool, count: usize, input: &mut Input<'_>| {
        if wrong { input.u32() } else { u32::try_from(count).unwrap_or(u32::MAX) }.to_le_bytes()
    };
    let (bytes, count) = (said(shape & 2 != 0, body.len(), input), said(shape & 4 != 0, fds.len(), input));
    let (with_body, behind) = if shape & 8 == 0 { (&[][..], &fds[..]) } else { (&fds[..], &[][..]) };
    let frame = [MAGIC, &bytes, &count, body].concat();
    send(to, &frame, with_body) && (fds.is_empty() || shape & 0x10 != 0 || send(to, &[0], behind))
}

fn send(to: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
    if bytes.is_empty() {
        return true;
    }
    vhost_user::send(to, bytes, fds, SendFlags::DONTWAIT).is_ok_and(|sent| sent == bytes.len())
}

/// A conversation from either side, sessions with and without required parts, and invalid frames.
pub(crate) fn seeds() -> Vec<(String, Vec<u8>)> {
    let frame = |shape: u8, fds: &[u8], body: &str| {
        let (count, len) = (u8::try_from(fds.len()).unwrap_or(0), u16::try_from(body.len()).unwrap_or(0));
        Seed::new(&[shape, count]).and(fds).and(&len.to_le_bytes()).and(body.as_bytes())
    };
    let path = r#"{"Unix":[47,97]}"#;
    let vring = |fds: &str| {
        format!(
            r#"{{"queue_size":8,"addresses":[0,1024,2048],"log_addr":null,"base":0,{fds},"enabled":true,"failed":false,"has_run":true}}"#
        )
    };
    let session = |more: &str, vrings: &str| {
        format!(
            r#"{{"Session":{{"disk":"fuzz","frozen_ns":5,"state":{{"socket":0,"negotiated":4294967296,"protocol":0,"protocol_negotiated":true,{more},"has_lease":true,"log_all":false,"dirty_log":null,"dirty_log_changed":null,"writeback":true,"heard":true,"backend_channel":null,"vrings":[{vrings}]}}}}}}"#
        )
    };
    let region = r#"{"fd":1,"guest_addr":0,"size_bytes":65536,"user_addr":0,"file_offset_bytes":0}"#;
    let log = r#"{"fd":4,"mmap_bytes":4096,"offset_bytes":0,"queues":1,"entries":8}"#;
    let plain = session(r#""half":null,"regions":[],"log":null"#, "");
    let full = session(
        &format!(r#""half":{{"bytes":[1,0,0,0],"fds":[],"left_ms":10}},"regions":[{region}],"log":{log}"#),
        &vring(r#""kick":2,"call":3,"err":null"#),
    );
    let state = r#"{"State":{"disk":"fuzz","state":{"writethrough":false,"cache_chosen":true,"failed":false,"capacity_sectors":128}}}"#;
    let disk = format!(
        r#"{{"Disk":{{"name":"fuzz","image":{path},"socket":{{"path":{path},"managed":false}},"facts":[{{"key":"serial","value":"x"}}],"capacity_sectors":128,"claimed":false}}}}"#
    );
    let control = format!(r#"{{"Control":{{"path":{path},"managed":true}}}}"#);
    let frames = [
        ("begin", frame(0, &[], r#""Begin""#)),
        ("control", frame(0, &[0], &control)),
        ("disk", frame(0, &[4, 0], &disk)),
        ("offers-end", frame(0, &[], r#""OffersEnd""#)),
        ("ready", frame(0, &[], r#""Ready""#)),
        ("state", frame(0, &[], state)),
        ("session", frame(0, &[0], &plain)),
        ("session-full", frame(0, &[0, 1, 2, 2, 1], &full)),
        ("session-wrong-kinds", frame(0, &[3, 4, 1, 0, 2], &full)),
        ("session-without", frame(0, &[], &full)),
        ("session-elsewhere", frame(0, &[0], &plain.replace("fuzz", "\\u007f\\n"))),
        ("states-end", frame(0, &[], r#""StatesEnd""#)),
        ("prepared", frame(0, &[], r#""Prepared""#)),
        ("yours", frame(0, &[], r#""Yours""#)),
        ("no", frame(0, &[], r#"{"No":{"why":"it \n cannot"}}"#)),
        ("unknown", frame(0, &[], r#"{"Dance\n":{"why":1}}"#)),
        ("descriptors-early", frame(8, &[0, 1], r#""Ready""#)),
        ("descriptors-missing", frame(0x10, &[0, 1], r#""Ready""#)),
        ("too-large", frame(2, &[], r#""Ready""#).and(&[0xff; 4])),
        ("too-many", frame(4, &[], r#""Ready""#).and(&[0xff; 4])),
        ("other", Seed::new(&[1, 20]).and(br#"{"id":1,"do":"list"}"#)),
    ];
    let all = frames.iter().take(14).fold(Seed::default(), |all, (_, seed)| all.and(&seed.clone().bytes()));
    let mut seeds: Vec<_> = frames.into_iter().map(|(name, seed)| (name.to_owned(), seed.bytes())).collect();
    seeds.push(("all".to_owned(), all.bytes()));
    seeds
}
