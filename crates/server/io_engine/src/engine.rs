//! The engine's contract: it owns an op, and with it the memory, from `push` until the op's completion.
//!
//! `push → submit → kernel → reap → Completion` (and `wait` to sleep in between)
//!
//! - Completions come in any order. Nothing orders two ops in flight: a flush covers the writes whose
//!   completions were reaped before it was pushed.
//! - A completion means that all of the op was done: the engine resumes short transfers, and a read that meets the end
//!   of the file is an error, never zeroes.
//!
//! Not here: what a request means (`virtio_blk`), what an engine shares with the others (`core/`).

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use disk_image::{Alignment, CheckedRange};
use guest_mem::{GuestMemory, IoVecs};
use rustix::io::Errno;

/// A file an engine was given, by index into the engine's file table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileId(pub(crate) u32);

/// A file to be used by an engine.
#[derive(Clone, Debug)]
pub struct FileSpec {
    /// Kept open until it is detached and the engine is done with it.
    pub file: Arc<File>,
    /// What the kernel asks of memory and offsets: `(1, 1)` unless the file is open with `O_DIRECT`.
    pub alignment: Alignment,
}

/// What a completed write promises.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// Visible to every reader; may be lost with the power.
    Cached,
    /// On stable storage (`RWF_DSYNC`, or `fdatasync` where a call has no such flag).
    Durable,
}

/// Whether zeroing may free the blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unmap {
    /// A hole is fine (virtio 1.3 §5.2.6.2, `VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP`).
    Allowed,
    /// The blocks stay allocated.
    Forbidden,
}

/// What to do, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpKind {
    /// File to buffers.
    Read {
        /// As long as the buffers.
        range: CheckedRange,
    },
    /// Buffers to file.
    Write {
        /// As long as the buffers.
        range: CheckedRange,
        /// Of this write.
        durability: Durability,
    },
    /// `fdatasync`: what was reaped as written before this was pushed becomes durable.
    Flush,
    /// Frees the blocks; they read as zeroes afterwards. `EOPNOTSUPP` where the file system cannot.
    Discard {
        /// What to free.
        range: CheckedRange,
        /// Of the hole.
        durability: Durability,
    },
    /// The range reads as zeroes afterwards; written out where the file system has no shortcut.
    WriteZeroes {
        /// What to zero.
        range: CheckedRange,
        /// Whether blocks may go.
        unmap: Unmap,
        /// Of the zeroes.
        durability: Durability,
    },
}

impl OpKind {
    /// The range, where there is one.
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

/// One operation. The engine owns it, hence the memory, from `push` until its [`Completion`].
#[derive(Debug)]
pub struct Op {
    /// The caller's name for it; not interpreted.
    pub token: u64,
    /// Where.
    pub file: FileId,
    /// What.
    pub kind: OpKind,
    /// Data; empty (`IoVecs::with_capacity(0)`) for kinds without.
    pub buffers: IoVecs,
}

/// How an op ended.
#[derive(Debug)]
pub struct Completion {
    /// The op's.
    pub token: u64,
    /// `Ok`: all of it was done.
    pub result: Result<(), OpError>,
    /// The kernel refused a sync, of a flush or at the end of something durable: what it has forgotten by now,
    /// no later sync will report.
    pub sync_failed: bool,
    /// Bytes of data that a read stored in guest memory, from the start; also when it failed.
    pub stored_bytes: u64,
    /// Given back; its contents are used up (advanced over), its capacity and its hold on the memory stay.
    pub buffers: IoVecs,
}

/// Why an op was not done, or not all of it.
// A tag of 64 bits takes no room, for the fields behind it are as wide. A narrow one would be packed together with
// the errno, and what follows be copied from odd places: each copy then waits for the stores of the last one.
#[repr(u64)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpError {
    /// The kernel refused.
    #[error("the kernel refused: {0}")]
    Errno(Errno),
    /// The file ends inside the range, because another process truncated the image.
    #[error("the file ends at byte {offset_bytes}, inside the range, which goes to byte {end_bytes}")]
    EndOfImage {
        /** Where the file ended. */
        offset_bytes: u64,
        /** Where the range ends. */
        end_bytes: u64,
    },
    /// A write moved nothing and gave no reason.
    #[error("a write at byte {offset_bytes} made no progress")]
    WriteStalled {
        /** Of the first byte that was not written. */
        offset_bytes: u64,
    },
    /// Given up by [`Engine::cancel_all`] or [`Engine::cancel_file`]; the range may be partly done.
    #[error("cancelled")]
    Cancelled,
}

/// The caller's name for a watched fd; not interpreted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WatchToken(pub u64);

/// A watched fd, to stop watching it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WatchId {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

/// Something to act on.
#[derive(Debug)]
pub enum Event {
    /// An op ended.
    Completed(Completion),
    /// A watched fd was written to since the last time; several writes may merge into one event.
    Readable(WatchToken),
    /// A watched fd cannot be watched (any longer); no more events come for it.
    WatchFailed(WatchToken, Errno),
}

/// What an engine has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Ops whose data went through a bounce buffer, each counted once.
    pub bounced_ops: u64,
    /// Calls repeated after `EINTR` or `EAGAIN`.
    pub retried_calls: u64,
    /// Calls that continued after a short transfer.
    pub resumed_calls: u64,
}

/// What a worker calls: takes ops, watches descriptors, and is where the worker sleeps.
///
/// The thread that calls [`Engine::start`] makes all later calls, except where [`Engine::check_shareable`] allows others.
pub trait Engine: Send {
    /// What it is and what it found, for the log.
    fn describe(&self) -> String;

    /// Enables the engine on the calling thread. Another thread may have made it. Called once, before all other
    /// functions but `describe` and `check_shareable`.
    ///
    /// # Errors
    /// The kernel's.
    fn start(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// Whether several threads may use the engine, one at a time, as placement `shared` does.
    ///
    /// # Errors
    /// [`io::ErrorKind::Unsupported`] from engines that do their work in the calling thread, or in threads of their own:
    /// they gain nothing by it. `io_uring` needs the option `several_threads`.
    fn check_shareable(&self) -> io::Result<()> {
        Err(not_shareable(&self.describe()))
    }

    /// How many more ops `push` takes now, on any file.
    fn room(&self) -> usize;

    /// How many more ops on this file `push` takes now. Each file has a share that no other file's ops can use.
    fn room_of(&self, _file: FileId) -> usize {
        self.room()
    }

    /// Ops pushed and not yet given back.
    fn in_flight(&self) -> usize;

    /// Takes an op; it may not start before [`Engine::submit`].
    ///
    /// # Errors
    /// The op, when there is no room for one on its file.
    ///
    /// # Panics
    /// When the file is not attached, or the buffers are not as long as the range.
    #[allow(clippy::result_large_err)] // an op that is refused goes back whole: nothing is allocated for it
    fn push(&mut self, op: Op) -> Result<(), Op>;

    /// Starts everything pushed, and calls that [`Engine::reap`] found to be repeated or resumed: one system
    /// call per batch, none if there is nothing. Call it once per pass, whether or not ops were pushed.
    ///
    /// # Errors
    /// The kernel's, when the engine as a whole is broken; ops fail one by one in their completions.
    fn submit(&mut self) -> io::Result<()>;

    /// Appends what happened. Never sleeps, and makes no system call unless the kernel flags that it has
    /// work to finish first.
    fn reap(&mut self, events: &mut Vec<Event>);

    /// Sleeps until an event may be there, or `timeout` is over (`None`: for ever, without a wake-up in
    /// between); starts everything pending first. May return early with nothing.
    ///
    /// # Errors
    /// The kernel's, when the engine as a whole is broken.
    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()>;

    /// For a caller that sleeps on several engines at once: starts everything pending, and says whether to sleep.
    /// From then until [`Engine::disarm`], [`Engine::descriptor`] is readable as soon as an event may be there.
    ///
    /// # Errors
    /// The kernel's, when the engine as a whole is broken.
    fn arm(&mut self) -> io::Result<bool>;

    /// Ends what `arm` began; the next `reap` finds what happened meanwhile.
    ///
    /// # Errors
    /// The kernel's, when the engine as a whole is broken.
    fn disarm(&mut self) -> io::Result<()>;

    /// A duplicate of the descriptor that the engine sleeps on, to be polled for reading while armed. The caller closes it
    /// before it drops the engine.
    ///
    /// # Errors
    /// Out of descriptors.
    fn descriptor(&mut self) -> io::Result<OwnedFd>;

    /// Reports writes to `fd` (an eventfd) from now on, and once now if it was written to before. The engine never reads
    /// the fd: each write is an edge. The next `submit` or `wait` arms the watch.
    ///
    /// # Errors
    /// The kernel's; some only come later, as [`Event::WatchFailed`].
    fn watch(&mut self, fd: Arc<OwnedFd>, token: WatchToken) -> io::Result<WatchId>;

    /// Watches a descriptor of our own process, such as another engine's [`Engine::descriptor`]. A poll of it may end as
    /// often as it likes; an engine gives up other descriptors whose poll keeps ending, because they cause a busy loop.
    ///
    /// # Errors
    /// As [`Engine::watch`].
    fn watch_own(&mut self, fd: Arc<OwnedFd>, token: WatchToken) -> io::Result<WatchId> {
        self.watch(fd, token)
    }

    /// Ends a watch; later calls of `reap` report nothing more for it.
    fn unwatch(&mut self, id: WatchId);

    /// Gives up the ops that can be given up; every op still completes, many as [`OpError::Cancelled`].
    fn cancel_all(&mut self);

    /// The same for the ops of one file.
    fn cancel_file(&mut self, file: FileId);

    /// Adds a file.
    ///
    /// # Errors
    /// The kernel's, and [`io::ErrorKind::Unsupported`] from an engine that cannot work on such a file.
    fn attach_file(&mut self, spec: FileSpec) -> io::Result<FileId>;

    /// Removes a file and closes it, unless others hold it open.
    ///
    /// # Panics
    /// When ops on it are in flight, or it is not attached.
    fn detach_file(&mut self, file: FileId);

    /// Says that all files belong to one disk, which opened its image several times: none of them has a reserve. Called
    /// before the first file.
    fn serve_one_disk(&mut self) {}

    /// Announces ops whose buffers lie in `memory`, so that the engine can prepare it. Ops work without it, too. Each
    /// announcement is taken back once.
    fn use_memory(&mut self, _memory: &Arc<GuestMemory>) {}

    /// Takes one announcement back, when no op on `memory` is in flight any more.
    fn forget_memory(&mut self, _memory: &Arc<GuestMemory>) {}

    /// Counters since the start.
    fn stats(&self) -> Stats;

    /// Whether the engine must run on although no queue of its worker uses it. The worker then keeps it.
    fn keeps_running(&self) -> bool {
        false
    }

    /// Whether the engine may need its worker while none of the worker's ops is in flight. The worker then always sleeps
    /// on its descriptor, too.
    fn wakes_when_idle(&self) -> bool {
        false
    }

    /// When the worker has to call `submit` at the latest, although nothing has happened. `wait` ends by then.
    fn due(&self) -> Option<Instant> {
        None
    }

    /// Work since the last call that caused no event: calls that continued an op, and ops of other workers.
    fn take_unseen_work(&mut self) -> usize {
        0
    }
}

/// Why an engine cannot be shared.
pub(crate) fn not_shareable(engine: &str) -> io::Error {
    let text = format!("placement shared needs io_uring or linux-aio, not {engine}");
    io::Error::new(io::ErrorKind::Unsupported, text)
}
