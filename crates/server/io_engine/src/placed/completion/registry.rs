//! The participants of a `completion` placement, and which of them owns the engine.
//!
//! - A participant reads the registry only after a change: a worker or a file was added or removed, or the owner
//!   changed. The thread that changes it increments a counter and wakes all participants.
//! - The owner is the requested worker if it participates, otherwise the first. A replaced owner takes no new ops and
//!   waits until its engine is empty, while new ops wait in their rings. Then it returns its ring ends to the registry,
//!   and the next owner takes them.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use rtrb::Consumer;

use super::files::Files;
use super::policy::HandOver;
use crate::engine::{FileId, Op};
use crate::placed::epoll_wait::WorkerWaker;
use crate::placed::group;
use crate::placed::routed_engine::Outlet;

/// The owner's ends of the two rings between it and a participant.
pub(super) struct Channel {
    pub participant: u64,
    pub ops: Consumer<Op>,
    pub outlet: Outlet,
    /// Number of ops at the ring's front whose file may be in `cancelled`.
    pub to_check: usize,
    pub cancelled: Vec<FileId>,
}

impl Channel {
    pub fn new(participant: u64, ops: Consumer<Op>, outlet: Outlet) -> Self {
        Self { participant, ops, outlet, to_check: 0, cancelled: Vec::new() }
    }

    /// Whether the channel's participant has left and has no ops in the engine.
    pub fn has_left(&self) -> bool {
        self.outlet.gone && self.outlet.inside == 0
    }
}

/// A participant.
pub(super) struct Entry {
    pub id: u64,
    pub worker: u32,
    pub waker: Arc<WorkerWaker>,
    /// The owner's ring ends, while there is no owner.
    pub channel: Option<Channel>,
    pub gone: bool,
    /// The participant failed to make an engine. It is skipped until the operator requests a worker.
    pub unable: bool,
    /// Files whose ops the owner must cancel.
    pub cancelled: Vec<FileId>,
}

impl Entry {
    pub fn new(id: u64, worker: u32, waker: Arc<WorkerWaker>, channel: Channel) -> Self {
        Self { id, worker, waker, channel: Some(channel), gone: false, unable: false, cancelled: Vec::new() }
    }
}

#[derive(Default)]
pub(super) struct Registry {
    /// The requested completion worker.
    pub wanted: Option<u32>,
    /// The disk's name for the log, if no caller waits for the change to `wanted`. The change then has a time limit.
    pub limited: Option<Box<str>>,
    /// The participant that owns the engine.
    pub owner: Option<u64>,
    pub list: Vec<Entry>,
    pub files: Files,
    pub next_id: u64,
}

impl Registry {
    pub fn entry(&mut self, id: u64) -> Option<&mut Entry> {
        self.list.iter_mut().find(|entry| entry.id == id)
    }

    /// The participant that should own the engine.
    pub fn wanted_owner(&self) -> Option<u64> {
        let able = || self.list.iter().filter(|entry| !entry.gone && !entry.unable);
        let asked_for = able().find(|entry| Some(entry.worker) == self.wanted);
        let present = || able().find(|entry| Some(entry.id) == self.owner);
        asked_for.or_else(present).or_else(|| able().next()).map(|entry| entry.id)
    }

    /// The current owner's worker, if the participant `id` on `worker` must become the owner within a time limit.
    pub fn limited_by_owner(&self, id: u64, worker: u32) -> Option<u32> {
        let waits = self.limited.is_some() && self.wanted == Some(worker) && self.wanted_owner() == Some(id);
        let owner = self.list.iter().find(|entry| Some(entry.id) == self.owner);
        owner.filter(|owner| waits && owner.id != id).map(|owner| owner.worker)
    }

    /// Lets all participants try again to make an engine. Returns the one that should own it.
    pub fn retry_all(&mut self) -> Option<u64> {
        self.list.iter_mut().for_each(|entry| entry.unable = false);
        self.wanted_owner()
    }

    pub fn owner_waker(&mut self) -> Option<Arc<WorkerWaker>> {
        let owner = self.owner?;
        self.entry(owner).map(|entry| Arc::clone(&entry.waker))
    }

    /// Takes back the ring ends of an owner that stops, for the next owner.
    pub fn take_back(&mut self, channels: Vec<Option<Channel>>) {
        for mut channel in channels.into_iter().flatten() {
            if channel.outlet.gone {
                self.remove(channel.participant);
            } else if let Some(entry) = self.entry(channel.participant) {
                // The kernel never completed these ops.
                channel.outlet.inside = 0;
                entry.channel = Some(channel);
            }
        }
        // Participants that left after the owner last read the registry.
        let gone: Vec<_> = self.list.iter().filter(|entry| entry.gone).map(|entry| entry.id).collect();
        gone.into_iter().for_each(|id| self.remove(id));
        self.files.free_released(|_| ());
    }

    /// Removes a participant and releases its files.
    pub fn remove(&mut self, id: u64) {
        self.files.release_all(id);
        self.list.retain(|entry| entry.id != id);
    }
}

impl group::Registry for Registry {
    fn participants(&self) -> usize {
        self.list.iter().filter(|entry| !entry.gone).count()
    }

    fn wakers(&self) -> impl Iterator<Item = &Arc<WorkerWaker>> {
        self.list.iter().map(|entry| &entry.waker)
    }
}

/// State that only `completion` has.
pub(super) struct Own {
    pub policy: HandOver,
    /// Number of ops in the owner's engine when the owner last went to sleep. A hint.
    pub busy: AtomicUsize,
}

pub(super) type Group = group::Group<Registry, Own>;
