//! An engine over an engine: serves disks that are mapped through tables, such as qcow2 images.
//!
//! ```text
//! push → Volume::extent ─┬─ one extent: the op itself, with its own buffers ──▶ inner engine ─▶ Completion
//!                        └─ else, piece by piece: part of the buffers │ copy │ zeroes │ table ─▶ … ─▶ Completion
//!                                                 └ a change of the tables ─▶ metadata thread ─▶ again
//! ```
//!
//! - An op that lies in one extent of known tables costs a lookup and one inner op. Nothing is allocated for any op.
//! - An op whose table is not in memory waits in its slot while the table is read. Other ops go on.
//! - Tables, compressed clusters and misaligned pieces are read into memory of this engine (`scratch.rs`), never into
//!   the guest's.
//! - A turn decompresses at most one cluster and copies a limited number of bytes for each disk, because the worker
//!   serves other guests, too. A turn ends with `reap`. Guests may name the same memory again and again, so the length of
//!   a read is no limit.
//! - Each disk has its own parts, tables and copies: a disk that hangs takes none from the others.
//! - A write goes where its data are, or makes its clusters writable first. That never changes what the guest reads, so it
//!   may be done twice, or for nothing.
//! - A durable op ends when the entries that lead to its data are durable, too.
//! - An op that is cancelled while it waits for a change ends at once, unless the guest would see the change later.
//!
//! `op.rs` has the state of an op, `attached.rs` that of a disk, `steps.rs` begins pieces of reads, `writes.rs` those of all
//! other ops, `changes.rs` asks the metadata thread, `results.rs` ends pieces.

mod attached;
mod changes;
mod copies;
mod op;
mod results;
mod scratch;
mod steps;
mod writes;

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use guest_mem::{GuestMemory, IoVecs};
use rustix::io::Errno;

use self::attached::{Attached, MAX_PARTS, PART_PIECES, is_for_answers};
use self::op::{OpState, Token, Work};
use crate::core::shares::Shares;
use crate::core::turn::{Submission, TURN_COST};
use crate::engine::{Completion, Engine, Event, FileId, FileSpec, Op, OpError, Stats, WatchId, WatchToken};
use crate::placed::LEAST_SHARE;

/// Reserve of each disk, as in the engine below.
#[allow(clippy::cast_possible_truncation)] // 32
const LEAST_OPS: u32 = LEAST_SHARE as u32;

/// An engine for mapped disks.
pub struct MappedEngine {
    // The first field: the inner engine ends its ops before the memory that they use is freed.
    inner: Box<dyn Engine>,
    /// A slot for each op, by index.
    ops: Vec<OpState>,
    free: Vec<u32>,
    /// Each disk's share of `ops`.
    shares: Shares,
    disks: Vec<Option<Attached>>,
    /// Completions that `reap` will report. Their ops still count.
    finished: VecDeque<(FileId, Completion)>,
    /// Scratch for `reap`.
    events: Vec<Event>,
    /// Scratch for zeroes and copies.
    piece: IoVecs,
    /// Ops with slots.
    running: usize,
    /// Steps that continued an op since `take_unseen_work`.
    continued: usize,
    /// Disks with a cluster to decompress, and the one that comes next.
    inflating: usize,
    next_inflating: usize,
    /// Limits what is copied for each disk until the next `reap`.
    turn: Submission,
    /// Ops of all disks that go on in the next turn.
    due: usize,
    /// An inner op of one disk may make room for those of another.
    shares_room: bool,
    /// Attached disks that are writable.
    writable: usize,
    /// Distinguishes the answers for the ops that a slot has had.
    asked: u32,
}

impl std::fmt::Debug for MappedEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MappedEngine").field("running", &self.running).finish_non_exhaustive()
    }
}

impl MappedEngine {
    /// `depth`: that of `inner`.
    #[must_use]
    pub fn new(inner: Box<dyn Engine>, depth: u32) -> Self {
        Self {
            inner,
            ops: Vec::new(),
            free: Vec::new(),
            shares: Shares::new(depth, LEAST_OPS),
            disks: Vec::new(),
            finished: VecDeque::new(),
            events: Vec::new(),
            piece: IoVecs::with_capacity(PART_PIECES),
            running: 0,
            continued: 0,
            inflating: 0,
            next_inflating: 0,
            turn: Submission::first(TURN_COST),
            due: 0,
            shares_room: false,
            writable: 0,
            asked: 0,
        }
    }

    fn disk(&mut self, file: FileId) -> &mut Attached {
        match self.disks.get_mut(file.0 as usize).and_then(Option::as_mut) {
            Some(disk) => disk,
            None => unreachable!("{file:?} is not attached"),
        }
    }

    fn is_idle(&self) -> bool {
        self.finished.is_empty() && self.inflating == 0 && self.due == 0 && !self.has_answers()
    }

    /// Whether a metadata thread has news.
    #[inline]
    fn has_answers(&self) -> bool {
        let has_news = |disk: &Attached| disk.member.as_ref().is_some_and(|member| member.has_news());
        self.writable > 0 && self.disks.iter().flatten().any(has_news)
    }

    /// Ends an op that has no slot.
    fn end_at_once(&mut self, op: Op, result: Result<(), OpError>) {
        let Op { token, file, buffers, .. } = op;
        let completion = Completion { token, result, sync_failed: false, stored_bytes: 0, buffers };
        self.finished.push_back((file, completion));
    }

    fn make_slots(&mut self) {
        let places = self.shares.places();
        #[allow(clippy::cast_possible_truncation)] // no more than `places`
        let made = self.ops.len() as u32;
        self.ops.resize_with(places.max(made) as usize, OpState::default);
        self.free.reserve(places as usize);
        self.free.extend(made..places);
        self.finished.reserve(places as usize);
    }

    fn cancel(&mut self, only: Option<FileId>) {
        for op in &mut self.ops {
            op.cancelled |= op.is_running && only.is_none_or(|only| op.file == only);
        }
        if self.writable > 0 {
            self.end_waiting();
        }
    }
}

impl Engine for MappedEngine {
    fn describe(&self) -> String {
        format!("mapped over {}", self.inner.describe())
    }

    fn start(&mut self) -> io::Result<()> {
        self.inner.start()
    }

    fn room(&self) -> usize {
        self.shares.room_for_any()
    }

    fn room_of(&self, file: FileId) -> usize {
        self.shares.room(file)
    }

    fn in_flight(&self) -> usize {
        self.running + self.finished.len()
    }

    fn batch(&self) -> usize {
        self.inner.batch()
    }

    #[inline]
    fn push(&mut self, op: Op) -> Result<(), Op> {
        if !self.shares.take(op.file) {
            self.disk(op.file);
            return Err(op);
        }
        let (work, range) = (Work::of(&op.kind), op.kind.range());
        if work == Work::Read {
            match range {
                Some(range) if range.len_bytes() > 0 => {
                    self.start(op, work, (range.offset_bytes(), range.len_bytes()))
                }
                _ => self.end_at_once(op, Ok(())),
            }
            return Ok(());
        }
        let is_writable = self.disk(op.file).volume.is_writable();
        match range {
            // Nothing has been written.
            None if !is_writable => self.end_at_once(op, Ok(())),
            _ if !is_writable => self.end_at_once(op, Err(OpError::Errno(Errno::ROFS))),
            Some(range) if range.len_bytes() == 0 => self.end_at_once(op, Ok(())),
            Some(range) => self.start(op, work, (range.offset_bytes(), range.len_bytes())),
            None => self.start(op, work, FLUSH),
        }
        Ok(())
    }

    fn submit(&mut self) -> io::Result<()> {
        self.inner.submit()
    }

    fn reap(&mut self, events: &mut Vec<Event>) {
        let mut inner_events = std::mem::take(&mut self.events);
        self.inner.reap(&mut inner_events);
        self.turn.next();
        self.go_on_with_due();
        let has_room = self.shares_room && !inner_events.is_empty();
        for event in inner_events.drain(..) {
            match event {
                Event::Completed(completion) => self.on_inner(completion),
                // Each reap looks at the link itself.
                Event::Readable(token) if is_for_answers(token) => {}
                Event::WatchFailed(token, errno) if is_for_answers(token) => {
                    tracing::error!("answers of a disk's metadata thread cannot be waited for: {errno}");
                }
                other => events.push(other),
            }
        }
        self.events = inner_events;
        if self.has_answers() {
            self.take_all_answers();
        }
        self.inflate_one();
        if has_room {
            self.go_on_in_all_lines();
        }
        while let Some((file, completion)) = self.finished.pop_front() {
            self.shares.give_back(file);
            events.push(Event::Completed(completion));
        }
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.inner.wait(if self.is_idle() { timeout } else { Some(Duration::ZERO) })
    }

    fn arm(&mut self) -> io::Result<bool> {
        Ok(self.inner.arm()? && self.is_idle())
    }

    fn disarm(&mut self) -> io::Result<()> {
        self.inner.disarm()
    }

    fn descriptor(&mut self) -> io::Result<OwnedFd> {
        self.inner.descriptor()
    }

    fn watch(&mut self, fd: Arc<OwnedFd>, token: WatchToken) -> io::Result<WatchId> {
        self.inner.watch(fd, token)
    }

    fn watch_own(&mut self, fd: Arc<OwnedFd>, token: WatchToken) -> io::Result<WatchId> {
        self.inner.watch_own(fd, token)
    }

    fn unwatch(&mut self, id: WatchId) {
        self.inner.unwatch(id);
    }

    fn cancel_all(&mut self) {
        self.inner.cancel_all();
        self.cancel(None);
    }

    fn cancel_file(&mut self, file: FileId) {
        let files = self.disk(file).files.clone();
        files.into_iter().for_each(|file| self.inner.cancel_file(file));
        self.cancel(Some(file));
    }

    fn attach_file(&mut self, spec: FileSpec) -> io::Result<FileId> {
        let Some(volume) = spec.backing.volume() else {
            let text = "the disk is not mapped through tables";
            return Err(io::Error::new(io::ErrorKind::Unsupported, text));
        };
        let place = self.disks.iter().position(Option::is_none).unwrap_or(self.disks.len());
        let disk = Attached::attach(self.inner.as_mut(), volume, place)?;
        self.writable += usize::from(disk.member.is_some());
        if place == self.disks.len() {
            self.disks.push(None);
        }
        self.disks[place] = Some(disk);
        let file = FileId(u32::try_from(place).unwrap_or(u32::MAX));
        self.shares.attach(file);
        self.make_slots();
        Ok(file)
    }

    fn detach_file(&mut self, file: FileId) {
        self.shares.detach(file);
        let disk = self.disks.get_mut(file.0 as usize).and_then(Option::take);
        if let Some(disk) = disk {
            self.writable -= usize::from(disk.member.is_some());
            disk.detach(self.inner.as_mut());
        }
    }

    fn serve_one_disk(&mut self) {
        self.shares.do_not_split();
        self.shares_room = true;
        self.inner.serve_one_disk();
    }

    fn use_memory(&mut self, memory: &Arc<GuestMemory>) {
        self.inner.use_memory(memory);
    }

    fn forget_memory(&mut self, memory: &Arc<GuestMemory>) {
        self.inner.forget_memory(memory);
    }

    fn stats(&self) -> Stats {
        self.inner.stats()
    }

    fn keeps_running(&self) -> bool {
        self.inner.keeps_running()
    }

    fn wakes_when_idle(&self) -> bool {
        self.inner.wakes_when_idle()
    }

    fn due(&self) -> Option<Instant> {
        self.inner.due()
    }

    fn take_unseen_work(&mut self) -> usize {
        self.inner.take_unseen_work() + std::mem::take(&mut self.continued)
    }
}

/// A flush has no range. Its length makes it unfinished until the inner engine has it.
const FLUSH: (u64, u64) = (0, 1);
/// The most pieces of one op in flight at once.
const MAX_PENDING: u16 = 8;
const _: () = assert!(MAX_PARTS >= MAX_PENDING as usize);

fn whole(slot: u32) -> u64 {
    Token::Whole(slot).encode()
}
