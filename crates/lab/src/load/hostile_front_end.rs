//! A front-end for a guest that keeps no rule: as few messages as start a queue, and any others.
//!
//! `connect → features → memory → queue 0 of 256 → whatever`
//!
//! - Messages are sent as they are told; what the server says to them is read where it matters.
//!
//! Layout: vhost-user, "Header". Not here: what is done with the queue (`hostile_guest.rs`), a front-end for use
//! (`blk_driver`).

use std::io::{self, IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use guest_mem::{Address, GuestAddress, GuestMemory, MemoryView, Region};
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use virtqueue::RingLayout;

/// The guest's memory.
pub(crate) const MEMORY_BYTES: u64 = 16 << 20;
/// In descriptors.
pub(crate) const QUEUE_SIZE: u16 = 256;
/// A server that does not answer for so long has ended.
const PATIENCE: Duration = Duration::from_secs(5);
/// `VIRTIO_F_VERSION_1` and `VIRTIO_F_INDIRECT_DESC`.
const FEATURES: u64 = 1 << 32 | 1 << 28;
/// `VHOST_USER_F_PROTOCOL_FEATURES`, and of those `REPLY_ACK`.
const PROTOCOL_FEATURES: u64 = 1 << 30;
const REPLY_ACK: u64 = 1 << 3;
/// Header flags: version 1; with an answer.
const PLAIN: u32 = 1;
const NEED_REPLY: u32 = 1 | 8;

/// Of the messages.
pub(crate) mod code {
    pub(crate) const GET_FEATURES: u32 = 1;
    pub(crate) const SET_FEATURES: u32 = 2;
    pub(crate) const SET_OWNER: u32 = 3;
    pub(crate) const SET_MEM_TABLE: u32 = 5;
    pub(crate) const SET_VRING_NUM: u32 = 8;
    pub(crate) const SET_VRING_ADDR: u32 = 9;
    pub(crate) const SET_VRING_BASE: u32 = 10;
    pub(crate) const SET_VRING_KICK: u32 = 12;
    pub(crate) const SET_VRING_CALL: u32 = 13;
    pub(crate) const SET_PROTOCOL_FEATURES: u32 = 16;
}

/// See the file's head.
#[derive(Debug)]
pub(crate) struct HostileFrontEnd {
    socket: UnixStream,
}

/// What it started.
#[derive(Debug)]
pub(crate) struct RawQueue {
    pub view: MemoryView,
    pub layout: RingLayout,
    pub kick: OwnedFd,
    _call: OwnedFd,
}

impl HostileFrontEnd {
    pub fn connect(path: &Path) -> io::Result<Self> {
        let socket = UnixStream::connect(path)?;
        socket.set_read_timeout(Some(PATIENCE))?;
        socket.set_write_timeout(Some(PATIENCE))?;
        Ok(Self { socket })
    }

    /// As a front-end that is told whether a message was carried out.
    pub fn negotiate_acks(&self) -> io::Result<()> {
        self.send(code::SET_PROTOCOL_FEATURES, PLAIN, &REPLY_ACK.to_ne_bytes(), &[])?;
        self.send(code::SET_FEATURES, PLAIN, &(FEATURES | PROTOCOL_FEATURES).to_ne_bytes(), &[])?;
        self.barrier()
    }

    /// A queue without requests, in memory of its own; it starts with the last of the messages.
    pub fn start_queue(&self) -> io::Result<RawQueue> {
        let region = Region::from_memfd(GuestAddress(0), MEMORY_BYTES).map_err(io::Error::other)?;
        let layout = RingLayout {
            queue_size: QUEUE_SIZE,
            descriptors: GuestAddress(0),
            avail: GuestAddress(0x8000),
            used: GuestAddress(0xa000),
        };
        let fd = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let (kick, call) = (fd()?, fd()?);
        self.send(code::SET_OWNER, PLAIN, &[], &[])?;
        self.send(code::SET_FEATURES, PLAIN, &FEATURES.to_ne_bytes(), &[])?;
        self.send_table(&region)?;
        self.send(code::SET_VRING_NUM, PLAIN, &state(u32::from(QUEUE_SIZE)), &[])?;
        self.send(code::SET_VRING_BASE, PLAIN, &state(0), &[])?;
        self.send(code::SET_VRING_ADDR, PLAIN, &addresses(&layout), &[])?;
        self.send(code::SET_VRING_CALL, PLAIN, &[0; 8], &[call.as_fd()])?;
        self.send(code::SET_VRING_KICK, PLAIN, &[0; 8], &[kick.as_fd()])?;
        self.barrier()?;
        let memory = GuestMemory::new(vec![Arc::new(region)]).map_err(io::Error::other)?;
        Ok(RawQueue { view: MemoryView::new(Arc::new(memory)), layout, kick, _call: call })
    }

    /// The memory of a queue once more; returns when the server has gone over to it.
    pub fn announce_memory(&self, view: &MemoryView) -> io::Result<()> {
        let regions = view.memory().regions();
        regions.iter().try_for_each(|region| self.send_table(region))?;
        self.barrier()
    }

    /// A memory table of one region.
    fn send_table(&self, region: &Region) -> io::Result<()> {
        let spec = region.spec();
        let words = [1, spec.guest_addr.raw_value(), spec.size_bytes, 0, spec.file_offset_bytes];
        let table: Vec<u8> = words.into_iter().flat_map(u64::to_ne_bytes).collect();
        self.send(code::SET_MEM_TABLE, PLAIN, &table, &[region.fd().as_fd()])
    }

    /// A message that makes no sense and does not end the session; true if the server refused it.
    pub fn nonsense(&self) -> io::Result<bool> {
        self.send(code::SET_VRING_NUM, NEED_REPLY, &state(3), &[])?;
        Ok(self.receive()? != 0)
    }

    /// Everything sent before was seen.
    fn barrier(&self) -> io::Result<()> {
        self.send(code::GET_FEATURES, PLAIN, &[], &[])?;
        self.receive().map(drop)
    }

    fn send(&self, code: u32, flags: u32, body: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let len_bytes = u32::try_from(body.len()).unwrap_or(u32::MAX);
        let mut bytes = [code, flags, len_bytes].map(u32::to_ne_bytes).concat();
        bytes.extend_from_slice(body);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(fds));
        }
        // So few bytes are taken whole, or wait.
        let sent =
            rustix::net::sendmsg(&self.socket, &[IoSlice::new(&bytes)], &mut ancillary, SendFlags::NOSIGNAL)?;
        if sent == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
    }

    /// An answer of eight bytes.
    fn receive(&self) -> io::Result<u64> {
        let mut bytes = [0; 20];
        (&self.socket).read_exact(&mut bytes)?;
        let [.., a, b, c, d, e, f, g, h] = bytes;
        Ok(u64::from_ne_bytes([a, b, c, d, e, f, g, h]))
    }
}

/// Of queue 0.
fn state(number: u32) -> Vec<u8> {
    [0, number].map(u32::to_ne_bytes).concat()
}

fn addresses(layout: &RingLayout) -> Vec<u8> {
    let places = [layout.descriptors, layout.used, layout.avail].map(|place| place.raw_value());
    [0].into_iter().chain(places).chain([0]).flat_map(u64::to_ne_bytes).collect()
}
