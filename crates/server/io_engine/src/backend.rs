//! What an engine needs of the thing below it: queue calls, submit them, return results, watch descriptors, sleep.
//!
//! `Core` holds the logic that all engines share (op table, resuming, bouncing) and is generic over this trait. The fake's
//! faults therefore happen under the code that runs in production.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use guest_mem::GuestMemory;

use crate::engine::{Event, FileSpec, WatchId, WatchToken, not_shareable};

/// Which system call (or its io_uring opcode).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// `preadv2`.
    Read,
    /// `pwritev2`.
    Write,
    /// `fdatasync`.
    Sync,
    /// `fallocate`.
    Allocate,
}

/// The data of one call.
#[derive(Clone, Copy, Debug)]
pub enum Buffers {
    /// The call moves no data.
    None,
    /// One piece, which is cheaper than an array of one.
    One {
        /// Where it starts.
        base: *mut u8,
        /// Its length.
        len_bytes: u32,
    },
    /// Several pieces.
    Many {
        /// The array.
        first: *const libc::iovec,
        /// Its length.
        count: u32,
    },
}

/// One call.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    /// What to do.
    pub verb: Verb,
    /// `RWF_*` for reads and writes, the mode for `fallocate`.
    pub flags: i32,
    /// Where in the file.
    pub offset_bytes: u64,
    /// How much of the file.
    pub len_bytes: u64,
    /// Where the data goes or comes from. Shorter than `len_bytes` if one call does not take all pieces.
    pub buffers: Buffers,
}

/// How a call names its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// By its place in a table: the kernel's table of registered files, or the backend's own.
    Registered(u32),
    /// By its descriptor.
    Fd(RawFd),
}

/// The result of one call.
#[derive(Clone, Copy, Debug)]
pub struct RawResult {
    /// The call's.
    pub user_data: u64,
    /// Bytes, 0, or a negated errno.
    pub result: i32,
}

/// The submission queue has no room before the next `submit`.
#[derive(Debug)]
pub struct QueueFull;

/// What makes the calls of an engine: the kernel, threads, or a peer behind a socket.
pub trait IoBackend: Send {
    /// What it is and what it found, for the log.
    fn describe(&self) -> String;

    /// Called once, on the thread that makes all later calls.
    ///
    /// # Errors
    /// The kernel's.
    fn start(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// Whether several threads may make the later calls, one at a time.
    ///
    /// # Errors
    /// As [`Engine::check_shareable`](crate::Engine::check_shareable).
    fn check_shareable(&self) -> io::Result<()> {
        Err(not_shareable(&self.describe()))
    }

    /// Whether a write can be made durable by its own call (`RWF_DSYNC`). Where not, a sync follows it.
    fn has_durable_writes(&self) -> bool {
        true
    }

    /// Makes the file known under `index`.
    ///
    /// # Errors
    /// The backend can do nothing with such a file.
    fn register_file(&mut self, index: u32, spec: &FileSpec) -> io::Result<Target>;

    /// Lets go of a file that has no call in flight.
    fn unregister_file(&mut self, index: u32, target: Target);

    /// Says how many disks have files here, and how many calls may be in flight at once: with many disks, more than the
    /// depth.
    fn expect(&mut self, _disks: u32, _calls: u32) {}

    /// Says that all files belong to one disk, so that none keeps a reserve from the others. Called before the first.
    fn serve_one_disk(&mut self) {}

    /// Announces ops whose buffers lie in `memory`.
    fn use_memory(&mut self, _memory: &Arc<GuestMemory>) {}

    /// Says that no more of them come, and none are in flight.
    fn forget_memory(&mut self, _memory: &Arc<GuestMemory>) {}

    /// Takes a call, to be started by the next `submit` or `wait`.
    ///
    /// # Errors
    /// [`QueueFull`]; the call was not taken.
    ///
    /// # Safety
    /// The memory that `call.buffers` points to must stay allocated, and only the backend may rely on its contents, until
    /// `pop` returned the result for `user_data`. The file must stay open as long.
    unsafe fn queue(&mut self, user_data: u64, target: Target, call: &Call) -> Result<(), QueueFull>;

    /// Starts what is queued. What the kernel cannot take now stays queued.
    ///
    /// # Errors
    /// The backend as a whole is broken.
    fn submit(&mut self) -> io::Result<()>;

    /// Marks the results that are there now as those that `pop` returns.
    fn begin_reap(&mut self);

    /// The next of those results.
    fn pop(&mut self) -> Option<RawResult>;

    /// Appends the watches that fired, each once.
    fn take_ready(&mut self, events: &mut Vec<Event>);

    /// Starts what is queued, then sleeps until a result or a ready watch may be there.
    ///
    /// # Errors
    /// The backend as a whole is broken.
    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()>;

    /// Starts what is queued, and returns whether to sleep now. Until `disarm`, `descriptor` becomes readable when a result
    /// or a ready watch may be there.
    ///
    /// # Errors
    /// The backend as a whole is broken.
    fn arm(&mut self) -> io::Result<bool>;

    /// Ends what `arm` began, and takes in what happened.
    ///
    /// # Errors
    /// The backend as a whole is broken.
    fn disarm(&mut self) -> io::Result<()>;

    /// The descriptor that the backend sleeps on.
    ///
    /// # Errors
    /// Out of descriptors.
    fn descriptor(&mut self) -> io::Result<BorrowedFd<'_>>;

    /// Asks to give up a call; its result still comes.
    fn cancel(&mut self, user_data: u64);

    /// Reports writes to `fd` by `take_ready`, as [`Engine::watch`](crate::Engine::watch) says.
    ///
    /// # Errors
    /// The kernel's.
    fn watch(&mut self, fd: Arc<OwnedFd>, token: WatchToken) -> io::Result<WatchId>;

    /// Watches a descriptor that may be ready at all times.
    ///
    /// # Errors
    /// As [`IoBackend::watch`].
    fn watch_own(&mut self, fd: Arc<OwnedFd>, token: WatchToken) -> io::Result<WatchId> {
        self.watch(fd, token)
    }

    /// Ends a watch.
    fn unwatch(&mut self, id: WatchId);
}
