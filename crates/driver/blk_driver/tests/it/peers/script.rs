//! A back-end without a disk: answers every message correctly, except where the test overrides it.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::net::SendFlags;
pub use vhost_user::code;
use vhost_user::{Header, PartialMessage, SCM_MAX_FD, message_bytes};
use virtio_blk::{DeviceConfig, features};

pub mod protocol {
    pub const MQ: u64 = 1 << 0;
    pub const REPLY_ACK: u64 = 1 << 3;
    pub const BACKEND_REQ: u64 = 1 << 5;
    pub const CONFIG: u64 = 1 << 9;
    pub const INFLIGHT: u64 = 1 << 12;
    pub const RESET_DEVICE: u64 = 1 << 13;
    pub const MEM_SLOTS: u64 = 1 << 15;
    pub const ALL: u64 = MQ | REPLY_ACK | BACKEND_REQ | CONFIG | INFLIGHT | RESET_DEVICE | MEM_SLOTS;
}

pub const FEATURES: u64 = 1 << 30
    | features::VERSION_1
    | features::MQ
    | features::FLUSH
    | features::BLK_SIZE
    | features::SEG_MAX
    | features::EVENT_IDX
    | features::INDIRECT_DESC
    | features::RING_PACKED;

/// One received message.
#[derive(Clone, Debug)]
pub struct Message {
    /// Number of the connection, counted from 0.
    pub connection: usize,
    /// Number of the message in its connection, counted from 0.
    pub number: usize,
    pub code: u32,
    pub need_reply: bool,
    pub body: Vec<u8>,
}

impl Message {
    pub fn u32_at(&self, at: usize) -> u32 {
        u32::from_ne_bytes(self.body[at..at + 4].try_into().unwrap())
    }
}

/// The back-end's reaction to a message.
pub enum Reaction {
    /// Answer correctly.
    Right,
    /// Send a well-formed reply with this body.
    Reply(Vec<u8>),
    /// Send these bytes.
    Bytes(Vec<u8>),
    /// Send the correct reply, one byte at a time with a pause before each.
    Drip(Duration),
    /// Send the correct reply with a descriptor.
    WithDescriptor,
    /// Send a well-formed reply with this body and these descriptors.
    ReplyWith(Vec<u8>, Vec<OwnedFd>),
    /// Send nothing, forever.
    Hang,
    Close,
}

type Behaviour = dyn Fn(&Message) -> Reaction + Send;

/// What the back-end offers, and the contents of its correct answers.
#[derive(Clone, Copy, Debug)]
pub struct Character {
    pub features: u64,
    pub protocol: u64,
    pub queues: u64,
    pub slots: u64,
    pub config: DeviceConfig,
}

impl Default for Character {
    fn default() -> Self {
        let config = DeviceConfig {
            capacity_sectors: 2048,
            blk_size: 512,
            seg_max: 126,
            num_queues: 4,
            ..DeviceConfig::from_bytes(&[])
        };
        Self { features: FEATURES, protocol: protocol::ALL, queues: 4, slots: 32, config }
    }
}

/// The back-end without a disk.
pub struct Script {
    pub socket: PathBuf,
    pub messages: Arc<Mutex<Vec<Message>>>,
    /// The last descriptor that came with each kind of message.
    pub passed: Arc<Mutex<HashMap<u32, OwnedFd>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    _folder: tempfile::TempDir,
}

impl Script {
    pub fn start(character: Character, behaviour: impl Fn(&Message) -> Reaction + Send + 'static) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("s");
        let listener = UnixListener::bind(&socket).unwrap();
        let (messages, passed, stop) = (Arc::default(), Arc::default(), Arc::default());
        let mut script = Self { socket, messages, passed, stop, thread: None, _folder: folder };
        let worker = Worker {
            character,
            behaviour: Box::new(behaviour),
            messages: Arc::clone(&script.messages),
            passed: Arc::clone(&script.passed),
            stop: Arc::clone(&script.stop),
        };
        script.thread = Some(std::thread::spawn(move || worker.run(&listener)));
        script
    }

    /// The descriptor that came with the driver's last message `code`, once it has arrived.
    pub fn passed(&self, code: u32) -> OwnedFd {
        assert!(super::eventually(|| self.passed.lock().unwrap().contains_key(&code)));
        self.passed.lock().unwrap().remove(&code).unwrap()
    }

    pub fn codes(&self) -> Vec<u32> {
        self.messages.lock().unwrap().iter().map(|message| message.code).collect()
    }
}

impl Drop for Script {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        let _ = UnixStream::connect(&self.socket);
        let _ = self.thread.take().unwrap().join();
    }
}

struct Worker {
    character: Character,
    behaviour: Box<Behaviour>,
    messages: Arc<Mutex<Vec<Message>>>,
    passed: Arc<Mutex<HashMap<u32, OwnedFd>>>,
    stop: Arc<AtomicBool>,
}

impl Worker {
    fn run(self, listener: &UnixListener) {
        for (connection, stream) in listener.incoming().enumerate() {
            if self.stop.load(Ordering::SeqCst) {
                return;
            }
            let stream = stream.unwrap();
            stream.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
            // The driver may close a connection at any time.
            let _ = self.serve(connection, &stream);
        }
    }

    fn serve(&self, connection: usize, stream: &UnixStream) -> Option<()> {
        for number in 0.. {
            let (header, body, fds) = self.receive(stream)?;
            let (code, need_reply) = (header.code, header.wants_reply());
            let message = Message { connection, number, code, need_reply, body };
            self.passed.lock().unwrap().extend(fds.into_iter().map(|fd| (code, fd)));
            self.messages.lock().unwrap().push(message.clone());
            self.react(stream, &message)?;
        }
        None
    }

    fn react(&self, stream: &UnixStream, message: &Message) -> Option<()> {
        let right = self.right(message).map(|body| reply(message.code, &body));
        match (self.behaviour)(message) {
            Reaction::Right if message.code == code::GET_INFLIGHT_FD => {
                send(stream, &right.unwrap_or_default(), &[log_memory(LOG_BYTES).as_fd()])
            }
            Reaction::Right => send(stream, &right.unwrap_or_default(), &[]),
            Reaction::Reply(body) => send(stream, &reply(message.code, &body), &[]),
            Reaction::Bytes(bytes) => send(stream, &bytes, &[]),
            Reaction::Drip(pause) => right.unwrap_or_default().iter().try_for_each(|byte| {
                std::thread::sleep(pause);
                send(stream, &[*byte], &[])
            }),
            Reaction::WithDescriptor => send(stream, &right.unwrap_or_default(), &[stream.as_fd()]),
            Reaction::ReplyWith(body, fds) => {
                let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
                send(stream, &reply(message.code, &body), &fds)
            }
            Reaction::Hang => {
                while !self.stop.load(Ordering::SeqCst) && self.receive(stream).is_some() {}
                None
            }
            Reaction::Close => None,
        }
    }

    fn right(&self, message: &Message) -> Option<Vec<u8>> {
        let u64_body = |value: u64| Some(value.to_ne_bytes().to_vec());
        match message.code {
            code::GET_FEATURES => u64_body(self.character.features),
            code::GET_PROTOCOL_FEATURES => u64_body(self.character.protocol),
            code::GET_QUEUE_NUM => u64_body(self.character.queues),
            code::GET_MAX_MEM_SLOTS => u64_body(self.character.slots),
            code::GET_CONFIG => Some(self.config(message)),
            code::GET_VRING_BASE => Some(message.body.clone()),
            code::GET_INFLIGHT_FD => Some(log_description(message, LOG_BYTES, 0)),
            _ if message.need_reply => u64_body(0),
            _ => None,
        }
    }

    fn config(&self, message: &Message) -> Vec<u8> {
        let wanted = message.u32_at(4);
        [message.body[..12].to_vec(), self.character.config.read(0, wanted).unwrap()].concat()
    }

    fn receive(&self, stream: &UnixStream) -> Option<(Header, Vec<u8>, Vec<OwnedFd>)> {
        let (mut partial, mut fds) = (PartialMessage::new(SCM_MAX_FD), Vec::new());
        while partial.missing().ok()? > 0 {
            let arrived = partial.receive_waiting(stream, |fd| fds.push(fd)).ok()?;
            if !arrived && self.stop.load(Ordering::SeqCst) {
                return None;
            }
        }
        Some((partial.header()?, partial.into_body(), fds))
    }
}

pub fn reply(code: u32, body: &[u8]) -> Vec<u8> {
    message_bytes(code, Header::REPLY, body, &[])
}

/// Size of the back-end's in-flight logs.
pub const LOG_BYTES: u64 = 1 << 16;

pub fn log_memory(bytes: u64) -> OwnedFd {
    let fd = rustix::fs::memfd_create("log", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, bytes).unwrap();
    fd
}

/// The answer to GET_INFLIGHT_FD, for as many queues as the driver requested.
pub fn log_description(asked: &Message, len_bytes: u64, offset_bytes: u64) -> Vec<u8> {
    [&len_bytes.to_ne_bytes(), &offset_bytes.to_ne_bytes(), &asked.body[16..]].concat()
}

fn send(stream: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Option<()> {
    if bytes.is_empty() {
        return Some(());
    }
    vhost_user::send(stream, bytes, fds, SendFlags::empty()).ok()?;
    Some(())
}
