//! Front-ends that a live upgrade cannot move. The error names them, and the operator may choose to disconnect them;
//! the new server takes over all others.

use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vhost_user::body::{MemoryRegion, memory_table};
use vhost_user::{FrontEnd, Header, code};

use super::MIB;
use crate::killed::load::{Load, Overlap, Rings};
use crate::rig::{Place, Starting, assert_says, bareblk, refusal};
use rustix::process::Signal;

/// An upgrade takes longer than this only if a server hangs.
const HANGS: Duration = Duration::from_secs(120);

/// A front-end that shared a memory file and truncated it: no other server can map it.
fn with_lost_memory(socket: &Path) -> FrontEnd {
    let front_end = FrontEnd::connect(socket, HANGS).unwrap();
    let memory: OwnedFd = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&memory, MIB).unwrap();
    let region = MemoryRegion { guest_addr: 0, size_bytes: MIB, user_addr: 0, file_offset_bytes: 0 };
    let table = memory_table([region].into_iter());
    front_end.send(code::SET_MEM_TABLE, Header::REQUEST, &table, &[memory.as_fd()]).unwrap();
    assert_eq!(front_end.ask(code::GET_FEATURES, &[]).unwrap().code, code::GET_FEATURES);
    ftruncate(&memory, 0).unwrap();
    front_end
}

/// Two disks in one server, and the commands of servers that take over from it.
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
    let hostile = with_lost_memory(&disks.sockets[1]);

    let refused = refusal(disks.taker(&[]));
    assert_says(&refused, &["disk `b`", "memory region", "--take-over-cut b"]);
    load.work();
    let unknown = refusal(disks.taker(&["--take-over-cut", "x"]));
    assert_says(&unknown, &["--take-over-cut x", "the running server has no such disk"]);

    let (new, lines) = Starting::new(disks.taker(&["--take-over-cut", "b"])).wait_lines(5);
    assert!(lines[0].starts_with("bareblk: took over disk a; its guest paused for"), "{lines:?}");
    assert_eq!(lines[1], "bareblk: took over disk b; its front-ends were cut off, and have to reconnect");
    assert_eq!(old.wait_ended().code(), Some(0));
    assert!(hostile.socket().read(&mut [0]).map_or(true, |count| count == 0));
    load.work();
    load.verify();
    assert_eq!(load.seen.reconnects, 0);
    let mut other = Load::connect(disks.sockets[1].clone(), Rings::Packed, Overlap::No, 12);
    other.work();
    other.verify();
    drop((load, other));
    assert_eq!(new.stop(Signal::TERM).code(), Some(0));
}
