//! The completion worker's side: the real engine, and one end of each worker's rings.
//!
//! `rings → (file of the real engine, route) → push → submit`, `reap → route → completion ring → one wake-up per worker`
//!
//! - Rings are served in turns, as far as the engine has room; what does not fit waits in its ring. As every worker is
//!   limited to its share of the depth, none can keep the others out.
//! - A completion ring is as long as the depth, and so has room for whatever its worker has in flight.
//!
//! Not here: who is owner (`registry.rs`), the worker's own side (`participant.rs`).

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;

use rustix::io::Errno;

use super::registry::{Channel, Group, Registry};
use crate::engine::{Completion, Engine, Event, FileId, FileSpec, Op, OpError, Stats};
use crate::placed::routes::{OWN, Route, Routes};

/// How the real engine knows a file, if it was asked to attach it.
type Known = Option<Result<FileId, Errno>>;

pub(super) struct Owner {
    inner: Box<dyn Engine>,
    channels: Vec<Option<Channel>>,
    routes: Routes,
    files: Vec<Known>,
    /// Own ops that ended outside the engine.
    ended: VecDeque<Completion>,
    events: Vec<Event>,
    /// Whose turn it is.
    first: usize,
    /// Takes nothing more: another one is to be owner.
    pub retiring: bool,
    /// Done for others since it was last asked.
    served: usize,
}

/// An op that ends without having been started.
pub(in crate::placed) fn unstarted(op: Op, error: OpError) -> Completion {
    let Op { token, buffers, .. } = op;
    Completion { token, result: Err(error), sync_failed: false, stored_bytes: 0, buffers }
}

impl Owner {
    /// The engine only; [`Owner::sync`] takes up the rings.
    pub fn start(group: &Group) -> io::Result<Self> {
        let mut inner = (group.make)()?;
        inner.start()?;
        inner.serve_one_disk();
        let depth = group.depth as usize;
        Ok(Self {
            inner,
            channels: Vec::new(),
            routes: Routes::new(group.depth),
            files: Vec::new(),
            ended: VecDeque::with_capacity(depth),
            events: Vec::with_capacity(depth + 1),
            first: 0,
            retiring: false,
            served: 0,
        })
    }

    /// Takes in what changed: who came and went, files, what is to be given up.
    pub fn sync(&mut self, registry: &mut Registry) {
        for entry in &mut registry.list {
            if let Some(channel) = entry.channel.take() {
                self.take_up(channel);
            }
            let given_up = std::mem::take(&mut entry.cancelled);
            if entry.gone || !given_up.is_empty() {
                self.give_up(entry.id, entry.gone, given_up);
            }
        }
        self.remove_gone(registry);
        let (files, inner) = (&mut self.files, &mut self.inner);
        registry.files.free_released(|file| {
            if let Some(Some(Ok(inner_file))) = files.get_mut(file.0 as usize).map(Option::take) {
                inner.detach_file(inner_file);
            }
        });
    }

    fn take_up(&mut self, channel: Channel) {
        let index = self.channels.iter().position(Option::is_none).unwrap_or(self.channels.len());
        if index == self.channels.len() {
            self.channels.push(None);
        }
        self.channels[index] = Some(channel);
    }

    fn give_up(&mut self, entry: u64, gone: bool, files: Vec<FileId>) {
        for file in &files {
            if let Some(Some(Ok(file))) = self.files.get(file.0 as usize) {
                self.inner.cancel_file(*file);
            }
        }
        if let Some(channel) = self.channels.iter_mut().flatten().find(|channel| channel.participant == entry)
        {
            channel.gone = gone;
            channel.to_check = channel.ops.slots();
            channel.cancelled.extend(files);
        }
    }

    /// Those who are gone leave when nothing of theirs is in the engine.
    fn remove_gone(&mut self, registry: &mut Registry) {
        for place in &mut self.channels {
            if let Some(channel) = place.take_if(|channel| channel.gone && channel.inside == 0) {
                registry.files.release_all(channel.participant);
                registry.list.retain(|entry| entry.id != channel.participant);
            }
        }
    }

    fn file(&mut self, file: FileId, group: &Group) -> Result<FileId, Errno> {
        match self.files.get(file.0 as usize) {
            Some(Some(known)) => *known,
            _ => self.attach(file, group.lock().files.spec(file).cloned()),
        }
    }

    #[cold]
    fn attach(&mut self, file: FileId, spec: Option<FileSpec>) -> Result<FileId, Errno> {
        let attached = match spec {
            Some(spec) => self.inner.attach_file(spec),
            None => Err(io::ErrorKind::NotFound.into()),
        };
        let known = attached.map_err(|error| {
            tracing::error!("the completion worker's engine does not take a file: {error}");
            error.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error)
        });
        let index = file.0 as usize;
        if index >= self.files.len() {
            self.files.resize(index + 1, None);
        }
        self.files[index] = Some(known);
        known
    }

    /// The same at once, for a worker that is owner itself and can still say no.
    pub fn attach_own(&mut self, file: FileId, spec: FileSpec) -> io::Result<()> {
        let inner_file = self.inner.attach_file(spec)?;
        let index = file.0 as usize;
        if index >= self.files.len() {
            self.files.resize(index + 1, None);
        }
        self.files[index] = Some(Ok(inner_file));
        Ok(())
    }

    /// Whether the real engine takes another op.
    #[inline]
    pub fn takes(&self) -> bool {
        !self.retiring && self.routes.room() > 0 && self.inner.room() > 0
    }

    /// The owner worker's own op; the caller made sure that [`Owner::takes`] one.
    #[inline]
    pub fn push_own(&mut self, op: Op, group: &Group) {
        if let Err(refused) = self.push(op, OWN, group) {
            self.ended.push_back(refused);
        }
    }

    #[inline]
    #[allow(clippy::result_large_err)] // an op that cannot be started goes back whole
    fn push(&mut self, mut op: Op, channel: u32, group: &Group) -> Result<(), Completion> {
        let file = match self.file(op.file, group) {
            Ok(file) => file,
            Err(errno) => return Err(unstarted(op, OpError::Errno(errno))),
        };
        let token = op.token;
        let Some(place) = self.routes.take(Route { channel, token }) else {
            debug_assert!(false, "`takes` said that there is room");
            return Err(unstarted(op, OpError::Errno(Errno::NOBUFS)));
        };
        op.token = place;
        op.file = file;
        if let Err(op) = self.inner.push(op) {
            debug_assert!(false, "`takes` said that there is room");
            self.routes.give_back(place);
            return Err(unstarted(Op { token, ..op }, OpError::Errno(Errno::NOBUFS)));
        }
        Ok(())
    }

    /// Takes what was handed over, in turns, and starts it.
    pub fn serve(&mut self, group: &Group) -> io::Result<()> {
        let count = self.channels.len();
        for turn in 0..count {
            self.serve_line((self.first + turn) % count, group);
        }
        self.first = (self.first + 1) % count.max(1);
        self.ring(group); // about what could not be started
        self.inner.submit()
    }

    #[inline]
    fn serve_line(&mut self, index: usize, group: &Group) {
        // Out of its place, so that the rest of `self` can be used.
        let Some(mut channel) = self.channels[index].take() else { return };
        #[allow(clippy::cast_possible_truncation)] // a handful
        let number = index as u32;
        while let Ok(first) = channel.ops.peek() {
            let given_up = channel.gone || channel.to_check > 0 && channel.cancelled.contains(&first.file);
            if !given_up && !self.takes() {
                break;
            }
            let Ok(op) = channel.ops.pop() else { break };
            channel.to_check = channel.to_check.saturating_sub(1);
            let pushed =
                if given_up { Err(unstarted(op, OpError::Cancelled)) } else { self.push(op, number, group) };
            self.served += 1;
            match pushed {
                Ok(()) => channel.inside += 1,
                Err(refused) => pass_on(&mut channel, refused),
            }
        }
        if channel.to_check == 0 {
            channel.cancelled.clear();
        }
        self.channels[index] = Some(channel);
    }

    /// Own completions to `events`, the others to those whose they are.
    pub fn reap(&mut self, events: &mut Vec<Event>, group: &Group) {
        events.extend(self.ended.drain(..).map(Event::Completed));
        self.inner.reap(&mut self.events);
        let mut passed = 0;
        for event in self.events.drain(..) {
            let Event::Completed(mut completion) = event else { continue };
            let Route { channel, token } = self.routes.give_back(completion.token);
            completion.token = token;
            if channel == OWN {
                events.push(Event::Completed(completion));
            } else if let Some(Some(channel)) = self.channels.get_mut(channel as usize) {
                channel.inside -= 1;
                passed += 1;
                pass_on(channel, completion);
            }
        }
        self.served += passed;
        group.counters.passed.add(passed as u64);
        self.ring(group);
    }

    /// One wake-up per worker, for all that it was passed.
    pub fn ring(&mut self, group: &Group) {
        let mut woken = 0;
        for channel in self.channels.iter_mut().flatten() {
            if std::mem::take(&mut channel.touched) {
                woken += u64::from(channel.waker.wake());
            }
        }
        group.counters.participant_wake_ups.add(woken);
    }

    pub fn has_leavers(&self) -> bool {
        self.channels.iter().flatten().any(|channel| channel.gone && channel.inside == 0)
    }

    /// Whether something was handed over that fits into the engine now.
    pub fn has_work(&self) -> bool {
        let waiting = self.channels.iter().flatten().any(|channel| !channel.ops.is_empty());
        !self.ended.is_empty() || waiting && self.takes() || self.has_leavers()
    }

    /// Ops of other workers in the real engine.
    pub fn inside_of_others(&self) -> usize {
        self.channels.iter().flatten().map(|channel| channel.inside).sum()
    }

    pub fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }

    pub fn stats(&self) -> Stats {
        self.inner.stats()
    }

    pub fn take_unseen_work(&mut self) -> usize {
        std::mem::take(&mut self.served) + self.inner.take_unseen_work()
    }

    pub fn inner(&mut self) -> &mut dyn Engine {
        &mut *self.inner
    }

    pub fn descriptor(&mut self) -> io::Result<OwnedFd> {
        self.inner.descriptor()
    }

    /// Ends the engine, with what may still be in it; returns what the next owner takes up, and own ops that ended.
    pub fn end(self) -> (Vec<Option<Channel>>, VecDeque<Completion>) {
        let Self { inner, channels, ended, .. } = self;
        drop(inner);
        (channels, ended)
    }
}

/// Puts a completion into the worker's ring.
#[inline]
fn pass_on(channel: &mut Channel, completion: Completion) {
    if channel.gone {
        return;
    }
    let pushed = channel.done.push(completion);
    debug_assert!(pushed.is_ok(), "the ring is as long as a worker's ops in flight may be many");
    channel.touched = true;
}
