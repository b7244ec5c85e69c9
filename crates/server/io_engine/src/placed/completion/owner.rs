//! The completion worker's side: the real engine, and one end of each worker's rings.
//!
//! `rings → (file of the real engine, route) → push → submit`, `reap → route → completion ring → one wake-up per worker`
//!
//! - Rings are served in turns, as far as the engine has room; what does not fit waits in its ring. As every worker is
//!   limited to its share of the depth, none can keep the others out.
//! - A completion ring is as long as the depth, and so has room for whatever its worker has in flight.
//!
//! Not here: who is host (`registry.rs`), the worker's own side (`participant.rs`).

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;

use rustix::io::Errno;

use super::registry::{Line, Seats, Table};
use crate::engine::{Completion, Engine, Event, FileId, FileSpec, Op, OpError, Stats};
use crate::placed::routes::{OWN, Route, Routes};

/// How the real engine knows a file, if it was asked to attach it.
type Known = Option<Result<FileId, Errno>>;

pub(super) struct Host {
    inner: Box<dyn Engine>,
    lines: Vec<Option<Line>>,
    routes: Routes,
    files: Vec<Known>,
    /// Own ops that ended outside the engine.
    ended: VecDeque<Completion>,
    events: Vec<Event>,
    /// Whose turn it is.
    first: usize,
    /// Takes nothing more: another one is to be host.
    pub retiring: bool,
    /// Done for others since it was last asked.
    served: usize,
}

/// An op that ends without having been started.
pub(in crate::placed) fn unstarted(op: Op, error: OpError) -> Completion {
    let Op { token, buffers, .. } = op;
    Completion { token, result: Err(error), sync_failed: false, stored_bytes: 0, buffers }
}

impl Host {
    /// The engine only; [`Host::sync`] takes up the rings.
    pub fn start(table: &Table) -> io::Result<Self> {
        let mut inner = (table.make)()?;
        inner.start()?;
        inner.serve_one_disk();
        let depth = table.depth as usize;
        Ok(Self {
            inner,
            lines: Vec::new(),
            routes: Routes::new(table.depth),
            files: Vec::new(),
            ended: VecDeque::with_capacity(depth),
            events: Vec::with_capacity(depth + 1),
            first: 0,
            retiring: false,
            served: 0,
        })
    }

    /// Takes in what changed: who came and went, files, what is to be given up.
    pub fn sync(&mut self, seats: &mut Seats) {
        for seat in &mut seats.list {
            if let Some(line) = seat.line.take() {
                self.take_up(line);
            }
            let given_up = std::mem::take(&mut seat.cancelled);
            if seat.gone || !given_up.is_empty() {
                self.give_up(seat.id, seat.gone, given_up);
            }
        }
        self.remove_gone(seats);
        let (files, inner) = (&mut self.files, &mut self.inner);
        seats.files.free_released(|file| {
            if let Some(Some(Ok(inner_file))) = files.get_mut(file.0 as usize).map(Option::take) {
                inner.detach_file(inner_file);
            }
        });
    }

    fn take_up(&mut self, line: Line) {
        let index = self.lines.iter().position(Option::is_none).unwrap_or(self.lines.len());
        if index == self.lines.len() {
            self.lines.push(None);
        }
        self.lines[index] = Some(line);
    }

    fn give_up(&mut self, seat: u64, gone: bool, files: Vec<FileId>) {
        for file in &files {
            if let Some(Some(Ok(file))) = self.files.get(file.0 as usize) {
                self.inner.cancel_file(*file);
            }
        }
        if let Some(line) = self.lines.iter_mut().flatten().find(|line| line.seat == seat) {
            line.gone = gone;
            line.to_check = line.ops.slots();
            line.cancelled.extend(files);
        }
    }

    /// Those who are gone leave when nothing of theirs is in the engine.
    fn remove_gone(&mut self, seats: &mut Seats) {
        for place in &mut self.lines {
            if let Some(line) = place.take_if(|line| line.gone && line.inside == 0) {
                seats.files.release_all(line.seat);
                seats.list.retain(|seat| seat.id != line.seat);
            }
        }
    }

    fn file(&mut self, file: FileId, table: &Table) -> Result<FileId, Errno> {
        match self.files.get(file.0 as usize) {
            Some(Some(known)) => *known,
            _ => self.attach(file, table.lock().files.spec(file).cloned()),
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

    /// The same at once, for a worker that is host itself and can still say no.
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

    /// The host worker's own op; the caller made sure that [`Host::takes`] one.
    #[inline]
    pub fn push_own(&mut self, op: Op, table: &Table) {
        if let Err(refused) = self.push(op, OWN, table) {
            self.ended.push_back(refused);
        }
    }

    #[inline]
    #[allow(clippy::result_large_err)] // an op that cannot be started goes back whole
    fn push(&mut self, mut op: Op, line: u32, table: &Table) -> Result<(), Completion> {
        let file = match self.file(op.file, table) {
            Ok(file) => file,
            Err(errno) => return Err(unstarted(op, OpError::Errno(errno))),
        };
        let token = op.token;
        let Some(place) = self.routes.take(Route { line, token }) else {
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
    pub fn serve(&mut self, table: &Table) -> io::Result<()> {
        let count = self.lines.len();
        for turn in 0..count {
            self.serve_line((self.first + turn) % count, table);
        }
        self.first = (self.first + 1) % count.max(1);
        self.ring(table); // about what could not be started
        self.inner.submit()
    }

    #[inline]
    fn serve_line(&mut self, index: usize, table: &Table) {
        // Out of its place, so that the rest of `self` can be used.
        let Some(mut line) = self.lines[index].take() else { return };
        #[allow(clippy::cast_possible_truncation)] // a handful
        let number = index as u32;
        while let Ok(first) = line.ops.peek() {
            let given_up = line.gone || line.to_check > 0 && line.cancelled.contains(&first.file);
            if !given_up && !self.takes() {
                break;
            }
            let Ok(op) = line.ops.pop() else { break };
            line.to_check = line.to_check.saturating_sub(1);
            let pushed =
                if given_up { Err(unstarted(op, OpError::Cancelled)) } else { self.push(op, number, table) };
            self.served += 1;
            match pushed {
                Ok(()) => line.inside += 1,
                Err(refused) => pass_on(&mut line, refused),
            }
        }
        if line.to_check == 0 {
            line.cancelled.clear();
        }
        self.lines[index] = Some(line);
    }

    /// Own completions to `events`, the others to those whose they are.
    pub fn reap(&mut self, events: &mut Vec<Event>, table: &Table) {
        events.extend(self.ended.drain(..).map(Event::Completed));
        self.inner.reap(&mut self.events);
        let mut passed = 0;
        for event in self.events.drain(..) {
            let Event::Completed(mut completion) = event else { continue };
            let Route { line, token } = self.routes.give_back(completion.token);
            completion.token = token;
            if line == OWN {
                events.push(Event::Completed(completion));
            } else if let Some(Some(line)) = self.lines.get_mut(line as usize) {
                line.inside -= 1;
                passed += 1;
                pass_on(line, completion);
            }
        }
        self.served += passed;
        table.counters.passed.add(passed as u64);
        self.ring(table);
    }

    /// One wake-up per worker, for all that it was passed.
    pub fn ring(&mut self, table: &Table) {
        let mut woken = 0;
        for line in self.lines.iter_mut().flatten() {
            if std::mem::take(&mut line.touched) {
                woken += u64::from(line.bell.ring());
            }
        }
        table.counters.member_wake_ups.add(woken);
    }

    pub fn has_leavers(&self) -> bool {
        self.lines.iter().flatten().any(|line| line.gone && line.inside == 0)
    }

    /// Whether something was handed over that fits into the engine now.
    pub fn has_work(&self) -> bool {
        let waiting = self.lines.iter().flatten().any(|line| !line.ops.is_empty());
        !self.ended.is_empty() || waiting && self.takes() || self.has_leavers()
    }

    /// Ops of other workers in the real engine.
    pub fn inside_of_others(&self) -> usize {
        self.lines.iter().flatten().map(|line| line.inside).sum()
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

    /// Ends the engine, with what may still be in it; returns what the next host takes up, and own ops that ended.
    pub fn end(self) -> (Vec<Option<Line>>, VecDeque<Completion>) {
        let Self { inner, lines, ended, .. } = self;
        drop(inner);
        (lines, ended)
    }
}

/// Puts a completion into the worker's ring.
#[inline]
fn pass_on(line: &mut Line, completion: Completion) {
    if line.gone {
        return;
    }
    let pushed = line.done.push(completion);
    debug_assert!(pushed.is_ok(), "the ring is as long as a worker's ops in flight may be many");
    line.touched = true;
}
