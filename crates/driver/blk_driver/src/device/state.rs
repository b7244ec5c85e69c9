//! The state of a device's thread, and its actions with and without a back-end.

use std::io;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::mpsc::{Receiver, SyncSender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags};

use super::connect::Session;
use super::events::Events;
use super::info::{DeviceInfo, Event};
use super::options::Options;
use crate::error::MemoryError;
use crate::kick::EventFd;
use crate::memory::{MemoryMap, UserMemory};
use crate::queue::link::QueueLink;
use vhost_user::wait;

/// A user's request to the thread; the thread sends the answer into the channel.
#[derive(Debug)]
pub(super) enum Command {
    Register(UserMemory, SyncSender<Result<(), MemoryError>>),
    Unregister(u64, SyncSender<Result<(), MemoryError>>),
}

/// State that the thread and its device share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) events: Events,
    info: Mutex<DeviceInfo>,
    /// 0 if unknown.
    peer_pid: AtomicI32,
    /// Stays readable once the device is dropped.
    pub(super) stop: Arc<EventFd>,
    /// Commands and queues ring this eventfd to wake the thread.
    pub(super) notice: Arc<EventFd>,
}

impl Shared {
    pub(super) fn new(stop: Arc<EventFd>, session: &Session) -> io::Result<Self> {
        let (events, notice) = (Events::new()?, Arc::new(EventFd::new()?));
        let info = Mutex::new(session.info.clone());
        let shared = Self { events, info, peer_pid: AtomicI32::new(0), stop, notice };
        shared.note_peer(session);
        Ok(shared)
    }

    pub(super) fn info(&self) -> DeviceInfo {
        self.info.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn peer_pid(&self) -> Option<i32> {
        // Relaxed: the value is independent of all other memory.
        Some(self.peer_pid.load(Ordering::Relaxed)).filter(|&pid| pid > 0)
    }

    /// Uses `nix`, because `rustix`'s process id cannot be 0, which the kernel returns for a peer in another
    /// container.
    pub(super) fn note_peer(&self, session: &Session) {
        let peer =
            nix::sys::socket::getsockopt(&session.socket(), nix::sys::socket::sockopt::PeerCredentials);
        self.peer_pid.store(peer.map_or(0, |peer| peer.pid()), Ordering::Relaxed);
    }

    /// Stores `info`, and sends an event if it differs from the previous one.
    pub(super) fn set_info(&self, info: &DeviceInfo) {
        let mut known = self.info.lock().unwrap_or_else(PoisonError::into_inner);
        if *known != *info {
            known.clone_from(info);
            self.events.push(Event::ConfigChanged(info.clone()));
        }
    }
}

/// The thread's state, which `thread.rs` and `reconnect.rs` share.
#[derive(Debug)]
pub(super) struct Thread {
    pub(super) options: Options,
    pub(super) shared: Arc<Shared>,
    pub(super) map: Arc<MemoryMap>,
    pub(super) links: Vec<Arc<QueueLink>>,
    pub(super) commands: Receiver<Command>,
    /// The back-end signals it if it cannot continue with a queue.
    pub(super) err: EventFd,
}

impl Thread {
    /// Tells all queues that no back-end will follow, which ends everything in flight.
    pub(super) fn give_up(&self) {
        self.links.iter().for_each(|link| link.gone());
    }

    /// Withdraws memory: requests cannot refer to it any more, and the next back-end does not get it.
    pub(super) fn withdraw(&self, addr: u64) -> Result<Arc<guest_mem::Region>, MemoryError> {
        let region = self.map.remove(addr)?;
        self.map.close(addr);
        Ok(region)
    }

    /// Handles a command while no back-end is connected; the next back-end gets every region when it connects.
    pub(super) fn execute_without_back_end(&self, command: Command) {
        match command {
            Command::Register(memory, answer) => {
                let added = self.map.add_user(memory).map(|region| self.map.open(&region));
                let _ = answer.send(added);
            }
            Command::Unregister(addr, answer) => {
                let _ = answer.send(self.withdraw(addr).map(drop));
            }
        }
    }

    /// Sleeps until `due` and handles users' commands with `execute`; returns whether to stop.
    pub(super) fn pause_until(&self, due: Instant, execute: impl Fn(Command)) -> bool {
        loop {
            while let Ok(command) = self.commands.try_recv() {
                execute(command);
            }
            let (stop, notice) = (&*self.shared.stop, &*self.shared.notice);
            let mut fds = [PollFd::new(stop, PollFlags::IN), PollFd::new(notice, PollFlags::IN)];
            let ready = wait(&mut fds, Some(due));
            if ready.is_err() || !fds[0].revents().is_empty() {
                return true;
            }
            if matches!(ready, Ok(0)) {
                return false;
            }
            notice.clear();
        }
    }
}
