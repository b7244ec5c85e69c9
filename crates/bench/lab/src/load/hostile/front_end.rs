//! A front-end for a guest that breaks the rules: the fewest messages that start a queue, and any others.
//!
//! `connect → features → memory → queues of 256 each → anything`
//!
//! - Messages are sent as the caller says; the server's answers are read where they matter.
//!
//! Layout: vhost-user, "Header". Not here: what the guest does with the queue (`guest.rs`), a
//! front-end for real use (`blk_driver`).

use std::io::{self, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use guest_mem::{Address, GuestAddress, GuestMemory, MemoryView, Region};
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use virtqueue::RingLayout;

/// The guest's memory.
pub(crate) const MEMORY_BYTES: u64 = 16 << 20;
/// In descriptors.
pub(crate) const QUEUE_SIZE: u16 = 256;
/// A server that does not answer for this long has ended.
const PATIENCE: Duration = Duration::from_secs(5);
/// `VIRTIO_F_VERSION_1` and `VIRTIO_F_INDIRECT_DESC`.
const FEATURES: u64 = 1 << 32 | 1 << 28;
/// `VHOST_USER_F_PROTOCOL_FEATURES`, and of those `REPLY_ACK`.
const PROTOCOL_FEATURES: u64 = 1 << 30;
const REPLY_ACK: u64 = 1 << 3;
/// `VHOST_USER_PROTOCOL_F_INFLIGHT_SHMFD`.
const INFLIGHT_SHMFD: u64 = 1 << 12;
/// Guest memory of each queue: its ring, and what its requests need.
pub(crate) const AREA_BYTES: u64 = 0x1_0000;
/// Size of the description of an in-flight log.
const LOG_BYTES: usize = 24;
/// Size of every message's header.
const HEADER_BYTES: usize = 12;
/// Header flags: version 1; with a reply.
const PLAIN: u32 = 1;
const NEED_REPLY: u32 = 1 | 8;

/// Message codes.
pub(crate) mod code {
    pub(crate) const GET_FEATURES: u32 = 1;
    pub(crate) const SET_FEATURES: u32 = 2;
    pub(crate) const SET_OWNER: u32 = 3;
    pub(crate) const SET_MEM_TABLE: u32 = 5;
    pub(crate) const SET_VRING_NUM: u32 = 8;
    pub(crate) const SET_VRING_ADDR: u32 = 9;
    pub(crate) const SET_VRING_BASE: u32 = 10;
    pub(crate) const GET_VRING_BASE: u32 = 11;
    pub(crate) const SET_VRING_KICK: u32 = 12;
    pub(crate) const SET_VRING_CALL: u32 = 13;
    pub(crate) const SET_PROTOCOL_FEATURES: u32 = 16;
    pub(crate) const SET_VRING_ENABLE: u32 = 18;
    pub(crate) const GET_INFLIGHT_FD: u32 = 31;
    pub(crate) const SET_INFLIGHT_FD: u32 = 32;
}

/// See the file's head.
#[derive(Debug)]
pub(crate) struct HostileFrontEnd {
    socket: UnixStream,
}

/// A queue that it started.
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

    /// Negotiates replies that say whether a message was carried out.
    pub fn negotiate_acks(&self) -> io::Result<()> {
        self.send(code::SET_PROTOCOL_FEATURES, PLAIN, &REPLY_ACK.to_ne_bytes(), &[])?;
        self.send(code::SET_FEATURES, PLAIN, &(FEATURES | PROTOCOL_FEATURES).to_ne_bytes(), &[])?;
        self.barrier()
    }

    /// Starts a queue without requests, in its own memory; the last message starts it.
    pub fn start_queue(&self) -> io::Result<RawQueue> {
        self.start_queues(1)?.pop().ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Starts this many queues, all in one memory with an area each.
    pub fn start_queues(&self, count: u16) -> io::Result<Vec<RawQueue>> {
        self.send(code::SET_OWNER, PLAIN, &[], &[])?;
        self.send(code::SET_FEATURES, PLAIN, &FEATURES.to_ne_bytes(), &[])?;
        let view = self.share_memory()?;
        (0..count).map(|index| self.start(&view, index)).collect()
    }

    /// Negotiates an in-flight log; shares memory, but starts no queue.
    pub fn negotiate_log(&self) -> io::Result<MemoryView> {
        self.send(code::SET_OWNER, PLAIN, &[], &[])?;
        self.send(code::SET_PROTOCOL_FEATURES, PLAIN, &INFLIGHT_SHMFD.to_ne_bytes(), &[])?;
        self.send(code::SET_FEATURES, PLAIN, &(FEATURES | PROTOCOL_FEATURES).to_ne_bytes(), &[])?;
        self.share_memory()
    }

    /// Starts queue 0 with a new in-flight log.
    pub fn start_with_new_log(&self, view: &MemoryView) -> io::Result<RawQueue> {
        let mut wanted = [0; LOG_BYTES];
        wanted[16..18].copy_from_slice(&1u16.to_ne_bytes());
        wanted[18..20].copy_from_slice(&QUEUE_SIZE.to_ne_bytes());
        self.send(code::GET_INFLIGHT_FD, PLAIN, &wanted, &[])?;
        let (description, log) = self.receive_log()?;
        self.send(code::SET_INFLIGHT_FD, PLAIN, &description, &[log.as_fd()])?;
        let queue = self.start(view, 0)?;
        self.send(code::SET_VRING_ENABLE, PLAIN, &state(0, 1), &[])?;
        Ok(queue)
    }

    /// Stops queue 0; returns when it has stopped.
    pub fn stop_queue(&self) -> io::Result<()> {
        self.send(code::GET_VRING_BASE, PLAIN, &state(0, 0), &[])?;
        self.receive().map(drop)
    }

    fn share_memory(&self) -> io::Result<MemoryView> {
        let region = Region::from_memfd(GuestAddress(0), MEMORY_BYTES).map_err(io::Error::other)?;
        self.send_table(&region)?;
        let memory = GuestMemory::new(vec![Arc::new(region)]).map_err(io::Error::other)?;
        Ok(MemoryView::new(Arc::new(memory)))
    }

    fn start(&self, view: &MemoryView, index: u16) -> io::Result<RawQueue> {
        let (area, number) = (AREA_BYTES * u64::from(index), u32::from(index));
        let layout = RingLayout {
            queue_size: QUEUE_SIZE,
            descriptors: GuestAddress(area),
            avail: GuestAddress(area + 0x8000),
            used: GuestAddress(area + 0xa000),
        };
        let fd = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let (kick, call) = (fd()?, fd()?);
        self.send(code::SET_VRING_NUM, PLAIN, &state(number, QUEUE_SIZE.into()), &[])?;
        self.send(code::SET_VRING_BASE, PLAIN, &state(number, 0), &[])?;
        self.send(code::SET_VRING_ADDR, PLAIN, &addresses(number, &layout), &[])?;
        let of = u64::from(index).to_ne_bytes();
        self.send(code::SET_VRING_CALL, PLAIN, &of, &[call.as_fd()])?;
        self.send(code::SET_VRING_KICK, PLAIN, &of, &[kick.as_fd()])?;
        self.barrier()?;
        Ok(RawQueue { view: view.clone(), layout, kick, _call: call })
    }

    /// Announces a queue's memory again; returns when the server has switched to it.
    pub fn announce_memory(&self, view: &MemoryView) -> io::Result<()> {
        let regions = view.memory().regions();
        regions.iter().try_for_each(|region| self.send_table(region))?;
        self.barrier()
    }

    /// Sends a memory table of one region.
    fn send_table(&self, region: &Region) -> io::Result<()> {
        let spec = region.spec();
        let words = [1, spec.guest_addr.raw_value(), spec.size_bytes, 0, spec.file_offset_bytes];
        let table: Vec<u8> = words.into_iter().flat_map(u64::to_ne_bytes).collect();
        self.send(code::SET_MEM_TABLE, PLAIN, &table, &[region.fd().as_fd()])
    }

    /// Sends an invalid message that does not end the session; true if the server refused it.
    pub fn nonsense(&self) -> io::Result<bool> {
        self.send(code::SET_VRING_NUM, NEED_REPLY, &state(0, 3), &[])?;
        Ok(self.receive()? != 0)
    }

    /// Returns when the server has seen all earlier messages.
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
        // So few bytes are sent whole, or the call waits.
        let sent =
            rustix::net::sendmsg(&self.socket, &[IoSlice::new(&bytes)], &mut ancillary, SendFlags::NOSIGNAL)?;
        if sent == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
    }

    /// Receives an answer of eight bytes.
    fn receive(&self) -> io::Result<u64> {
        let mut bytes = [0; 20];
        (&self.socket).read_exact(&mut bytes)?;
        let [.., a, b, c, d, e, f, g, h] = bytes;
        Ok(u64::from_ne_bytes([a, b, c, d, e, f, g, h]))
    }

    /// Receives an in-flight log's description and its memory.
    fn receive_log(&self) -> io::Result<([u8; LOG_BYTES], OwnedFd)> {
        let mut header = [0; HEADER_BYTES];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let into = &mut [IoSliceMut::new(&mut header)];
        let came = rustix::net::recvmsg(&self.socket, into, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
        let fd = ancillary.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        });
        (&self.socket).read_exact(&mut header[came.bytes..])?;
        let [.., a, b, c, d] = header;
        let (mut description, len_bytes) = ([0; LOG_BYTES], u32::from_ne_bytes([a, b, c, d]) as usize);
        let body = description.get_mut(..len_bytes).ok_or(io::ErrorKind::InvalidData)?;
        (&self.socket).read_exact(body)?;
        Ok((description, fd.ok_or(io::ErrorKind::NotFound)?))
    }
}

/// The payload of a message about a queue.
fn state(index: u32, number: u32) -> Vec<u8> {
    [index, number].map(u32::to_ne_bytes).concat()
}

fn addresses(index: u32, layout: &RingLayout) -> Vec<u8> {
    let places = [layout.descriptors, layout.used, layout.avail].map(|place| place.raw_value());
    [index.into()].into_iter().chain(places).chain([0]).flat_map(u64::to_ne_bytes).collect()
}
