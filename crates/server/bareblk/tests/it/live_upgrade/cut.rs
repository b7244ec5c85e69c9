//! Front-ends that are in the way of a live upgrade: taken along where that is possible, else named, and cut off if the operator says so.
//!
//! Not here: what a front-end can be in the middle of (`blk_server/tests/it/live_upgrade.rs`).

use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use super::MIB;
use crate::killed::load::{Load, Overlap, Rings};
use crate::rig::{Place, Starting, assert_says, bareblk, refusal};
use rustix::process::Signal;

const GET_FEATURES: u32 = 1;
const SET_MEM_TABLE: u32 = 5;
/// Only a server that hangs takes so long.
const HANGS: Duration = Duration::from_secs(120);

/// A front-end by hand.
struct FrontEnd(UnixStream);

impl FrontEnd {
    fn connect(socket: &Path) -> Self {
        let stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(HANGS)).unwrap();
        Self(stream)
    }

    fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(ancillary.push(SendAncillaryMessage::ScmRights(fds)));
        }
        let sent = sendmsg(&self.0, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::empty()).unwrap();
        assert_eq!(sent, bytes.len());
    }

    fn hears_features(&mut self) {
        let mut reply = [0; 20];
        self.0.read_exact(&mut reply).unwrap();
        assert_eq!(reply[..4], GET_FEATURES.to_ne_bytes());
    }

    fn is_closed(&mut self) -> bool {
        self.0.read(&mut [0]).map_or(true, |count| count == 0)
    }

    /// Shares memory, and takes it away: no other server can map it.
    fn with_lost_memory(socket: &Path) -> Self {
        let mut front_end = Self::connect(socket);
        let memory: OwnedFd = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&memory, MIB).unwrap();
        let table = [1, 0, MIB, 0, 0].map(u64::to_ne_bytes).concat();
        front_end.send(&message(SET_MEM_TABLE, &table), &[memory.as_fd()]);
        front_end.send(&message(GET_FEATURES, &[]), &[]);
        front_end.hears_features();
        ftruncate(&memory, 0).unwrap();
        front_end
    }
}

fn message(code: u32, body: &[u8]) -> Vec<u8> {
    let header = [code, 1, u32::try_from(body.len()).unwrap()];
    header.into_iter().flat_map(u32::to_ne_bytes).chain(body.iter().copied()).collect()
}

/// Two disks in one server, and commands that take over from it.
struct TwoDisks {
    place: Place,
    file: PathBuf,
    sockets: [PathBuf; 2],
}

impl TwoDisks {
    fn new() -> Self {
        let place = Place::new();
        let table = |name: &str| {
            let (image, socket) = (place.image(name, 4 * MIB), place.socket(name));
            format!("[[disk]]\nname = '{name}'\nimage = {image:?}\nsocket = {socket:?}\n")
        };
        let text = format!("control = {:?}\n{}{}", place.socket("c"), table("a"), table("b"));
        let (file, sockets) = (place.path("bareblk.toml"), ["a", "b"].map(|name| place.socket(name)));
        std::fs::write(&file, text).unwrap();
        Self { place, file, sockets }
    }

    fn serve(&self, args: &[&str]) -> Command {
        let mut command = bareblk();
        command.arg("serve").arg("--config").arg(&self.file).args(args);
        command
    }

    fn taker(&self, args: &[&str]) -> Command {
        let mut command = self.serve(args);
        command.arg("--take-over").arg(self.place.socket("c"));
        command
    }
}

#[test]
fn front_end_that_is_in_the_way_is_named_and_cut_off_on_request_and_others_go_on() {
    let disks = TwoDisks::new();
    let (old, _) = Starting::new(disks.serve(&[])).wait_lines(3);
    let mut load = Load::connect(disks.sockets[0].clone(), Rings::Split, Overlap::No, 11);
    load.work();
    let mut hostile = FrontEnd::with_lost_memory(&disks.sockets[1]);

    let refused = refusal(disks.taker(&[]));
    assert_says(&refused, &["disk `b`", "memory region", "--take-over-cut b"]);
    load.work();
    let unknown = refusal(disks.taker(&["--take-over-cut", "x"]));
    assert_says(&unknown, &["--take-over-cut x", "the running server has no such disk"]);

    let (new, lines) = Starting::new(disks.taker(&["--take-over-cut", "b"])).wait_lines(5);
    assert!(lines[0].starts_with("bareblk: took over disk a; its guest paused for"), "{lines:?}");
    assert_eq!(lines[1], "bareblk: took over disk b; its front-ends were cut off, and have to reconnect");
    assert_eq!(old.wait_ended().code(), Some(0));
    assert!(hostile.is_closed());
    load.work();
    load.verify();
    assert_eq!(load.seen.reconnects, 0);
    let mut other = Load::connect(disks.sockets[1].clone(), Rings::Packed, Overlap::No, 12);
    other.work();
    other.verify();
    drop((load, other));
    assert_eq!(new.stop(Signal::TERM).code(), Some(0));
}
