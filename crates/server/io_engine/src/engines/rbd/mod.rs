//! The engine `rbd`: images in a Ceph cluster, through librbd.
//!
//! `call → submit: librbd copies or queues it → librbd's threads → the lane's list and eventfd → result`
//!
//! - librbd checks no range against the image's size: it cuts a write at the end silently. So this engine does.
//! - librbd cannot cancel a request, and queues without limit while the cluster does not answer. So the bytes in flight of
//!   each image are limited, for all its workers together: a call that finds no room waits in the core, and the image's
//!   descriptor wakes the worker when there is room.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use disk_image::Backing;
use rbd_client::{Lane, RbdImage, Request, Reservation};
use rustix::io::Errno;

use crate::backend::{Buffers, Call, IoBackend, QueueFull, RawResult, Target, Verb};
use crate::config::EngineConfig;
use crate::core::Core;
use crate::engine::{Event, FileSpec, WatchId, WatchToken};
use crate::engines::epoll::EpollWatcher;

/// The amount of work after which a pass looks at the watched descriptors although it does not sleep.
const LOOK_AFTER: usize = 64;

/// The engine for images in a Ceph cluster.
pub type RbdEngine = Core<RbdBackend>;

impl RbdEngine {
    /// Makes an engine.
    ///
    /// # Errors
    /// Errors of `epoll_create1` and `eventfd`.
    pub fn new(config: &EngineConfig) -> io::Result<Self> {
        Ok(Self::over(RbdBackend::new()?, config))
    }
}

/// A call that was not submitted yet.
struct Queued {
    user_data: u64,
    reservation: Reservation,
    call: Call,
}

// SAFETY: 1. `IoBackend::queue` promises that the buffers stay until the result was popped, for every thread.
unsafe impl Send for Queued {}

/// The backend of [`RbdEngine`].
pub struct RbdBackend {
    files: Vec<Option<Arc<RbdImage>>>,
    queued: Vec<Queued>,
    /// The requests in flight, with their files.
    lane: Lane,
    results: VecDeque<RawResult>,
    budget: usize,
    work: usize,
    watcher: EpollWatcher,
}

impl std::fmt::Debug for RbdBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RbdBackend").field("in_flight", &self.lane.in_flight()).finish_non_exhaustive()
    }
}

impl RbdBackend {
    fn new() -> io::Result<Self> {
        let lane = Lane::new()?;
        let mut watcher = EpollWatcher::new()?;
        watcher.add_waker(lane.wake_fd())?;
        let (files, queued, results) = (Vec::new(), Vec::new(), VecDeque::new());
        Ok(Self { files, queued, lane, results, budget: 0, work: 0, watcher })
    }

    fn image(&self, file: u32) -> &Arc<RbdImage> {
        match self.files.get(file as usize) {
            Some(Some(image)) => image,
            _ => unreachable!("only calls on registered files are queued"),
        }
    }

    /// Whether a file is this image.
    fn uses(&self, image: &Arc<RbdImage>) -> bool {
        self.files.iter().flatten().any(|other| Arc::ptr_eq(other, image))
    }

    fn start(&mut self, queued: Queued) {
        let Queued { user_data, reservation, call } = queued;
        if let Some(result) = check(reservation.image(), &call) {
            return self.results.push_back(RawResult { user_data, result });
        }
        let one;
        let (first, count) = match call.buffers {
            Buffers::None => (std::ptr::null(), 0),
            Buffers::One { base, len_bytes } => {
                one = libc::iovec { iov_base: base.cast(), iov_len: len_bytes as usize };
                (&raw const one, 1)
            }
            Buffers::Many { first, count } => (first, count),
        };
        let len_bytes = call.len_bytes;
        let request = match call.verb {
            Verb::Read => Request::Read(first, count),
            Verb::Write => Request::Write(first, count),
            Verb::Sync => Request::Flush,
            Verb::Discard => Request::Discard(len_bytes),
            Verb::Allocate => {
                Request::WriteZeroes { len_bytes, keep: call.flags & libc::FALLOC_FL_PUNCH_HOLE == 0 }
            }
        };
        // SAFETY: 1. array and pieces: the contract of `queue`, and `one` lives until the call returns.
        let started = unsafe { self.lane.submit(reservation, user_data, call.offset_bytes, &request) };
        if let Err(error) = started {
            let errno = error.raw_os_error().unwrap_or(libc::EIO);
            self.results.push_back(RawResult { user_data, result: -errno });
        }
    }

    fn collect(&mut self) {
        self.watcher.forget_woken();
        let results = &mut self.results;
        self.lane.collect(|user_data, result| {
            let result = i32::try_from(result).unwrap_or(i32::MAX);
            results.push_back(RawResult { user_data, result });
        });
    }
}

/// The result of a call that must not reach librbd: one that goes beyond the image's end now, or any after the cluster has
/// refused this client, because the cluster forgets that after a while.
fn check(image: &RbdImage, call: &Call) -> Option<i32> {
    if image.is_refused() {
        return Some(-Errno::IO.raw_os_error());
    }
    let end_bytes = call.offset_bytes.saturating_add(call.len_bytes);
    if end_bytes <= image.size_bytes() {
        return None;
    }
    // As for a file that another process has cut: a read moves nothing, and the core reports the end.
    Some(if call.verb == Verb::Read { 0 } else { -Errno::IO.raw_os_error() })
}

impl IoBackend for RbdBackend {
    fn describe(&self) -> String {
        "rbd: images in a Ceph cluster".to_owned()
    }

    fn has_durable_writes(&self, _target: Target) -> bool {
        false
    }

    fn register_file(&mut self, index: u32, spec: &FileSpec) -> io::Result<Target> {
        let Backing::Rbd(image) = &spec.backing else {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "the disk is no RBD image"));
        };
        if !self.uses(image) {
            self.watcher.add_waker(image.room_fd())?;
        }
        let place = index as usize;
        if place >= self.files.len() {
            self.files.resize(place + 1, None);
        }
        self.files[place] = Some(Arc::clone(image));
        Ok(Target::Registered(index))
    }

    fn unregister_file(&mut self, index: u32, _target: Target) {
        if let Some(image) = self.files[index as usize].take()
            && !self.uses(&image)
        {
            self.watcher.remove_socket(image.room_fd());
        }
    }

    fn expect(&mut self, _disks: u32, calls: u32) {
        self.results.reserve((calls as usize).saturating_sub(self.results.len()));
        self.queued.reserve((calls as usize).saturating_sub(self.queued.len()));
    }

    unsafe fn queue(&mut self, user_data: u64, target: Target, call: &Call) -> Result<(), QueueFull> {
        let Target::Registered(file) = target else { unreachable!("files are known by their index") };
        let moved_bytes = if matches!(call.buffers, Buffers::None) { 0 } else { call.len_bytes };
        let reservation = self.image(file).reserve(moved_bytes).ok_or(QueueFull)?;
        self.queued.push(Queued { user_data, reservation, call: *call });
        Ok(())
    }

    fn submit(&mut self) -> io::Result<()> {
        let mut queued = std::mem::take(&mut self.queued);
        for call in queued.drain(..) {
            self.start(call);
        }
        self.queued = queued;
        Ok(())
    }

    fn begin_reap(&mut self) {
        if self.work >= LOOK_AFTER && !self.watcher.is_idle() {
            self.work = 0;
            // If an error persists, `wait` reports it.
            let _ = self.watcher.wait(Some(Duration::ZERO));
        }
        self.collect();
        self.budget = self.results.len();
        self.work = self.work.saturating_add(1 + self.budget);
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
        Ok(self.results.is_empty() && !self.watcher.is_woken())
    }

    fn disarm(&mut self) -> io::Result<()> {
        self.watcher.wait(Some(Duration::ZERO))
    }

    fn descriptor(&mut self) -> io::Result<BorrowedFd<'_>> {
        Ok(self.watcher.fd())
    }

    /// librbd cannot cancel requests. One that was not submitted yet ends at once.
    fn cancel(&mut self, user_data: u64) {
        if let Some(at) = self.queued.iter().position(|queued| queued.user_data == user_data) {
            self.queued.remove(at);
            self.results.push_back(RawResult { user_data, result: -Errno::CANCELED.raw_os_error() });
        }
    }

    fn watch(&mut self, fd: Arc<OwnedFd>, token: WatchToken) -> io::Result<WatchId> {
        self.watcher.watch(fd, token)
    }

    fn unwatch(&mut self, id: WatchId) {
        self.watcher.unwatch(id);
    }
}
