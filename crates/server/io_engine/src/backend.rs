//! What an engine needs of the thing below it: queue calls, submit them, hand out results, watch fds, sleep.
//!
//! `core.rs` holds all the logic (op table, resuming, bouncing) and is generic over this trait, so that
//! the fake's faults happen under the same code that runs in production.
//!
//! Not here: any implementation (`io_uring.rs`, `linux_aio.rs`, `posix_aio.rs`, `threads.rs`, `sync.rs`, `mmap.rs`,
//! `fake.rs`).

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use guest_mem::GuestMemory;

use crate::engine::{Event, FileSpec, WatchId, WatchToken};
use crate::record::Verb;

/// Data of one call, as the kernel takes it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Buffers {
    None,
    /// Cheaper than an array of one.
    One {
        base: *mut u8,
        len_bytes: u32,
    },
    Many {
        first: *const libc::iovec,
        count: u32,
    },
}

/// One call to the kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    pub verb: Verb,
    /// `RWF_*` for reads and writes, the mode for `fallocate`.
    pub flags: i32,
    pub offset_bytes: u64,
    pub len_bytes: u64,
    pub buffers: Buffers,
}

/// How a file is named in a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// By its place in a table: the kernel's of registered files, or the implementation's own.
    Registered(u32),
    Fd(RawFd),
}

/// What became of one call: bytes, 0, or a negated errno.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawResult {
    pub user_data: u64,
    pub result: i32,
}

/// The submission queue has no room before the next `submit`.
#[derive(Debug)]
pub(crate) struct QueueFull;

pub(crate) trait Kernel: Send {
    /// Called once, on the thread that makes all later calls.
    fn enable(&mut self) -> io::Result<()>;

    /// Whether a write can be made durable by its own call (`RWF_DSYNC`). Where not, a sync follows it.
    fn has_durable_writes(&self) -> bool {
        true
    }

    /// Makes the file known under `index`. An error: this kernel can do nothing with such a file.
    fn register_file(&mut self, index: u32, spec: &FileSpec) -> io::Result<Target>;

    /// Nothing on it is in flight any more.
    fn unregister_file(&mut self, index: u32, target: Target);

    /// Files of so many disks are there, and so many calls may be in flight at once: more than the depth, with many
    /// disks.
    fn expect(&mut self, _disks: u32, _calls: u32) {}

    /// All files are one disk's: none keeps anything from the others. Called before the first.
    fn serve_one_disk(&mut self) {}

    /// Ops will come whose buffers lie in `memory`.
    fn use_memory(&mut self, _memory: &Arc<GuestMemory>) {}

    /// No more of them come, and none are in flight.
    fn forget_memory(&mut self, _memory: &Arc<GuestMemory>) {}

    /// Takes a call, to be started by the next `submit` or `wait`.
    ///
    /// # Safety
    /// What `call.buffers` points to must stay allocated, and nobody but the kernel may rely on its
    /// contents, until the result for `user_data` was popped. The file must stay open as long.
    unsafe fn queue(&mut self, user_data: u64, target: Target, call: &Call) -> Result<(), QueueFull>;

    /// Starts what is queued. Without an effect on what the kernel cannot take now: it stays queued.
    fn submit(&mut self) -> io::Result<()>;

    /// Marks the results that are there now as those that `pop` hands out.
    fn begin_reap(&mut self);

    fn pop(&mut self) -> Option<RawResult>;

    /// Appends the watches that fired, each once.
    fn take_ready(&mut self, events: &mut Vec<Event>);

    /// Starts what is queued, then sleeps until a result or a ready watch may be there.
    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()>;

    /// Starts what is queued. Whether to sleep now: `descriptor` then becomes readable when a result or a ready watch
    /// may be there, until `disarm`.
    fn arm(&mut self) -> io::Result<bool>;

    /// Ends what `arm` began, and takes in what happened.
    fn disarm(&mut self) -> io::Result<()>;

    /// What this kernel sleeps on.
    fn descriptor(&mut self) -> io::Result<BorrowedFd<'_>>;

    /// Asks the kernel to give up a call; its result still comes.
    fn cancel(&mut self, user_data: u64);

    fn watch(&mut self, fd: Arc<OwnedFd>, token: WatchToken) -> io::Result<WatchId>;

    /// The same, for a descriptor that may be ready at all times.
    fn watch_own(&mut self, fd: Arc<OwnedFd>, token: WatchToken) -> io::Result<WatchId> {
        self.watch(fd, token)
    }

    fn unwatch(&mut self, id: WatchId);
}
