//! The contract of an engine: it owns an op and its memory from `push` until the op's completion.
//!
//! `push → submit → kernel → reap → Completion` (`wait` sleeps in between)
//!
//! - Completions arrive in any order. The engine does not order ops in flight: a flush covers only writes whose
//!   completions were reaped before the flush was pushed.
//! - A successful completion means that the whole op was carried out. The engine resumes short transfers, and a read
//!   that reaches the end of the file fails instead of returning zeroes.
//!
//! `core/` has the code that engines share. `virtio_blk` defines the meaning of requests.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use disk_image::{Alignment, Backing, CheckedRange, Image};
use guest_mem::{GuestMemory, IoVecs};
use rustix::io::Errno;

/// The index of an attached file in the engine's file table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileId(pub(crate) u32);

/// A file for an engine to use.
#[derive(Clone, Debug)]
pub struct FileSpec {
    /// What holds the data. It stays open until it is detached and the engine no longer uses it.
    pub backing: Backing,
    /// Alignment that the kernel requires of memory and offsets: `(1, 1)` unless the file is open with `O_DIRECT`.
    pub alignment: Alignment,
}

impl FileSpec {
    /// The image's backing and alignment.
    #[must_use]
    pub fn of(image: &Image) -> Self {
        Self { backing: image.backing().clone(), alignment: image.alignment() }
    }

    /// A file of this host.
    #[must_use]
    pub fn of_file(file: Arc<File>, alignment: Alignment) -> Self {
        Self { backing: Backing::File(file), alignment }
    }

    /// The open file, for an engine that makes system calls on it.
    ///
    /// # Errors
    /// [`io::ErrorKind::Unsupported`] for a disk on another machine.
    pub fn file(&self) -> io::Result<&Arc<File>> {
        let unsupported =
            || io::Error::new(io::ErrorKind::Unsupported, "the disk is not a file of this host");
        self.backing.file().ok_or_else(unsupported)
    }
}

/// The guarantee of a completed write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// Visible to every reader, but may be lost in a power failure.
    Cached,
    /// On stable storage (by `RWF_DSYNC`, or by `fdatasync` if the call has no such flag).
    Durable,
}

/// Whether zeroing may free the blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unmap {
    /// May leave a hole (virtio 1.3 §5.2.6.2, `VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP`).
    Allowed,
    /// The blocks stay allocated.
    Forbidden,
}

/// The operation and its range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpKind {
    /// Reads from the file into the buffers.
    Read {
        /// The range in the file; it is as long as the buffers.
        range: CheckedRange,
    },
    /// Writes the buffers to the file.
    Write {
        /// The range in the file; it is as long as the buffers.
        range: CheckedRange,
        /// Whether the write must be durable on completion.
        durability: Durability,
    },
    /// `fdatasync`: makes the writes durable whose completions were reaped before the flush was pushed.
    Flush,
    /// Frees the blocks, which then read as zeroes. Fails with `EOPNOTSUPP` if the file system cannot free blocks.
    Discard {
        /// The range to free.
        range: CheckedRange,
        /// Whether the hole must be durable on completion.
        durability: Durability,
    },
    /// Makes the range read as zeroes. The engine writes zeroes if the file system has no faster way.
    WriteZeroes {
        /// The range to zero.
        range: CheckedRange,
        /// Whether the blocks may be freed.
        unmap: Unmap,
        /// Whether the zeroes must be durable on completion.
        durability: Durability,
    },
}

impl OpKind {
    /// The op's range; `None` for a flush.
    #[must_use]
    pub fn range(&self) -> Option<CheckedRange> {
        match *self {
            Self::Flush => None,
            Self::Read { range }
            | Self::Write { range, .. }
            | Self::Discard { range, .. }
            | Self::WriteZeroes { range, .. } => Some(range),
        }
    }

    /// Whether data moves between the buffers and the file.
    #[must_use]
    pub fn moves_data(&self) -> bool {
        matches!(self, Self::Read { .. } | Self::Write { .. })
    }
}

/// One operation. The engine owns it and its memory from `push` until its [`Completion`].
#[derive(Debug)]
pub struct Op {
    /// The caller's name for the op. The engine does not interpret it.
    pub token: u64,
    /// The file to operate on.
    pub file: FileId,
    /// The operation and its range.
    pub kind: OpKind,
    /// The data; empty (`IoVecs::with_capacity(0)`) for kinds without data.
    pub buffers: IoVecs,
}

/// How an op ended.
#[derive(Debug)]
pub struct Completion {
    /// The token of the op.
    pub token: u64,
    /// `Ok` if the whole op was carried out.
    pub result: Result<(), OpError>,
    /// The sync of a flush or of a durable op failed. The kernel may have dropped data, and no later sync reports that
    /// loss.
    pub sync_failed: bool,
    /// Bytes that a read stored in guest memory, counted from the start of the buffers. Valid also if the read failed.
    pub stored_bytes: u64,
    /// The op's buffers. Their contents are consumed (advanced over), but they keep their capacity and their reference
    /// to the memory.
    pub buffers: IoVecs,
}

/// Why an op failed or was carried out only in part.
// A 64-bit tag takes no extra space, because the fields behind it are as wide. A narrow tag would be packed with the
// errno, and the misaligned copies would stall on the preceding stores.
#[repr(u64)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpError {
    /// The kernel returned this errno.
    #[error("the kernel reported: {0}")]
    Errno(Errno),
    /// The file ends inside the range, because another process truncated the image.
    #[error(
        "the image ends at byte {offset_bytes}, before the end of the requested range at byte {end_bytes}"
    )]
    EndOfImage {
        /** Offset at which the file ended. */
        offset_bytes: u64,
        /** Offset at which the range ends. */
        end_bytes: u64,
    },
    /// A write moved no bytes and returned no error.
    #[error("a write at byte {offset_bytes} made no progress")]
    WriteStalled {
        /** Offset of the first byte that was not written. */
        offset_bytes: u64,
    },
    /// The tables or the compressed data of an image break its format.
    #[error("the image is damaged")]
    Damaged,
    /// Cancelled by [`Engine::cancel_all`] or [`Engine::cancel_file`]. Part of the range may have been processed.
    #[error("cancelled")]
    Cancelled,
}

/// The caller's name for a watched fd. The engine does not interpret it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WatchToken(pub u64);

/// Identifies a watch, for [`Engine::unwatch`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WatchId {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

/// An event that [`Engine::reap`] reports.
#[derive(Debug)]
pub enum Event {
    /// An op completed.
    Completed(Completion),
    /// A watched fd was written to since the last event. Several writes may merge into one event.
    Readable(WatchToken),
    /// The fd cannot be watched, or can no longer be watched. This is the watch's last event.
    WatchFailed(WatchToken, Errno),
}

/// Counters since the engine started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Ops whose data went through a bounce buffer, each counted once.
    pub bounced_ops: u64,
    /// Calls repeated after `EINTR` or `EAGAIN`.
    pub retried_calls: u64,
    /// Calls that continued after a short transfer.
    pub resumed_calls: u64,
}

/// [`Engine::batch`] of engines that do not need a different value.
pub(crate) const BATCH: usize = 32;

/// The interface of a worker's engine: it accepts ops, watches descriptors, and lets the worker sleep.
///
/// The thread that calls [`Engine::start`] must make all later calls, unless [`Engine::check_shareable`] allows several
/// threads.
pub trait Engine: Send {
    /// The engine's name and detected features, for the log.
    fn describe(&self) -> String;

    /// Starts the engine on the calling thread; another thread may have created it. Must be called once, before all
    /// other functions but `describe` and `check_shareable`.
    ///
    /// # Errors
    /// Any error of the kernel.
    fn start(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// Whether several threads may use the engine, one at a time, as placement `shared` does.
    ///
    /// # Errors
    /// [`io::ErrorKind::Unsupported`] from engines that work in the calling thread or in threads of their own, which
    /// gain nothing from sharing. `io_uring` needs the option `several_threads`.
    fn check_shareable(&self) -> io::Result<()> {
        Err(not_shareable(&self.describe()))
    }

    /// Number of further ops that `push` accepts now, over all files.
    fn room(&self) -> usize;

    /// Number of further ops on this file that `push` accepts now. Each file has a share that other files' ops cannot
    /// use.
    fn room_of(&self, _file: FileId) -> usize {
        self.room()
    }

    /// Ops that were pushed and whose completions were not yet reaped.
    fn in_flight(&self) -> usize;

    /// The most requests of one queue that the worker should push between two calls of [`Engine::submit`]. It then
    /// also publishes completions, so that the driver and the storage work meanwhile (docs/decisions/0031).
    fn batch(&self) -> usize {
        BATCH
    }

    /// Takes an op. The op may start only with [`Engine::submit`].
    ///
    /// # Errors
    /// Returns the op if its file has no room.
    ///
    /// # Panics
    /// If the file is not attached, or the buffers are not as long as the range.
    #[allow(clippy::result_large_err)] // a refused op is returned whole: nothing is allocated for it
    fn push(&mut self, op: Op) -> Result<(), Op>;

    /// Starts everything that was pushed, and the calls that [`Engine::reap`] must repeat or resume. Makes one system
    /// call per batch, none if there is nothing to start. Call it once per pass, even if no ops were pushed.
    ///
    /// # Errors
    /// Errors of the kernel that break the whole engine. Errors of single ops are in their completions.
    fn submit(&mut self) -> io::Result<()>;

    /// Appends new events. Never sleeps, and makes no system call unless the kernel flags pending work.
    fn reap(&mut self, events: &mut Vec<Event>);

    /// Starts everything pending, then sleeps until an event may have arrived or `timeout` has expired (`None`: without
    /// a limit). May return early without an event.
    ///
    /// # Errors
    /// Errors of the kernel that break the whole engine.
    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()>;

    /// Prepares a sleep on several engines at once: starts everything pending, and returns whether the caller should
    /// sleep. Until [`Engine::disarm`], [`Engine::descriptor`] becomes readable when an event may have arrived.
    ///
    /// # Errors
    /// Errors of the kernel that break the whole engine.
    fn arm(&mut self) -> io::Result<bool>;

    /// Ends the effect of `arm`. The next `reap` reports the events that arrived meanwhile.
    ///
    /// # Errors
    /// Errors of the kernel that break the whole engine.
    fn disarm(&mut self) -> io::Result<()>;

    /// Returns a duplicate of the descriptor that the engine sleeps on. While the engine is armed, poll it for reading.
    /// The caller closes the duplicate before it drops the engine.
    ///
    /// # Errors
    /// No free descriptor.
    fn descriptor(&mut self) -> io::Result<OwnedFd>;

    /// Reports writes to `fd`, an eventfd, from now on, and once now if it was written to before. The engine never
    /// reads the fd: each write is an edge. The next `submit` or `wait` arms the watch.
    ///
    /// # Errors
    /// Errors of the kernel. Some arrive only later, as [`Event::WatchFailed`].
    fn watch(&mut self, fd: Arc<OwnedFd>, token: WatchToken) -> io::Result<WatchId>;

    /// Watches a descriptor of this process, such as another engine's [`Engine::descriptor`]. The engine keeps such a
    /// watch however often its poll ends. On other descriptors, an engine ends a watch whose poll keeps ending, because
    /// the watch would cause a busy loop.
    ///
    /// # Errors
    /// As for [`Engine::watch`].
    fn watch_own(&mut self, fd: Arc<OwnedFd>, token: WatchToken) -> io::Result<WatchId> {
        self.watch(fd, token)
    }

    /// Ends a watch. Later calls of `reap` report no events for it.
    fn unwatch(&mut self, id: WatchId);

    /// Cancels all ops that can be cancelled. Every op still completes, many with [`OpError::Cancelled`].
    fn cancel_all(&mut self);

    /// Cancels the ops of one file, as [`Engine::cancel_all`] does.
    fn cancel_file(&mut self, file: FileId);

    /// Adds a file.
    ///
    /// # Errors
    /// Errors of the kernel, and [`io::ErrorKind::Unsupported`] from an engine that does not support such a file.
    fn attach_file(&mut self, spec: FileSpec) -> io::Result<FileId>;

    /// Removes a file, and closes it unless other references exist.
    ///
    /// # Panics
    /// If ops on the file are in flight, or the file is not attached.
    fn detach_file(&mut self, file: FileId);

    /// Tells the engine that all files belong to one disk, which opened its image several times. The files then have no
    /// reserves. Must be called before the first file is attached.
    fn serve_one_disk(&mut self) {}

    /// Announces ops whose buffers are in `memory`, so that the engine can prepare it. Ops also work without this. Each
    /// announcement must be withdrawn once.
    fn use_memory(&mut self, _memory: &Arc<GuestMemory>) {}

    /// Withdraws one announcement. No op on `memory` may be in flight.
    fn forget_memory(&mut self, _memory: &Arc<GuestMemory>) {}

    /// Counters since the start.
    fn stats(&self) -> Stats;

    /// Whether the engine must keep running although no queue of its worker uses it. The worker then keeps the engine.
    fn keeps_running(&self) -> bool {
        false
    }

    /// Whether the engine may need its worker although none of the worker's ops is in flight. The worker then always
    /// includes the engine's descriptor when it sleeps.
    fn wakes_when_idle(&self) -> bool {
        false
    }

    /// The time by which the worker must call `submit` even without events. `wait` returns by then.
    fn due(&self) -> Option<Instant> {
        None
    }

    /// Amount of work without an event since this function was last called: calls that continued an op, and ops of
    /// other workers.
    fn take_unseen_work(&mut self) -> usize {
        0
    }
}

/// Why an engine cannot be shared.
pub(crate) fn not_shareable(engine: &str) -> io::Error {
    let text = format!("placement shared needs io_uring or linux-aio, not {engine}");
    io::Error::new(io::ErrorKind::Unsupported, text)
}
