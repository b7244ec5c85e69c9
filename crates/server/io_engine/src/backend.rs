//! The interface between `Core` and the code that makes the system calls.
//!
//! `Core` holds the logic that all engines share (op table, resuming, bouncing) and is generic over this trait. Faults
//! that the fake injects therefore test the production core.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use guest_mem::GuestMemory;

use crate::engine::{BATCH, Event, FileSpec, WatchId, WatchToken, not_shareable};

/// The system call, or the io_uring opcode for it.
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
    /// Frees the range of a disk on another machine. Its contents are undefined afterwards.
    Discard,
}

/// The data of one call.
#[derive(Clone, Copy, Debug)]
pub enum Buffers {
    /// The call moves no data.
    None,
    /// One buffer: cheaper than an array with one entry.
    One {
        /// Address of the buffer's first byte.
        base: *mut u8,
        /// Length of the buffer.
        len_bytes: u32,
    },
    /// Several buffers.
    Many {
        /// The first entry of the array.
        first: *const libc::iovec,
        /// Number of entries.
        count: u32,
    },
}

/// One call.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    /// The system call.
    pub verb: Verb,
    /// `RWF_*` for reads and writes, the mode for `fallocate`.
    pub flags: i32,
    /// Offset in the file.
    pub offset_bytes: u64,
    /// Length of the range in the file.
    pub len_bytes: u64,
    /// The call's buffers. Shorter than `len_bytes` if one call cannot take all of them.
    pub buffers: Buffers,
}

/// How a call names its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// The file's index in the kernel's table of registered files or in the backend's own table.
    Registered(u32),
    /// The file's descriptor.
    Fd(RawFd),
}

/// The result of one call.
#[derive(Clone, Copy, Debug)]
pub struct RawResult {
    /// The `user_data` of the call.
    pub user_data: u64,
    /// A byte count, 0, or a negated errno.
    pub result: i32,
}

/// The backend has no room: until the next `submit`, or until it ends a `wait`.
#[derive(Debug)]
pub struct QueueFull;

/// A backend makes the calls of an engine: through the kernel, through threads, or through a peer behind a socket.
pub trait IoBackend: Send {
    /// The backend's name and detected features, for the log.
    fn describe(&self) -> String;

    /// Starts the backend on the thread that will make all later calls. Called once.
    ///
    /// # Errors
    /// Any error of the kernel.
    fn start(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// Whether several threads may make the later calls, one at a time.
    ///
    /// # Errors
    /// As for [`Engine::check_shareable`](crate::Engine::check_shareable).
    fn check_shareable(&self) -> io::Result<()> {
        Err(not_shareable(&self.describe()))
    }

    /// See [`Engine::batch`](crate::Engine::batch).
    fn batch(&self) -> usize {
        BATCH
    }

    /// Whether a write's own call can make it durable (`RWF_DSYNC`). Otherwise a sync follows the write.
    fn has_durable_writes(&self, _target: Target) -> bool {
        true
    }

    /// Registers the file as `index`.
    ///
    /// # Errors
    /// The backend does not support such a file.
    fn register_file(&mut self, index: u32, spec: &FileSpec) -> io::Result<Target>;

    /// Releases a file without calls in flight.
    fn unregister_file(&mut self, index: u32, target: Target);

    /// Announces the number of disks with files in this backend, and the largest number of calls in flight, which
    /// exceeds the depth if there are many disks.
    fn expect(&mut self, _disks: u32, _calls: u32) {}

    /// Says that all files belong to one disk and need no reserves. Called before the first file.
    fn serve_one_disk(&mut self) {}

    /// Announces ops whose buffers are in `memory`.
    fn use_memory(&mut self, _memory: &Arc<GuestMemory>) {}

    /// Withdraws an announcement. No op on `memory` is in flight, and none will follow.
    fn forget_memory(&mut self, _memory: &Arc<GuestMemory>) {}

    /// Queues a call. The next `submit` or `wait` starts it.
    ///
    /// # Errors
    /// [`QueueFull`]; the call was not queued.
    ///
    /// # Safety
    /// Until `pop` has returned the result for `user_data`, the memory that `call.buffers` points to must stay
    /// allocated, its contents belong to the backend, and the file must stay open.
    unsafe fn queue(&mut self, user_data: u64, target: Target, call: &Call) -> Result<(), QueueFull>;

    /// Starts the queued calls. Calls that the kernel cannot accept now stay queued.
    ///
    /// # Errors
    /// The backend as a whole is broken.
    fn submit(&mut self) -> io::Result<()>;

    /// Fixes the set of results that `pop` returns: those that are available now.
    fn begin_reap(&mut self);

    /// Returns the next result of the set that `begin_reap` fixed.
    fn pop(&mut self) -> Option<RawResult>;

    /// Appends one event for each watch that fired.
    fn take_ready(&mut self, events: &mut Vec<Event>);

    /// Starts the queued calls, then sleeps until a result or a ready watch may be available.
    ///
    /// # Errors
    /// The backend as a whole is broken.
    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()>;

    /// Starts the queued calls, and returns whether to sleep now. Until `disarm`, `descriptor` becomes readable when a
    /// result or a ready watch may be available.
    ///
    /// # Errors
    /// The backend as a whole is broken.
    fn arm(&mut self) -> io::Result<bool>;

    /// Ends the effect of `arm`, and collects the events that arrived meanwhile.
    ///
    /// # Errors
    /// The backend as a whole is broken.
    fn disarm(&mut self) -> io::Result<()>;

    /// The descriptor that the backend sleeps on.
    ///
    /// # Errors
    /// No free descriptor.
    fn descriptor(&mut self) -> io::Result<BorrowedFd<'_>>;

    /// Requests the cancellation of a call. Its result still arrives.
    fn cancel(&mut self, user_data: u64);

    /// Reports writes to `fd` through `take_ready`, as [`Engine::watch`](crate::Engine::watch) describes.
    ///
    /// # Errors
    /// Errors of the kernel.
    fn watch(&mut self, fd: Arc<OwnedFd>, token: WatchToken) -> io::Result<WatchId>;

    /// Watches a descriptor that may be permanently ready.
    ///
    /// # Errors
    /// As for [`IoBackend::watch`].
    fn watch_own(&mut self, fd: Arc<OwnedFd>, token: WatchToken) -> io::Result<WatchId> {
        self.watch(fd, token)
    }

    /// Ends a watch.
    fn unwatch(&mut self, id: WatchId);
}
