//! The shared memory of the in-flight logs. The server creates it; the front-end keeps it and passes it to the next
//! server.
//!
//! `GET_INFLIGHT_FD → sealed memory → front-end … a server dies … SET_INFLIGHT_FD → checked, mapped → queues' logs`
//!
//! - A front-end may send a file of any size. The server maps only what the logs need. If another process later
//!   truncates the file, the session ends, as with guest memory (`guest_mem`). Memory that the server created is sealed
//!   and cannot be truncated.
//! - This file writes nothing into a log: a queue begins its log when it starts.
//! - A front-end requests the log before its guest chooses the ring sizes, so it may request too little. The server
//!   makes each log large enough for the disk's longest ring (docs/decisions/0042). A ring that is longer than its log
//!   runs without one.
//! - A running ring records its requests only in the log with which it started. The session therefore refuses another
//!   log until the rings are stopped. If the front-end passes the same log again, the session accepts it and changes
//!   nothing.
//!
//! Spec: vhost-user, "Inflight description". The logs' content is in `virtqueue`.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use guest_mem::{GuestAddress, GuestMemory, MapError, MemoryError, PassedFd, Region, RegionSpec};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use vhost::vhost_user::message::VhostUserInflight;
use virtqueue::{LogArea, MAX_QUEUE_SIZE, MIN_QUEUE_SIZE};

/// A log's fields are 64-bit words.
const ALIGN_BYTES: u64 = 8;

/// Why a log's memory cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LogMemoryError {
    #[error("in-flight log is for {queues} queues; 1 to {max} are allowed")]
    Queues { queues: u16, max: u16 },
    #[error("in-flight log is for queues of {queue_size} descriptors; {min} to {max} are allowed")]
    QueueSize { queue_size: u16, min: u16, max: u16 },
    #[error(
        "in-flight log has {mmap_bytes} bytes, but {needed_bytes} are needed for {queues} queues of \
         {queue_size}"
    )]
    TooSmall { mmap_bytes: u64, needed_bytes: u64, queues: u16, queue_size: u16 },
    #[error(
        "in-flight log begins at byte {offset_bytes} of its file, which is not a multiple of {ALIGN_BYTES}"
    )]
    Misaligned { offset_bytes: u64 },
    #[error("cannot map the in-flight log")]
    Map(#[from] MapError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(
        "the in-flight log cannot be replaced while queue {queue} runs, because it records that queue's requests; \
         stop the queue first (GET_VRING_BASE)"
    )]
    Running { queue: usize },
    #[error("cannot create the memory of an in-flight log of {bytes} bytes")]
    Make { bytes: u64, source: io::Error },
}

/// Extra bytes that mark a roomy log. The size of each queue's log is a multiple of 64 bytes, so no server creates a
/// tight log with such a size.
const ROOMY_MARK_BYTES: u64 = 8;

/// The number of logs, and of entries in each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LogLayout {
    pub(super) queues: u16,
    /// Entries of each queue's log. A longer ring runs without a log.
    pub(super) entries: u16,
}

impl LogLayout {
    /// The layout with the number of entries that the front-end requested. Earlier servers used this layout, and so do
    /// front-ends that create the memory themselves.
    fn tight(queues: u16, queue_size: u16) -> Self {
        Self { queues, entries: queue_size }
    }

    /// The layout with room for rings of up to `longest` descriptors, in either format.
    fn roomy(queues: u16, longest: u16) -> Self {
        Self { queues, entries: longest.next_power_of_two() }
    }

    /// The layout of memory of this size. Only the size tells the layouts apart: front-ends pass the memory back
    /// unchanged, with the queue size of their first request.
    fn of_memory(mmap_bytes: u64, queues: u16, queue_size: u16) -> Self {
        let sizes =
            (0..u16::BITS).map(|bit| 1 << bit).filter(|&size| (queue_size..=MAX_QUEUE_SIZE).contains(&size));
        let mut roomy = sizes.map(|size| Self::roomy(queues, size));
        roomy.find(|layout| layout.roomy_bytes() == mmap_bytes).unwrap_or(Self::tight(queues, queue_size))
    }

    fn roomy_bytes(self) -> u64 {
        self.bytes(true) + ROOMY_MARK_BYTES
    }

    fn bytes(self, packed: bool) -> u64 {
        LogArea::bytes(self.queues, self.entries, packed)
    }
}

/// The logs of a session's queues.
pub(super) struct LogMemory {
    memory: Arc<GuestMemory>,
    layout: LogLayout,
    /// The size that the front-end sent.
    pub(super) mmap_bytes: u64,
    pub(super) offset_bytes: u64,
}

impl LogMemory {
    /// The log of one queue; `None` if it does not fit.
    pub(super) fn area(&self, queue: u16, queue_size: u16, packed: bool) -> Option<LogArea> {
        let LogLayout { queues, entries } = self.layout;
        let end_bytes = LogArea::bytes(queue.saturating_add(1), entries, packed);
        let has_room = queue < queues && queue_size <= entries && end_bytes <= self.mmap_bytes;
        has_room.then(|| LogArea::new(Arc::clone(&self.memory), queue, entries))
    }

    pub(super) fn layout(&self) -> LogLayout {
        self.layout
    }

    pub(super) fn fd(&self) -> Option<&Arc<OwnedFd>> {
        self.memory.regions().first().map(|region| region.fd())
    }

    pub(super) fn is_same(&self, said: &VhostUserInflight, fd: impl AsFd) -> bool {
        let (region, layout) = (self.memory.regions().first(), layout(said));
        self.layout == layout && region.is_some_and(|region| region.is_same(&spec(said, layout), fd))
    }
}

/// `most`: the disk's number of queues.
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

/// `packed`: whether the ring format is known to be packed. The format may still be negotiated later.
pub(super) fn map(said: &VhostUserInflight, packed: bool, fd: PassedFd) -> Result<LogMemory, LogMemoryError> {
    let (mmap_bytes, offset_bytes) = (said.mmap_size, said.mmap_offset);
    let (queues, queue_size, layout) = (said.num_queues, said.queue_size, layout(said));
    let needed_bytes = layout.bytes(packed);
    if mmap_bytes < needed_bytes {
        return Err(LogMemoryError::TooSmall { mmap_bytes, needed_bytes, queues, queue_size });
    }
    if !offset_bytes.is_multiple_of(ALIGN_BYTES) {
        return Err(LogMemoryError::Misaligned { offset_bytes });
    }
    let region = Arc::new(Region::map_passed(spec(said, layout), fd)?);
    Ok(LogMemory { memory: Arc::new(GuestMemory::new(vec![region])?), layout, mmap_bytes, offset_bytes })
}

fn layout(said: &VhostUserInflight) -> LogLayout {
    LogLayout::of_memory(said.mmap_size, said.num_queues, said.queue_size)
}

/// Maps no more of the file than the logs need.
fn spec(said: &VhostUserInflight, layout: LogLayout) -> RegionSpec {
    RegionSpec {
        guest_addr: GuestAddress(0),
        size_bytes: said.mmap_size.min(layout.bytes(true)),
        user_addr: 0,
        file_offset_bytes: said.mmap_offset,
    }
}

/// Creates memory for the logs of rings of up to `longest` descriptors. Also returns the size.
pub(super) fn roomy_memory(queues: u16, longest: u16) -> Result<(u64, OwnedFd), LogMemoryError> {
    let bytes = LogLayout::roomy(queues, longest).roomy_bytes();
    let fd = sealed_memory(bytes).map_err(|source| LogMemoryError::Make { bytes, source })?;
    Ok((bytes, fd))
}

/// Seals the size, so that no process can change it.
fn sealed_memory(bytes: u64) -> io::Result<OwnedFd> {
    let fd = memfd_create("bareblk-in-flight", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&fd, bytes)?;
    fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roomy_log_is_known_by_its_size_whatever_queue_size_was_asked_for() {
        for longest in [128, 256, 1024] {
            let made = LogLayout::roomy(4, longest);
            let read = [2, 100, 128].map(|asked| LogLayout::of_memory(made.roomy_bytes(), 4, asked));
            assert_eq!(read, [made; 3]);
        }
    }

    #[test]
    fn no_log_of_a_server_before_this_one_is_taken_for_a_roomy_one() {
        for (queues, queue_size) in [(1, 2), (1, 128), (4, 512), (3, 1000), (256, 1024)] {
            let tight = LogLayout::tight(queues, queue_size);
            for bytes in [tight.bytes(false), tight.bytes(true)] {
                assert_eq!(LogLayout::of_memory(bytes, queues, queue_size), tight);
            }
        }
    }

    #[test]
    fn memory_of_any_size_has_a_layout_with_what_was_said_at_least() {
        for mmap_bytes in (0..1 << 18).chain(u64::MAX - 100..=u64::MAX) {
            assert!(LogLayout::of_memory(mmap_bytes, 5, 77).entries >= 77);
        }
    }
}
