//! The front-end's end of a session: a socket, shared memory, descriptors of all kinds, and the run's server.
//!
//! The usual server has no threads: the peer steps it after each message.

use std::fs::File;
use std::io::{ErrorKind, PipeReader, PipeWriter, Read, pipe};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use blk_server::{
    Balance, DiskConfig, EngineSource, InlineServer, InlineSession, Server, ServerConfig, SocketConfig, Wce,
    WorkerOptions,
};
use disk_image::{CacheMode, HostOpener, Image, ImageOptions, Opener};
use io_engine::{Engine, EngineConfig, NullEngine, signal_shared};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::RecvFlags;
use tempfile::TempDir;
use vhost_user::{FrameError, FrontEnd, message_bytes};

use crate::guest::memory_folder;

/// Number of files for memory.
pub(super) const MEMFDS: usize = 3;
/// Length of each of these files.
pub(super) const MEMFD_BYTES: u64 = 0x1_0000;
/// The disk's number of queues.
pub(super) const QUEUES: usize = 2;
/// The offset of the front-end's own addresses from guest addresses.
pub(super) const USER_BASE: u64 = 0x7f00_0000_0000;
/// Time limit of a wait, longer than any limit of a session: only a session that hangs takes this long.
const PATIENCE: Duration = Duration::from_secs(20);

/// A descriptor to send.
#[derive(Clone, Copy, Debug)]
pub(super) enum Fd {
    Memory(usize),
    Kick(usize),
    Call(usize),
    Pipe,
    PipeIn,
    Socket,
    File,
    Null,
}

impl Fd {
    pub fn of(number: u8) -> Self {
        let which = usize::from(number >> 4);
        match number % 9 {
            0 | 1 => Self::Memory(which % MEMFDS),
            2 => Self::Kick(which % QUEUES),
            3 => Self::Call(which % QUEUES),
            4 => Self::Pipe,
            5 => Self::PipeIn,
            6 => Self::Socket,
            7 => Self::File,
            _ => Self::Null,
        }
    }
}

/// The front-end's end of a session.
pub(super) struct Peer {
    front_end: FrontEnd,
    memory: Vec<File>,
    kicks: Vec<OwnedFd>,
    calls: Vec<OwnedFd>,
    pipe: (PipeReader, PipeWriter),
    pair: (UnixStream, UnixStream),
    image: File,
    null: File,
    server: Serving,
}

/// The server at the other end of the socket.
enum Serving {
    /// A server that this thread steps.
    Here { server: InlineServer, session: InlineSession },
    /// A real server with its own threads.
    Threads { server: Server, _folder: TempDir },
}

thread_local! {
    /// The inline servers' image, which no run changes: their engine moves no data.
    static IMAGE: (TempDir, PathBuf) = image();
}

fn image() -> (TempDir, PathBuf) {
    let folder = tempfile::Builder::new().prefix("bareblk-fuzz-").tempdir_in(memory_folder());
    let folder = folder.expect("a folder");
    let path = folder.path().join("disk.raw");
    File::create_new(&path).and_then(|file| file.set_len(MEMFD_BYTES)).expect("an image");
    (folder, path)
}

/// Opens the descriptors that stay open between runs.
pub(super) fn prepare() {
    IMAGE.with(|_| ());
    // The first signal opens a file that all later ones share.
    let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd");
    signal_shared(&event);
}

/// The number of open descriptors of this process.
pub(crate) fn open_fds() -> usize {
    // The count includes the directory itself, each time.
    std::fs::read_dir("/proc/self/fd").expect("/proc").count()
}

/// Waits until as many descriptors are open as before.
pub(crate) fn is_settled(before: usize) -> bool {
    let end = Instant::now() + PATIENCE;
    while open_fds() > before && Instant::now() < end {
        std::thread::sleep(Duration::from_micros(200));
    }
    open_fds() <= before
}

impl Peer {
    /// A peer of a server that this thread steps.
    pub fn new() -> Self {
        let path = IMAGE.with(|(_, path)| path.clone());
        let (engine, disk) = disk(&path);
        let server = InlineServer::start(&engine, disk).expect("a server");
        let (socket, theirs) = UnixStream::pair().expect("two sockets");
        let session = server.connect(theirs.into()).expect("a session");
        Self::of(socket, &path, Serving::Here { server, session })
    }

    /// A peer of a server that has its own threads.
    pub fn of_a_real_server(polls: bool) -> Self {
        let (folder, path) = image();
        let socket = folder.path().join("disk.sock");
        let server = disk_server(&path, &socket, polls);
        let socket = UnixStream::connect(&socket).expect("a server that listens");
        Self::of(socket, &path, Serving::Threads { server, _folder: folder })
    }

    fn of(socket: UnixStream, image: &Path, server: Serving) -> Self {
        let memfd = |_| {
            let file = File::from(memfd_create("fuzz", MemfdFlags::CLOEXEC).expect("a memfd"));
            file.set_len(MEMFD_BYTES).expect("room for memory");
            file
        };
        let fds = || {
            (0..QUEUES)
                .map(|_| eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd"))
        };
        Self {
            front_end: FrontEnd::new(socket, PATIENCE).expect("a socket"),
            memory: (0..MEMFDS).map(memfd).collect(),
            kicks: fds().collect(),
            calls: fds().collect(),
            pipe: pipe().expect("a pipe"),
            pair: UnixStream::pair().expect("two sockets"),
            image: File::open(image).expect("the image"),
            null: File::open("/dev/null").expect("/dev/null"),
            server,
        }
    }

    fn fd(&self, fd: Fd) -> BorrowedFd<'_> {
        match fd {
            Fd::Memory(which) => self.memory[which].as_fd(),
            Fd::Kick(which) => self.kicks[which].as_fd(),
            Fd::Call(which) => self.calls[which].as_fd(),
            Fd::Pipe => self.pipe.0.as_fd(),
            Fd::PipeIn => self.pipe.1.as_fd(),
            Fd::Socket => self.pair.0.as_fd(),
            Fd::File => self.image.as_fd(),
            Fd::Null => self.null.as_fd(),
        }
    }

    /// Sends a message with a valid header.
    pub fn message(&mut self, code: u32, flags: u32, body: &[u8], fds: &[Fd]) {
        self.bytes(&message_bytes(code, flags, body, &[]), fds);
    }

    /// Sends arbitrary bytes. The server may already have closed the connection.
    pub fn bytes(&mut self, bytes: &[u8], fds: &[Fd]) {
        let fds: Vec<_> = fds.iter().map(|&fd| self.fd(fd)).collect();
        match self.front_end.send_bytes(bytes, &fds) {
            Ok(()) => {}
            Err(FrameError::Io(error)) if error.kind() == ErrorKind::TimedOut => {
                panic!("the server does not read for {PATIENCE:?}")
            }
            Err(_) => return,
        }
        self.serve();
        self.take_answers();
    }

    /// Does what a server's own threads would do.
    fn serve(&mut self) {
        if let Serving::Here { server, session } = &mut self.server {
            session.serve();
            server.serve();
            // A fault in the session's memory ends the session.
            session.serve();
        }
    }

    /// The shared memory, for another thread.
    pub fn shared_files(&self) -> Vec<File> {
        self.memory.iter().map(|file| file.try_clone().expect("a descriptor")).collect()
    }

    /// Reads all answers. `blk_server`'s own tests cover front-ends that read none.
    fn take_answers(&self) {
        let mut bytes = [0; 4096];
        while rustix::net::recv(self.front_end.socket(), &mut bytes, RecvFlags::DONTWAIT)
            .is_ok_and(|(_, len)| len > 0)
        {}
    }

    pub fn poke(&mut self, memfd: usize, at: u64, bytes: &[u8]) {
        let len = self.memory[memfd].metadata().expect("a memfd").len();
        // Does not write beyond the end, because that would extend a truncated file.
        if at + bytes.len() as u64 <= len {
            self.memory[memfd].write_all_at(bytes, at).expect("room in a memfd");
        }
    }

    pub fn kick(&mut self, queue: usize) {
        rustix::io::write(&self.kicks[queue], &1u64.to_ne_bytes()).expect("an eventfd with room");
        self.serve();
    }

    pub fn truncate(&mut self, memfd: usize, len_bytes: u64) {
        self.memory[memfd].set_len(len_bytes.min(MEMFD_BYTES)).expect("a memfd");
    }

    /// Sends nothing more, and waits until the server has sent everything.
    pub fn end(self) {
        let Self { front_end, server, .. } = self;
        let mut socket = front_end.socket();
        let _ = socket.shutdown(Shutdown::Write);
        let server = match server {
            Serving::Here { server, mut session } => {
                assert!(!session.serve(), "the session continues without its front-end");
                assert_eq!(server.running_queues(), 0, "queues of a session that has ended");
                return;
            }
            Serving::Threads { server, .. } => server,
        };
        let mut rest = Vec::new();
        if let Err(error) = socket.read_to_end(&mut rest) {
            let reset = error.kind() == std::io::ErrorKind::ConnectionReset;
            assert!(reset, "the session did not end within {PATIENCE:?}: {error}");
        }
        let report = server.stop(PATIENCE);
        assert!(report.unfinished.is_empty(), "requests that never completed: {report:?}");
    }
}

/// An engine that moves no data, and a disk.
fn disk(image: &Path) -> (Arc<EngineSource>, DiskConfig) {
    let options = ImageOptions {
        cache: CacheMode::Writeback,
        lock_timeout: Duration::ZERO,
        ..ImageOptions::new(image)
    };
    let disk = DiskConfig {
        name: "fuzz".into(),
        image: Image::open(&HostOpener, &options).expect("an image of our own"),
        serial: "fuzzed".into(),
        queues: u16::try_from(QUEUES).expect("few"),
        queue_size: 64,
        wce: Wce::Guest,
        engine: None,
        workers: None,
        coalescing: None,
        park: None,
    };
    let make = || {
        Ok(Box::new(NullEngine::new(&EngineConfig { depth: 128, ..EngineConfig::default() })?)
            as Box<dyn Engine>)
    };
    (EngineSource::new("null", 128, Box::new(make)), disk)
}

/// A server with one worker and this disk.
pub(crate) fn disk_server(image: &Path, socket: &Path, polls: bool) -> Server {
    let opener: Arc<dyn Opener> = Arc::new(HostOpener);
    let (engine, disk) = disk(image);
    let poll = if polls { Duration::from_micros(50) } else { Duration::ZERO };
    let config =
        ServerConfig { engine, workers: vec![WorkerOptions::default()], poll, balance: Balance::Off };
    let socket = SocketConfig { path: socket.to_path_buf(), mode: 0o600, uid: None, gid: None };
    Server::start(&config, &opener, vec![(disk, socket)]).expect("a server")
}
