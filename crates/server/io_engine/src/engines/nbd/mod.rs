//! The engine `nbd`: exports of NBD servers.
//!
//! `call → request in its file's connection → submit: one sendmsg per connection → recvmsg → result`
//!
//! - Each file has a connection of its own; `connection.rs` sends and receives, `nbd_client` knows the protocol.
//! - The worker sleeps on an epoll set with all sockets, and on a timer while requests are in flight.
//! - A worker never connects: a thread does, and hands over the socket.

mod connection;
mod pieces;
mod socket;

use std::collections::VecDeque;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use disk_image::Backing;
use nbd_client::Link;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

use self::connection::{Connection, Scratch};
use crate::backend::{Call, IoBackend, QueueFull, RawResult, Target};
use crate::config::EngineConfig;
use crate::core::Core;
use crate::engine::{Event, FileSpec, WatchId, WatchToken};
use crate::engines::epoll::EpollWatcher;

/// The unit of time in which requests without a reply are counted.
const TICK: Duration = Duration::from_millis(250);

/// The amount of work after which a pass looks at the watched descriptors although it does not sleep.
const LOOK_AFTER: usize = 64;

/// The engine for exports of NBD servers.
pub type NbdEngine = Core<NbdBackend>;

impl NbdEngine {
    /// Makes an engine.
    ///
    /// # Errors
    /// Errors of `epoll_create1` and `timerfd_create`.
    pub fn new(config: &EngineConfig) -> io::Result<Self> {
        Ok(Self::over(NbdBackend::new()?, config))
    }
}

/// The backend of [`NbdEngine`].
pub struct NbdBackend {
    files: Vec<Option<Connection>>,
    /// Files with requests to send.
    to_send: Vec<u32>,
    scratch: Scratch,
    results: VecDeque<RawResult>,
    budget: usize,
    /// Passes and results since the watched descriptors were last looked at.
    work: usize,
    watcher: EpollWatcher,
    timer: OwnedFd,
    /// The end of the current tick; `None`: nothing is in flight.
    tick_ends: Option<Instant>,
}

impl std::fmt::Debug for NbdBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NbdBackend").field("results", &self.results.len()).finish_non_exhaustive()
    }
}

impl NbdBackend {
    fn new() -> io::Result<Self> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        let mut watcher = EpollWatcher::new()?;
        watcher.add_waker(&timer)?;
        Ok(Self {
            files: Vec::new(),
            to_send: Vec::new(),
            scratch: Scratch::new(),
            results: VecDeque::new(),
            budget: 0,
            work: 0,
            watcher,
            timer,
            tick_ends: None,
        })
    }

    fn send_all(&mut self) {
        for index in self.to_send.drain(..) {
            if let Some(Some(file)) = self.files.get_mut(index as usize) {
                file.send(&mut self.scratch, &mut self.watcher, &mut self.results);
            }
        }
    }

    fn receive_all(&mut self) {
        self.watcher.forget_woken();
        self.pass_time();
        for file in self.files.iter_mut().flatten() {
            if file.link().has_news() && file.take_news(&mut self.watcher).is_err() {
                file.lose("no memory for the set of descriptors");
            }
            if file.in_flight() > 0 {
                file.receive(&mut self.scratch, &mut self.results);
                file.send(&mut self.scratch, &mut self.watcher, &mut self.results);
            }
        }
    }

    /// Ends the current tick if it is over.
    fn pass_time(&mut self) {
        if self.tick_ends.is_some_and(|end| Instant::now() >= end) {
            self.tick_ends = None;
            for file in self.files.iter_mut().flatten() {
                file.on_tick(&mut self.results);
            }
        }
    }

    /// Sets the timer for the end of the tick, while requests are in flight.
    fn keep_time(&mut self) -> io::Result<()> {
        if self.tick_ends.is_some() || !self.files.iter().flatten().any(|file| file.in_flight() > 0) {
            return Ok(());
        }
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        let it_value = Timespec::try_from(TICK).map_err(io::Error::other)?;
        let once = Itimerspec { it_interval: zero, it_value };
        timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &once)?;
        self.tick_ends = Some(Instant::now() + TICK);
        Ok(())
    }

    fn may_sleep(&self) -> bool {
        self.results.is_empty()
            && !self.watcher.is_woken()
            && !self.files.iter().flatten().any(Connection::has_work)
    }

    fn file(&mut self, index: u32) -> &mut Connection {
        match self.files.get_mut(index as usize) {
            Some(Some(file)) => file,
            _ => unreachable!("only calls on registered files are queued"),
        }
    }
}

impl IoBackend for NbdBackend {
    fn describe(&self) -> String {
        "nbd: exports of NBD servers".to_owned()
    }

    fn has_durable_writes(&self, target: Target) -> bool {
        let Target::Registered(index) = target else { return false };
        let file = self.files.get(index as usize).and_then(Option::as_ref);
        file.is_some_and(|file| file.link().export().info().has_fua())
    }

    fn register_file(&mut self, index: u32, spec: &FileSpec) -> io::Result<Target> {
        let Backing::Nbd(export) = &spec.backing else {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "the disk is no export of an NBD server"));
        };
        let link = Link::attach(export)?;
        self.watcher.add_waker(link.wake_fd())?;
        let timeout_ticks = export.request_timeout().as_millis().div_ceil(TICK.as_millis());
        let mut file = Connection::new(link, u64::try_from(timeout_ticks).unwrap_or(u64::MAX));
        let _ = file.link().has_news();
        file.take_news(&mut self.watcher)?;
        file.connect();
        let place = index as usize;
        if place >= self.files.len() {
            self.files.resize_with(place + 1, || None);
        }
        self.files[place] = Some(file);
        self.to_send.reserve(self.files.len());
        Ok(Target::Registered(index))
    }

    fn unregister_file(&mut self, index: u32, _target: Target) {
        self.to_send.retain(|other| *other != index);
        if let Some(file) = self.files.get_mut(index as usize).and_then(Option::take) {
            file.close(&mut self.watcher);
        }
    }

    fn expect(&mut self, _disks: u32, calls: u32) {
        self.results.reserve((calls as usize).saturating_sub(self.results.len()));
    }

    unsafe fn queue(&mut self, user_data: u64, target: Target, call: &Call) -> Result<(), QueueFull> {
        let Target::Registered(index) = target else { unreachable!("files are known by their index") };
        let file = self.file(index);
        // SAFETY: 1. the caller guarantees the buffers until the result was popped.
        if let Some(result) = unsafe { file.queue(user_data, call) } {
            self.results.push_back(RawResult { user_data, result });
        } else if self.to_send.last() != Some(&index) && !self.to_send.contains(&index) {
            self.to_send.push(index);
        }
        Ok(())
    }

    fn submit(&mut self) -> io::Result<()> {
        self.send_all();
        self.keep_time()
    }

    fn begin_reap(&mut self) {
        if self.work >= LOOK_AFTER && !self.watcher.is_idle() {
            self.work = 0;
            // Before the sockets are read, because this also takes their events. If an error persists, `wait` reports it.
            let _ = self.watcher.wait(Some(Duration::ZERO));
        }
        self.receive_all();
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
        Ok(self.may_sleep())
    }

    fn disarm(&mut self) -> io::Result<()> {
        self.watcher.wait(Some(Duration::ZERO))
    }

    fn descriptor(&mut self) -> io::Result<BorrowedFd<'_>> {
        Ok(self.watcher.fd())
    }

    fn cancel(&mut self, user_data: u64) {
        let Self { files, results, .. } = self;
        files.iter_mut().flatten().for_each(|file| file.cancel(user_data, results));
    }

    fn watch(&mut self, fd: Arc<OwnedFd>, token: WatchToken) -> io::Result<WatchId> {
        self.watcher.watch(fd, token)
    }

    fn unwatch(&mut self, id: WatchId) {
        self.watcher.unwatch(id);
    }
}
