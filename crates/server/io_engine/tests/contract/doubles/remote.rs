//! A backend whose results come from another thread, like those of a client library for networked storage.
//!
//! `queue → submit: channel → the peer's thread → channel, eventfd → pop`
//!
//! The worker sleeps on an epoll descriptor with two kinds of descriptors in it: watched kicks, and the eventfd that
//! the peer writes. The peer cannot write durably, so the core adds syncs.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use io_engine::{
    Buffers, Call, EpollWatcher, Event, FileSpec, IoBackend, QueueFull, RawResult, Target, Verb, WatchId,
    WatchToken,
};
use rustix::event::{EventfdFlags, eventfd};

struct Request {
    user_data: u64,
    fd: RawFd,
    call: Call,
}

// SAFETY: 1. `IoBackend::queue` promises that buffers and file stay until the result was popped, for every thread.
unsafe impl Send for Request {}

pub struct Remote {
    /// Dropped before `peer`, because dropping it ends the peer's thread.
    to_peer: Option<Sender<Request>>,
    peer: Option<JoinHandle<()>>,
    from_peer: Receiver<RawResult>,
    queued: Vec<Request>,
    results: VecDeque<RawResult>,
    budget: usize,
    watcher: EpollWatcher,
    files: Vec<Option<Arc<File>>>,
}

impl Remote {
    pub fn new() -> io::Result<Self> {
        let (to_peer, requests) = channel::<Request>();
        let (answers, from_peer) = channel();
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let mut watcher = EpollWatcher::new()?;
        watcher.add_waker(&wake)?;
        let peer = std::thread::spawn(move || {
            for Request { user_data, fd, call } in requests {
                // SAFETY: 1. as `Request` says.
                let result = unsafe { carry_out(fd, &call) };
                // Sends the result before the wake-up, so that the worker finds the result when it wakes.
                let _ = answers.send(RawResult { user_data, result });
                let _ = rustix::io::write(&wake, &1_u64.to_ne_bytes());
            }
        });
        Ok(Self {
            to_peer: Some(to_peer),
            peer: Some(peer),
            from_peer,
            queued: Vec::new(),
            results: VecDeque::new(),
            budget: 0,
            watcher,
            files: Vec::new(),
        })
    }

    fn collect(&mut self) {
        self.results.extend(self.from_peer.try_iter());
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.to_peer = None;
        if let Some(peer) = self.peer.take() {
            let _ = peer.join();
        }
    }
}

impl IoBackend for Remote {
    fn describe(&self) -> String {
        "remote: a peer on another thread".to_owned()
    }

    fn has_durable_writes(&self, _target: Target) -> bool {
        false
    }

    fn register_file(&mut self, index: u32, spec: &FileSpec) -> io::Result<Target> {
        let index = index as usize;
        if index >= self.files.len() {
            self.files.resize(index + 1, None);
        }
        self.files[index] = Some(Arc::clone(spec.file()?));
        Ok(Target::Fd(spec.file()?.as_raw_fd()))
    }

    fn unregister_file(&mut self, index: u32, _target: Target) {
        self.files[index as usize] = None;
    }

    unsafe fn queue(&mut self, user_data: u64, target: Target, call: &Call) -> Result<(), QueueFull> {
        let Target::Fd(fd) = target else { unreachable!("`register_file` names files by descriptor") };
        self.queued.push(Request { user_data, fd, call: *call });
        Ok(())
    }

    fn submit(&mut self) -> io::Result<()> {
        let Some(to_peer) = &self.to_peer else { return Err(io::ErrorKind::BrokenPipe.into()) };
        for request in self.queued.drain(..) {
            to_peer.send(request).map_err(|_| io::ErrorKind::BrokenPipe)?;
        }
        Ok(())
    }

    fn begin_reap(&mut self) {
        self.collect();
        if !self.watcher.is_idle() {
            let _ = self.watcher.wait(Some(Duration::ZERO));
        }
        self.budget = self.results.len();
    }

    fn pop(&mut self) -> Option<RawResult> {
        self.budget = self.budget.checked_sub(1)?;
        self.results.pop_front()
    }

    fn take_ready(&mut self, events: &mut Vec<Event>) {
        self.watcher.take_ready(events);
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        let may_sleep = self.arm()?;
        self.watcher.wait(if may_sleep { timeout } else { Some(Duration::ZERO) })
    }

    fn arm(&mut self) -> io::Result<bool> {
        self.submit()?;
        self.collect();
        Ok(self.results.is_empty())
    }

    fn disarm(&mut self) -> io::Result<()> {
        self.watcher.wait(Some(Duration::ZERO))
    }

    fn descriptor(&mut self) -> io::Result<BorrowedFd<'_>> {
        Ok(self.watcher.fd())
    }

    /// The peer cannot cancel calls, so the result arrives as usual.
    fn cancel(&mut self, _user_data: u64) {}

    fn watch(&mut self, fd: Arc<OwnedFd>, token: WatchToken) -> io::Result<WatchId> {
        self.watcher.watch(fd, token)
    }

    fn unwatch(&mut self, id: WatchId) {
        self.watcher.unwatch(id);
    }
}

/// # Safety
/// Like [`IoBackend::queue`].
unsafe fn carry_out(fd: RawFd, call: &Call) -> i32 {
    let one;
    let (first, count) = match call.buffers {
        Buffers::None => (std::ptr::null(), 0),
        Buffers::One { base, len_bytes } => {
            one = libc::iovec { iov_base: base.cast(), iov_len: len_bytes as usize };
            (&raw const one, 1)
        }
        Buffers::Many { first, count } => (first, count as i32),
    };
    let (offset, length) = (call.offset_bytes as i64, call.len_bytes as i64);
    let result = match call.verb {
        // SAFETY: 1. array and buffers: the caller guarantees them, and `one` lives until the end.
        Verb::Read => unsafe { libc::preadv(fd, first, count, offset) },
        // SAFETY: as above.
        Verb::Write => unsafe { libc::pwritev(fd, first, count, offset) },
        // SAFETY: 1. no memory is involved.
        Verb::Sync => unsafe { libc::fdatasync(fd) as isize },
        // SAFETY: 1. no memory is involved.
        Verb::Allocate => unsafe { libc::fallocate(fd, call.flags, offset, length) as isize },
        Verb::Discard => unreachable!("the bed's image is a file of this host"),
    };
    if result < 0 { -io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO) } else { result as i32 }
}
