//! A front-end for a guest that breaks the rules: it can send the minimum of messages that start a queue, and arbitrary
//! messages.
//!
//! `connect → features → memory → queues of 256 each → anything`
//!
//! - Messages are sent as the caller specifies. The server's answers are read only where they matter.
//!
//! Layout: vhost-user, "Header".

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use guest_mem::{Address, GuestAddress, GuestMemory, MemoryView, Region};
use rustix::event::{EventfdFlags, eventfd};
use vhost_user::body::{MemoryRegion, memory_table, vring_addresses, vring_state};
use vhost_user::{FrameError, FrontEnd, Header, code};
use virtqueue::RingLayout;

/// Size of the guest's memory.
pub(crate) const MEMORY_BYTES: u64 = 16 << 20;
/// Size of each queue, in descriptors.
pub(crate) const QUEUE_SIZE: u16 = 256;
/// A server that does not answer for this long is considered dead.
const PATIENCE: Duration = Duration::from_secs(5);
/// `VIRTIO_F_VERSION_1` and `VIRTIO_F_INDIRECT_DESC`.
const FEATURES: u64 = 1 << 32 | 1 << 28;
/// `VHOST_USER_F_PROTOCOL_FEATURES`, and its `REPLY_ACK`.
const PROTOCOL_FEATURES: u64 = 1 << 30;
const REPLY_ACK: u64 = 1 << 3;
/// `VHOST_USER_PROTOCOL_F_INFLIGHT_SHMFD`.
const INFLIGHT_SHMFD: u64 = 1 << 12;
/// Guest memory of each queue, for its ring and its requests.
pub(crate) const AREA_BYTES: u64 = 0x1_0000;
/// Size of the message body that describes an in-flight log.
const LOG_BYTES: usize = 24;

const PLAIN: u32 = Header::REQUEST;
const NEED_REPLY: u32 = Header::REQUEST_WITH_ACK;

/// The front-end.
#[derive(Debug)]
pub(crate) struct HostileFrontEnd {
    connection: FrontEnd,
}

/// A queue that the front-end started.
#[derive(Debug)]
pub(crate) struct RawQueue {
    pub view: MemoryView,
    pub layout: RingLayout,
    pub kick: OwnedFd,
    _call: OwnedFd,
}

impl HostileFrontEnd {
    pub fn connect(path: &Path) -> io::Result<Self> {
        Ok(Self { connection: FrontEnd::connect(path, PATIENCE)? })
    }

    /// Negotiates replies that report whether a message succeeded.
    pub fn negotiate_acks(&self) -> io::Result<()> {
        self.send(code::SET_PROTOCOL_FEATURES, PLAIN, &REPLY_ACK.to_ne_bytes(), &[])?;
        self.send(code::SET_FEATURES, PLAIN, &(FEATURES | PROTOCOL_FEATURES).to_ne_bytes(), &[])?;
        self.barrier()
    }

    /// Starts a queue without requests, in its own memory. The server starts the queue at the last message.
    pub fn start_queue(&self) -> io::Result<RawQueue> {
        self.start_queues(1)?.pop().ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Starts this many queues in one memory, each with its own area.
    pub fn start_queues(&self, count: u16) -> io::Result<Vec<RawQueue>> {
        self.send(code::SET_OWNER, PLAIN, &[], &[])?;
        self.send(code::SET_FEATURES, PLAIN, &FEATURES.to_ne_bytes(), &[])?;
        let view = self.share_memory()?;
        (0..count).map(|index| self.start(&view, index)).collect()
    }

    /// Negotiates an in-flight log and shares memory, but starts no queue.
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
        let mut reply = self.connection.ask(code::GET_INFLIGHT_FD, &wanted).map_err(failed)?;
        let log = reply.fds.pop().ok_or(io::ErrorKind::NotFound)?;
        self.send(code::SET_INFLIGHT_FD, PLAIN, &reply.body, &[log.as_fd()])?;
        let queue = self.start(view, 0)?;
        self.send(code::SET_VRING_ENABLE, PLAIN, &vring_state(0, 1), &[])?;
        Ok(queue)
    }

    /// Stops queue 0; returns when it has stopped.
    pub fn stop_queue(&self) -> io::Result<()> {
        self.send(code::GET_VRING_BASE, PLAIN, &vring_state(0, 0), &[])?;
        self.receive().map(drop)
    }

    fn share_memory(&self) -> io::Result<MemoryView> {
        let region = Region::from_memfd(GuestAddress(0), MEMORY_BYTES).map_err(io::Error::other)?;
        self.send_table(&region)?;
        let memory = GuestMemory::new(vec![Arc::new(region)]).map_err(io::Error::other)?;
        Ok(MemoryView::new(Arc::new(memory)))
    }

    fn start(&self, view: &MemoryView, index: u16) -> io::Result<RawQueue> {
        let area = AREA_BYTES * u64::from(index);
        let layout = RingLayout {
            queue_size: QUEUE_SIZE,
            descriptors: GuestAddress(area),
            avail: GuestAddress(area + 0x8000),
            used: GuestAddress(area + 0xa000),
        };
        let fd = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let (kick, call) = (fd()?, fd()?);
        self.send(code::SET_VRING_NUM, PLAIN, &vring_state(index, QUEUE_SIZE.into()), &[])?;
        self.send(code::SET_VRING_BASE, PLAIN, &vring_state(index, 0), &[])?;
        self.send(code::SET_VRING_ADDR, PLAIN, &addresses(index, &layout), &[])?;
        let of = u64::from(index).to_ne_bytes();
        self.send(code::SET_VRING_CALL, PLAIN, &of, &[call.as_fd()])?;
        self.send(code::SET_VRING_KICK, PLAIN, &of, &[kick.as_fd()])?;
        self.barrier()?;
        Ok(RawQueue { view: view.clone(), layout, kick, _call: call })
    }

    /// Sends a queue's memory table again. Returns when the server has switched to it.
    pub fn announce_memory(&self, view: &MemoryView) -> io::Result<()> {
        let regions = view.memory().regions();
        regions.iter().try_for_each(|region| self.send_table(region))?;
        self.barrier()
    }

    /// Sends a memory table of one region.
    fn send_table(&self, region: &Region) -> io::Result<()> {
        let spec = region.spec();
        let region_spec = MemoryRegion {
            guest_addr: spec.guest_addr.raw_value(),
            size_bytes: spec.size_bytes,
            user_addr: 0,
            file_offset_bytes: spec.file_offset_bytes,
        };
        let table = memory_table([region_spec].into_iter());
        self.send(code::SET_MEM_TABLE, PLAIN, &table, &[region.fd().as_fd()])
    }

    /// Sends an invalid message that does not end the session. Returns true if the server refused it.
    pub fn nonsense(&self) -> io::Result<bool> {
        self.send(code::SET_VRING_NUM, NEED_REPLY, &vring_state(0, 3), &[])?;
        Ok(self.receive()? != 0)
    }

    /// Waits until the server has processed all earlier messages.
    fn barrier(&self) -> io::Result<()> {
        self.send(code::GET_FEATURES, PLAIN, &[], &[])?;
        self.receive().map(drop)
    }

    fn send(&self, code: u32, flags: u32, body: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.connection.send(code, flags, body, fds).map_err(failed)
    }

    /// Receives a reply whose body is a number.
    fn receive(&self) -> io::Result<u64> {
        Ok(self.connection.receive().map_err(failed)?.u64())
    }
}

fn failed(error: FrameError) -> io::Error {
    match error {
        FrameError::Io(error) => error,
        other => io::Error::other(other),
    }
}

fn addresses(index: u16, layout: &RingLayout) -> Vec<u8> {
    let [descriptors, used, avail] =
        [layout.descriptors, layout.used, layout.avail].map(|place| place.raw_value());
    vring_addresses(index, descriptors, used, avail)
}
