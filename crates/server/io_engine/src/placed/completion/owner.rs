//! The completion worker's side: it owns the engine and one end of each participant's rings.
//!
//! `ops ring → (file and route) → push → submit`, `reap → route → completion ring → one wake-up per participant`
//!
//! - The owner serves the rings round-robin while the engine has room. Other ops wait in their rings. A participant may
//!   have only its share of the depth in flight, so none can starve the others.
//! - A completion ring is as long as the depth, so it has room for all ops that its participant has in flight.

use std::collections::VecDeque;
use std::io;

use rustix::io::Errno;

use super::registry::{Channel, Group, Registry};
use crate::engine::{Completion, Engine, Event, FileId, FileSpec, Op, OpError};
use crate::placed::routed_engine::{OWN, RoutedEngine, put, unstarted};

/// The engine's number of a file, or the error of attaching it; `None` before the first attempt.
type Known = Option<Result<FileId, Errno>>;

pub(super) struct Owner {
    routed: RoutedEngine,
    channels: Vec<Option<Channel>>,
    files: Vec<Known>,
    /// The owner's own ops that ended outside the engine.
    ended: VecDeque<Completion>,
    /// The channel that the next round serves first.
    first: usize,
    /// Another participant will become the owner, so this one takes no more ops.
    pub retiring: bool,
    /// Other workers' ops and completions handled since `take_unseen_work`.
    served: usize,
}

impl Owner {
    /// Starts the engine. [`Owner::sync`] adds the channels.
    pub fn start(group: &Group) -> io::Result<Self> {
        Ok(Self {
            routed: RoutedEngine::start(&group.make, group.depth, false)?,
            channels: Vec::new(),
            files: Vec::new(),
            ended: VecDeque::with_capacity(group.depth as usize),
            first: 0,
            retiring: false,
            served: 0,
        })
    }

    /// Applies a change of the registry: participants, files, and ops to cancel.
    pub fn sync(&mut self, registry: &mut Registry) {
        for entry in &mut registry.list {
            if let Some(channel) = entry.channel.take() {
                put(&mut self.channels, channel);
            }
            let cancelled = std::mem::take(&mut entry.cancelled);
            if entry.gone || !cancelled.is_empty() {
                self.cancel(entry.id, entry.gone, cancelled);
            }
        }
        self.remove_gone(registry);
        let (files, inner) = (&mut self.files, &mut self.routed.inner);
        registry.files.free_released(|file| {
            if let Some(Some(Ok(inner_file))) = files.get_mut(file.0 as usize).map(Option::take) {
                inner.detach_file(inner_file);
            }
        });
    }

    fn cancel(&mut self, participant: u64, gone: bool, files: Vec<FileId>) {
        for file in &files {
            if let Some(Some(Ok(file))) = self.files.get(file.0 as usize) {
                self.routed.inner.cancel_file(*file);
            }
        }
        let mut channels = self.channels.iter_mut().flatten();
        if let Some(channel) = channels.find(|channel| channel.participant == participant) {
            channel.outlet.gone = gone;
            channel.to_check = channel.ops.slots();
            channel.cancelled.extend(files);
        }
    }

    /// Removes participants that have left and have no ops in the engine.
    fn remove_gone(&mut self, registry: &mut Registry) {
        for place in &mut self.channels {
            if let Some(channel) = place.take_if(|channel| channel.has_left()) {
                registry.remove(channel.participant);
            }
        }
    }

    fn file(&mut self, file: FileId, group: &Group) -> Result<FileId, Errno> {
        match self.files.get(file.0 as usize) {
            Some(Some(known)) => *known,
            _ => self.attach(file, group.registry().files.spec(file).cloned()),
        }
    }

    #[cold]
    fn attach(&mut self, file: FileId, spec: Option<FileSpec>) -> Result<FileId, Errno> {
        let attached = match spec {
            Some(spec) => self.routed.inner.attach_file(spec),
            None => Err(io::ErrorKind::NotFound.into()),
        };
        let known = attached.map_err(|error| {
            tracing::error!("the completion worker's engine does not accept a file: {error}");
            error.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error)
        });
        self.note(file, known);
        known
    }

    fn note(&mut self, file: FileId, known: Result<FileId, Errno>) {
        let index = file.0 as usize;
        if index >= self.files.len() {
            self.files.resize(index + 1, None);
        }
        self.files[index] = Some(known);
    }

    /// Attaches a file of the owner's worker at once, so that the caller gets the error.
    pub fn attach_own(&mut self, file: FileId, spec: FileSpec) -> io::Result<()> {
        let inner_file = self.routed.inner.attach_file(spec)?;
        self.note(file, Ok(inner_file));
        Ok(())
    }

    /// Whether the engine takes another op.
    #[inline]
    pub fn has_room(&self) -> bool {
        !self.retiring && self.routed.has_room()
    }

    /// Pushes an op of the owner's worker. The caller has checked [`Owner::has_room`].
    #[inline]
    pub fn push_own(&mut self, op: Op, group: &Group) {
        if let Err(refused) = self.push(op, OWN, group) {
            self.ended.push_back(refused);
        }
    }

    #[inline]
    #[allow(clippy::result_large_err)] // an op that cannot be started goes back whole
    fn push(&mut self, mut op: Op, channel: u32, group: &Group) -> Result<(), Completion> {
        match self.file(op.file, group) {
            Ok(file) => op.file = file,
            Err(errno) => return Err(unstarted(op, OpError::Errno(errno))),
        }
        self.routed.push(op, channel).map_err(|op| {
            debug_assert!(false, "the caller has checked the room");
            unstarted(op, OpError::Errno(Errno::NOBUFS))
        })
    }

    /// Takes ops from the rings round-robin, and starts them.
    pub fn serve(&mut self, group: &Group) -> io::Result<()> {
        let count = self.channels.len();
        for turn in 0..count {
            self.serve_channel((self.first + turn) % count, group);
        }
        self.first = (self.first + 1) % count.max(1);
        self.wake(group); // for ops that could not be started
        self.routed.inner.submit()
    }

    #[inline]
    fn serve_channel(&mut self, index: usize, group: &Group) {
        // Takes the channel out of the table, so that `self` stays usable.
        let Some(mut channel) = self.channels[index].take() else { return };
        #[allow(clippy::cast_possible_truncation)] // at most depth / LEAST_SHARE
        let number = index as u32;
        while let Ok(first) = channel.ops.peek() {
            let is_cancelled =
                channel.outlet.gone || channel.to_check > 0 && channel.cancelled.contains(&first.file);
            if !is_cancelled && !self.has_room() {
                break;
            }
            let Ok(op) = channel.ops.pop() else { break };
            channel.to_check = channel.to_check.saturating_sub(1);
            let pushed = if is_cancelled {
                Err(unstarted(op, OpError::Cancelled))
            } else {
                self.push(op, number, group)
            };
            self.served += 1;
            match pushed {
                Ok(()) => channel.outlet.inside += 1,
                Err(refused) => channel.outlet.pass_on(refused),
            }
        }
        if channel.to_check == 0 {
            channel.cancelled.clear();
        }
        self.channels[index] = Some(channel);
    }

    /// Appends the worker's own completions to `events`, and passes the others to their participants.
    pub fn reap(&mut self, events: &mut Vec<Event>, group: &Group) {
        events.extend(self.ended.drain(..).map(Event::Completed));
        let Self { routed, channels, .. } = self;
        let mut passed = 0;
        routed.reap(|channel, completion| {
            if channel == OWN {
                events.push(Event::Completed(completion));
            } else if let Some(Some(channel)) = channels.get_mut(channel as usize) {
                channel.outlet.inside -= 1;
                passed += 1;
                channel.outlet.pass_on(completion);
            }
        });
        self.served += passed;
        group.counters.passed.add(passed as u64);
        self.wake(group);
    }

    /// Wakes each participant that got completions.
    fn wake(&mut self, group: &Group) {
        let mut woken = 0;
        for channel in self.channels.iter_mut().flatten() {
            if std::mem::take(&mut channel.outlet.touched) {
                woken += u64::from(channel.outlet.waker.wake());
            }
        }
        group.counters.participant_wake_ups.add(woken);
    }

    pub fn has_leavers(&self) -> bool {
        self.channels.iter().flatten().any(Channel::has_left)
    }

    /// Whether a ring has ops that the engine has room for.
    pub fn has_work(&self) -> bool {
        let waiting = self.channels.iter().flatten().any(|channel| !channel.ops.is_empty());
        !self.ended.is_empty() || waiting && self.has_room() || self.has_leavers()
    }

    /// Other workers' ops in the engine.
    pub fn inside_of_others(&self) -> usize {
        self.channels.iter().flatten().map(|channel| channel.outlet.inside).sum()
    }

    pub fn take_unseen_work(&mut self) -> usize {
        std::mem::take(&mut self.served) + self.routed.inner.take_unseen_work()
    }

    pub fn inner(&self) -> &dyn Engine {
        &*self.routed.inner
    }

    pub fn inner_mut(&mut self) -> &mut dyn Engine {
        &mut *self.routed.inner
    }

    /// Drops the engine, even with ops in flight. Returns the channels for the next owner, and the worker's own ended
    /// ops.
    pub fn end(self) -> (Vec<Option<Channel>>, VecDeque<Completion>) {
        let Self { routed, channels, ended, .. } = self;
        drop(routed);
        (channels, ended)
    }
}
