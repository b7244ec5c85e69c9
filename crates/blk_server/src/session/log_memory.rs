//! The shared memory of the in-flight logs: made for a front-end, which keeps it, and taken back from one.
//!
//! `GET_INFLIGHT_FD → sealed memory → front-end … a server dies … SET_INFLIGHT_FD → checked, mapped → queues' logs`
//!
//! - Whoever connects may send any file of any size: no more of it is mapped than the logs need, and a file that is
//!   truncated later ends its session, like guest memory (`guest_mem`). The memory that we make cannot be.
//! - Nothing is written here: a queue begins its log when it starts.
//! - A log belongs to its rings: what a running one has in flight, or holds, is in the one with which it started, and
//!   nowhere else. So another log is refused until the rings are stopped; the same one again changes nothing.
//!
//! Spec: vhost-user, "Inflight description". Not here: what is in the logs (`virtqueue`).

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use guest_mem::{GuestAddress, GuestMemory, MapError, MemoryError, Region, RegionSpec};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use vhost::vhost_user::message::VhostUserInflight;
use virtqueue::{LogArea, MAX_QUEUE_SIZE, MIN_QUEUE_SIZE};
use vm_memory::ByteValued;

use super::wire::Message;
use super::{Answer, Result, Session, SessionError, expect_fds};

/// A log's fields lie in words of 64 bits.
const ALIGN_BYTES: u64 = 8;
/// What the message's last field but padding ends with; some peers send the padding.
const FIELDS_BYTES: usize = 20;

/// Why there is no such memory.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LogMemoryError {
    #[error("in-flight log for {queues} queues, this disk has 1 to {max}")]
    Queues { queues: u16, max: u16 },
    #[error("in-flight log for queues of {queue_size} descriptors, {min} to {max} are possible")]
    QueueSize { queue_size: u16, min: u16, max: u16 },
    #[error(
        "in-flight log of {mmap_bytes} bytes, {needed_bytes} are needed for {queues} queues of {queue_size}"
    )]
    TooSmall { mmap_bytes: u64, needed_bytes: u64, queues: u16, queue_size: u16 },
    #[error(
        "in-flight log begins at byte {offset_bytes} of its file, which is not a multiple of {ALIGN_BYTES}"
    )]
    Misaligned { offset_bytes: u64 },
    #[error("in-flight log cannot be mapped")]
    Map(#[from] MapError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(
        "another in-flight log while queue {queue} runs: what it has in flight is in the one it started with; stop \
         it first (GET_VRING_BASE)"
    )]
    Running { queue: usize },
    #[error("memory for an in-flight log of {bytes} bytes cannot be had")]
    Make { bytes: u64, source: io::Error },
}

/// The logs of a session's queues.
pub(super) struct LogMemory {
    memory: Arc<GuestMemory>,
    /// As the front-end said it.
    said: VhostUserInflight,
}

impl LogMemory {
    /// Of one queue.
    pub(super) fn area(&self, queue: u16) -> LogArea {
        LogArea::new(Arc::clone(&self.memory), queue, self.said.queue_size)
    }

    pub(super) fn said(&self) -> &VhostUserInflight {
        &self.said
    }

    pub(super) fn fd(&self) -> Option<&Arc<OwnedFd>> {
        self.memory.regions().first().map(|region| region.fd())
    }

    fn is_same(&self, said: &VhostUserInflight, fd: impl AsFd) -> bool {
        let region = self.memory.regions().first();
        self.said.queue_size == said.queue_size
            && region.is_some_and(|region| region.is_same(&spec(said), fd))
    }
}

impl Session {
    /// GET_INFLIGHT_FD: new memory. It counts when the front-end gives it back.
    pub(super) fn get_inflight_fd(&self, message: &Message) -> Result<Answer> {
        let asked = self.checked(message)?;
        let (num_queues, queue_size) = (asked.num_queues, asked.queue_size);
        // The larger of the two layouts, as long as nobody knows which it will be.
        let packed = self.negotiated.is_none_or(|negotiated| negotiated.ring().packed);
        let bytes = LogArea::bytes(num_queues, queue_size, packed);
        let fd = sealed_memory(bytes).map_err(|source| LogMemoryError::Make { bytes, source })?;
        let answer = VhostUserInflight { mmap_size: bytes, mmap_offset: 0, num_queues, queue_size };
        Ok(Answer::Log(answer, fd))
    }

    /// SET_INFLIGHT_FD: the logs of all rings, before they start.
    pub(super) fn set_inflight_fd(&mut self, mut message: Message) -> Result<Answer> {
        expect_fds(&message, 1)?;
        let said = self.checked(&message)?;
        let packed = self.negotiated.is_some_and(|negotiated| negotiated.ring().packed);
        let Some(fd) = message.fds.pop() else { return Ok(Answer::Ack) };
        if let Some(queue) = self.vrings.iter().position(|vring| vring.running.is_some()) {
            let is_same = self.log.as_ref().is_some_and(|log| log.is_same(&said, &fd));
            return if is_same { Ok(Answer::Ack) } else { Err(LogMemoryError::Running { queue }.into()) };
        }
        self.log = Some(map(&said, packed, fd)?);
        self.reconcile_all()
    }

    fn checked(&self, message: &Message) -> Result<VhostUserInflight> {
        let (request, bytes, wanted) = (message.request, message.body.len(), size_of::<VhostUserInflight>());
        if bytes != wanted && bytes != FIELDS_BYTES {
            return Err(SessionError::BodySize { request, bytes, wanted });
        }
        let mut said = VhostUserInflight::default();
        said.as_mut_slice()[..bytes].copy_from_slice(&message.body);
        check(&said, self.disk.queues())?;
        Ok(said)
    }
}

/// `most`: queues that the disk has.
pub(super) fn check(said: &VhostUserInflight, most: u16) -> Result<(), LogMemoryError> {
    let (queues, queue_size) = (said.num_queues, said.queue_size);
    if !(1..=most).contains(&queues) {
        return Err(LogMemoryError::Queues { queues, max: most });
    }
    let (min, max) = (MIN_QUEUE_SIZE, MAX_QUEUE_SIZE);
    if !(min..=max).contains(&queue_size) {
        return Err(LogMemoryError::QueueSize { queue_size, min, max });
    }
    Ok(())
}

/// `packed`: known to be; the format may be negotiated later.
pub(super) fn map(said: &VhostUserInflight, packed: bool, fd: OwnedFd) -> Result<LogMemory, LogMemoryError> {
    let (mmap_bytes, offset_bytes) = (said.mmap_size, said.mmap_offset);
    let (queues, queue_size) = (said.num_queues, said.queue_size);
    let needed_bytes = LogArea::bytes(queues, queue_size, packed);
    if mmap_bytes < needed_bytes {
        return Err(LogMemoryError::TooSmall { mmap_bytes, needed_bytes, queues, queue_size });
    }
    if !offset_bytes.is_multiple_of(ALIGN_BYTES) {
        return Err(LogMemoryError::Misaligned { offset_bytes });
    }
    let region = Arc::new(Region::map(spec(said), Arc::new(fd))?);
    Ok(LogMemory { memory: Arc::new(GuestMemory::new(vec![region])?), said: *said })
}

/// No more of the file than logs need.
fn spec(said: &VhostUserInflight) -> RegionSpec {
    RegionSpec {
        guest_addr: GuestAddress(0),
        size_bytes: said.mmap_size.min(LogArea::bytes(said.num_queues, said.queue_size, true)),
        user_addr: 0,
        file_offset_bytes: said.mmap_offset,
    }
}

/// Nobody can change its size any more.
fn sealed_memory(bytes: u64) -> io::Result<OwnedFd> {
    let fd = memfd_create("bareblk-in-flight", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&fd, bytes)?;
    fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(fd)
}
