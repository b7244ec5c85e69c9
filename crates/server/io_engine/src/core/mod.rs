//! The logic all engines share: which op is where, from `push` to its completion.
//!
//! `push → op table → (waits for a bounce buffer) → (its file's line) → (backlog) → kernel queue → result → again or finished`
//!
//! - Every queue here has room for all ops from the start, and those of each file for the usual number (`files.rs`):
//!   nothing is allocated per op.
//! - Each file has its share of ops and bounce buffers (`shares.rs`), and ops that have to wait wait in their file's own
//!   queue: a disk that hangs keeps only its own ops.
//! - A result that leads to another call queues it at once; it starts with the next `submit` or `wait`.
//! - Dropping waits for the kernel to let go of the memory, or else leaks it: it is never freed under a
//!   call in flight.
//!
//! One thread owns all of it, by two handles that share it (`halves.rs`). Or several threads do, one at a time
//! (`placed/shared.rs`).
//! Not here: what a result means (`completion.rs`), when a file's turn is spent (`turn.rs`), system calls (`kernel.rs` and below).

pub(crate) mod bounce;
pub(crate) mod files;
pub(crate) mod flush_gate;
mod handles;
pub(crate) mod op;
pub(crate) mod op_table;
pub(crate) mod shares;
pub(crate) mod turn;
pub(crate) mod window;

use std::collections::VecDeque;
use std::io;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use crate::backend::{Call, Kernel, RawResult};
use crate::core::bounce::Bounce;
use crate::core::files::{FileTable, OpenFile};
use crate::core::op::{Next, NoCall, OpState};
use crate::core::op_table::OpTable;
use crate::core::shares::Shares;
use crate::core::turn::{Submission, TURN_COST};
use crate::core::window::Windows;
use crate::engine::{Completion, EngineConfig, Event, FileId, FileSpec, Op, OpError, Stats};
use crate::placed::LEAST_SHARE;
use crate::record::{Record, Recorder};

/// What each file has in reserve, however many there are: with less, a request of many segments might never find room.
#[allow(clippy::cast_possible_truncation)] // 32
const LEAST_OPS: u32 = LEAST_SHARE as u32;

/// What calls in flight point into.
#[derive(Default)]
struct Memory {
    ops: OpTable,
    bounce: Bounce,
}

pub(crate) struct Core<K: Kernel> {
    // Before `memory`: a ring is closed before what it may point to is freed.
    pub kernel: K,
    memory: Memory,
    files: FileTable,
    /// Of `memory.ops`.
    shares: Shares,
    /// Ops that wait for a bounce buffer, of all files.
    waiting: usize,
    /// Ops whose call found the kernel's queue full, of all files.
    backlogged: usize,
    /// The file that is looked at first when something comes free.
    first: usize,
    /// What is being filled; each file has a turn of it.
    submission: Submission,
    /// Which file has the kernel for itself.
    windows: Windows,
    /// Files with ops that wait for their next turn, or for room in their window, each once.
    lines: VecDeque<FileId>,
    /// Some of them wait for a turn: the next submission has one.
    turns_are_due: bool,
    /// Scratch of `end_flush`.
    shared_flushes: Vec<u32>,
    /// Ops that ended outside `reap`.
    finished: VecDeque<(u32, Result<(), OpError>)>,
    stats: Stats,
    /// Calls that went on with an op, or began one that waited for its turn, since this was last asked for.
    continued: usize,
    recorder: Option<Recorder>,
    drain_timeout: Duration,
}

impl<K: Kernel> Core<K> {
    pub fn new(kernel: K, config: &EngineConfig) -> Self {
        Self {
            kernel,
            memory: Memory { ops: OpTable::new(config.depth), bounce: Bounce::default() },
            files: FileTable::default(),
            shares: Shares::new(config.depth, LEAST_OPS),
            waiting: 0,
            backlogged: 0,
            first: 0,
            submission: Submission::first(TURN_COST),
            windows: Windows::new(),
            lines: VecDeque::new(),
            turns_are_due: false,
            shared_flushes: Vec::with_capacity(config.depth as usize),
            finished: VecDeque::with_capacity(config.depth as usize),
            stats: Stats::default(),
            continued: 0,
            recorder: config.recorder.clone(),
            drain_timeout: config.drain_timeout,
        }
    }

    /// Returns false if the file has no room. What is in `op` is taken from where its maker wrote it, field by field: a
    /// copy of it all would wait for its stores.
    #[inline]
    fn push(&mut self, op: &mut Op) -> bool {
        if !self.shares.take(op.file) {
            assert!(self.files.get_mut(op.file).is_some(), "{:?} is not attached", op.file);
            return false;
        }
        let op = OpState::new(op, self.kernel.has_durable_writes());
        let Some((index, op)) = self.memory.ops.insert(op) else {
            unreachable!("there is a place for each share")
        };
        if op.is_empty() {
            self.finished.push_back((index, Ok(())));
        } else if op.is_at_sync() {
            self.start(index);
        } else {
            self.issue(index);
        }
        true
    }

    /// Queues the op's next call, unless that is a sync and another one is under way.
    #[inline]
    fn start(&mut self, index: u32) {
        let syncs = self.memory.ops.get_mut(index).is_some_and(|op| op.is_at_sync());
        if !syncs || self.enters_gate(index) {
            self.issue(index);
        }
    }

    #[cold]
    fn enters_gate(&mut self, index: u32) -> bool {
        self.file_of(index).is_none_or(|file| file.flushes.enter(index))
    }

    /// Queues the op's next call, if its file's turn and window have room for it, and otherwise the op itself.
    #[inline]
    fn issue(&mut self, index: u32) {
        let Some(op) = self.memory.ops.get_mut(index) else { return };
        let Some(file) = self.files.get_mut(op.file) else { return };
        if !file.turn.has_line() && admit(&mut self.windows, self.submission, op, file) == Admission::Now {
            self.issue_in_turn(index);
        } else {
            self.line_up(index);
        }
    }

    #[cold]
    fn line_up(&mut self, index: u32) {
        let Some(id) = self.memory.ops.get_mut(index).map(|op| op.file) else { return };
        let Some(file) = self.files.get_mut(id) else { return };
        if !file.turn.has_line() {
            self.lines.push_back(id);
        }
        file.turn.line_up(index, &mut self.memory.ops);
    }

    /// Queues the op's next call, behind those of its file that wait already.
    #[inline]
    fn issue_in_turn(&mut self, index: u32) {
        if self.backlogged > 0 && self.is_behind_others(index) || !self.try_issue(index) {
            self.put_off(index);
        }
    }

    #[cold]
    fn is_behind_others(&mut self, index: u32) -> bool {
        self.file_of(index).is_some_and(|file| !file.backlog.is_empty())
    }

    #[cold]
    fn put_off(&mut self, index: u32) {
        let Some(file) = self.file_of(index) else { return };
        file.backlog.push_back(index);
        self.backlogged += 1;
    }

    fn file_of(&mut self, index: u32) -> Option<&mut OpenFile> {
        let file = self.memory.ops.get_mut(index)?.file;
        self.files.get_mut(file)
    }

    /// Returns false when the kernel takes no more now.
    #[inline]
    fn try_issue(&mut self, index: u32) -> bool {
        let Some((name, op)) = self.memory.ops.named_mut(index) else { return true };
        let Some(file) = self.files.get_mut(op.file) else { return true };
        let direct = if self.recorder.is_none() { op.direct_transfer(file) } else { None };
        if let Some(call) = direct {
            // SAFETY: 1. as in `issue_any`.
            if unsafe { self.kernel.queue(name, file.target, &call) }.is_ok() {
                op.in_kernel = true;
                return true;
            }
        }
        self.issue_any(index)
    }

    /// The same for any op, whatever is in its way.
    #[inline(never)]
    fn issue_any(&mut self, index: u32) -> bool {
        let Memory { ops, bounce } = &mut self.memory;
        let Some((name, op)) = ops.named_mut(index) else { return true };
        let Some(file) = self.files.get_mut(op.file) else { return true };
        let call = match op.next_call(file, bounce, &mut self.stats) {
            Ok(call) => call,
            Err(why) => {
                self.not_issued(index, &why);
                return true;
            }
        };
        // SAFETY: 1. memory: the op table owns the op's buffers and the bounce buffers, neither moves, and
        // `Drop` leaks them if a call is still in flight; 2. contents: data buffers are guest memory or a
        // bounce buffer that this op alone holds; zeroes are only read; 3. file: `detach` refuses while ops
        // are in flight.
        let mut queued = unsafe { self.kernel.queue(name, file.target, &call) };
        if queued.is_err() {
            // An error, if it lasts, is reported by the next `submit`.
            let _ = self.kernel.submit();
            // SAFETY: as above; the first attempt took nothing.
            queued = unsafe { self.kernel.queue(name, file.target, &call) };
        }
        if queued.is_err() {
            return false;
        }
        op.in_kernel = true;
        if let Some(recorder) = &self.recorder {
            op.record = recorder.issued(record_of(op, &call));
        }
        true
    }

    #[cold]
    fn not_issued(&mut self, index: u32, why: &NoCall) {
        match why {
            NoCall::NoBounce => {
                self.leave_window(index);
                let Some(file) = self.file_of(index) else { return };
                file.waiting.push_back(index);
                self.waiting += 1;
            }
            NoCall::LostMemory => self.finished.push_back((index, Err(OpError::Errno(Errno::FAULT)))),
        }
    }

    #[inline]
    fn issue_backlog(&mut self) {
        if self.backlogged > 0 {
            self.issue_backlogs();
        }
    }

    /// A file whose ops are not taken now does not keep the others' back.
    #[cold]
    fn issue_backlogs(&mut self) {
        for file in self.files_in_turn() {
            while let Some(&index) = self.files.get_mut(file).and_then(|file| file.backlog.front()) {
                if !self.try_issue(index) {
                    break;
                }
                self.files.get_mut(file).and_then(|file| file.backlog.pop_front());
                self.backlogged -= 1;
            }
        }
    }

    /// Bounce buffers came free.
    #[cold]
    fn issue_waiting(&mut self) {
        for file in self.files_in_turn() {
            // Counted, and not asked each time: an op that lines up takes its buffer only in its turn.
            let mut room = self.memory.bounce.shares.room(file);
            while room > 0
                && let Some(index) = self.files.get_mut(file).and_then(|file| file.waiting.pop_front())
            {
                room -= 1;
                self.waiting -= 1;
                self.issue(index);
            }
        }
    }

    /// All files, beginning with another one each time.
    fn files_in_turn(&mut self) -> impl Iterator<Item = FileId> + use<K> {
        let (count, first) = (self.files.places(), self.first);
        self.first = (first + 1) % count.max(1);
        #[allow(clippy::cast_possible_truncation)] // file numbers have 32 bits
        (0..count).map(move |turn| FileId(((first + turn) % count) as u32))
    }

    /// The op's call is with the kernel no longer.
    #[cold]
    fn leave_window(&mut self, index: u32) {
        let Some(op) = self.memory.ops.get_mut(index) else { return };
        if let Some(file) = self.files.get_mut(op.file) {
            self.windows.give_back(op, file);
        }
    }

    /// What waits in the files' lines: each file as much as is left of its turn and its window.
    #[cold]
    fn issue_lines(&mut self) {
        self.turns_are_due = false;
        for _ in 0..self.lines.len() {
            let Some(id) = self.lines.pop_front() else { return };
            if self.issue_line(id) {
                self.lines.push_back(id);
            }
        }
    }

    /// Returns whether some still wait.
    fn issue_line(&mut self, id: FileId) -> bool {
        while let Some(file) = self.files.get_mut(id)
            && let Some(first) = file.turn.first()
        {
            let Some(op) = self.memory.ops.get_mut(first) else { return false };
            match admit(&mut self.windows, self.submission, op, file) {
                Admission::Now => {}
                Admission::WithAResult => return true,
                Admission::NextTurn => {
                    self.turns_are_due = true;
                    return true;
                }
            }
            file.turn.leave_line(&mut self.memory.ops);
            self.continued += 1;
            self.issue_in_turn(first);
        }
        false
    }

    /// What could not be queued before.
    #[inline]
    fn issue_rest(&mut self) {
        self.issue_backlog();
        if !self.lines.is_empty() {
            self.issue_lines();
        }
    }

    #[inline]
    fn submit(&mut self) -> io::Result<()> {
        self.issue_rest();
        let submitted = self.kernel.submit();
        self.submission.next();
        submitted
    }

    fn reap(&mut self, events: &mut Vec<Event>) {
        while let Some((index, result)) = self.finished.pop_front() {
            self.end(index, result, events);
        }
        self.kernel.begin_reap();
        while let Some(raw) = self.kernel.pop() {
            self.settle(raw, events);
        }
        self.kernel.take_ready(events);
    }

    #[inline]
    fn settle(&mut self, raw: RawResult, events: &mut Vec<Event>) {
        let Some((index, op)) = self.memory.ops.find_mut(raw.user_data) else {
            debug_assert!(false, "a result for nobody: {raw:?}");
            return;
        };
        let Some(file) = self.files.get_mut(op.file) else { return };
        op.in_kernel = false;
        self.windows.give_back(op, file);
        if let Some(recorder) = &self.recorder {
            recorder.completed(op.record, raw.result);
        }
        match op.on_result(raw.result, file, &self.memory.bounce, &mut self.stats) {
            Next::Call => {
                self.continued += 1;
                self.start(index);
            }
            Next::Done(result) if op.is_at_sync() => self.end_flush(index, result, events),
            Next::Done(result) => self.give_back(index, result, events),
        }
    }

    fn end(&mut self, index: u32, result: Result<(), OpError>, events: &mut Vec<Event>) {
        if self.memory.ops.get_mut(index).is_some_and(|op| op.is_at_sync()) {
            self.end_flush(index, result, events);
        } else {
            self.give_back(index, result, events);
        }
    }

    /// Those that shared the sync end with it; those that came meanwhile start the next one.
    fn end_flush(&mut self, index: u32, result: Result<(), OpError>, events: &mut Vec<Event>) {
        let Some(file) = self.memory.ops.get_mut(index).map(|op| op.file) else { return };
        let mut shared = std::mem::take(&mut self.shared_flushes);
        let next = self.files.get_mut(file).and_then(|file| file.flushes.leave(index, |op| shared.push(op)));
        self.give_back(index, result, events);
        shared.drain(..).for_each(|op| self.give_back(op, result, events));
        self.shared_flushes = shared;
        if let Some(next) = next {
            self.issue(next);
        }
    }

    #[inline]
    fn give_back(&mut self, index: u32, result: Result<(), OpError>, events: &mut Vec<Event>) {
        if self.memory.ops.get_mut(index).is_some_and(|op| op.window_cost > 0) {
            self.leave_window(index); // its call was never made
        }
        let Some(op) = self.memory.ops.remove(index) else { return };
        self.shares.give_back(op.file);
        if let Some(bounce) = op.bounce {
            self.memory.bounce.give_back(bounce, op.file);
            if self.waiting > 0 {
                self.issue_waiting();
            }
        }
        let sync_failed = matches!(result, Err(OpError::Errno(_))) && op.is_at_sync();
        let OpState { token, stored_bytes, buffers, .. } = op;
        let completion = Completion { token, result, sync_failed, stored_bytes, buffers };
        events.push(Event::Completed(completion));
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.issue_rest();
        let may_sleep = self.finished.is_empty() && !self.has_due_lines();
        let waited = self.kernel.wait(if may_sleep { timeout } else { Some(Duration::ZERO) });
        self.submission.next();
        waited
    }

    fn arm(&mut self) -> io::Result<bool> {
        self.issue_rest();
        let may_sleep = self.kernel.arm()?;
        self.submission.next();
        Ok(may_sleep && self.finished.is_empty() && !self.has_due_lines())
    }

    /// Whether the next submission has room for an op that waits. One that waits for its file's window has to wait for
    /// a result, too, which ends the worker's sleep. Called after `issue_rest`.
    fn has_due_lines(&self) -> bool {
        !self.lines.is_empty() && self.turns_are_due
    }

    /// `only`: ops on this file; `None`: all.
    fn cancel(&mut self, only: Option<FileId>) {
        let (ops, finished) = (&mut self.memory.ops, &mut self.finished);
        self.lines.retain(|&id| only.is_some_and(|only| only != id));
        for file in self.files.chosen_mut(only) {
            while let Some(index) = file.turn.leave_line(ops) {
                finished.push_back((index, Err(OpError::Cancelled)));
            }
            self.waiting -= file.waiting.len();
            self.backlogged -= file.backlog.len();
            let not_started = file.waiting.drain(..).chain(file.backlog.drain(..));
            finished.extend(not_started.map(|index| (index, Err(OpError::Cancelled))));
            file.flushes.give_up(|index| finished.push_back((index, Err(OpError::Cancelled))));
        }
        let mut names = Vec::new(); // not on the request path
        let in_kernel = self.memory.ops.iter_mut().filter(|(_, op)| op.in_kernel);
        for (index, op) in in_kernel.filter(|(_, op)| only.is_none_or(|only| op.file == only)) {
            op.cancelled = true;
            names.push(index);
        }
        for index in names {
            self.kernel.cancel(self.memory.ops.name(index));
        }
    }

    fn attach_file(&mut self, spec: FileSpec) -> io::Result<FileId> {
        let alignment = spec.alignment;
        if !alignment.memory_bytes.is_power_of_two() || !alignment.offset_bytes.is_power_of_two() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "alignment is not a power of two"));
        }
        let index = self.files.next_index();
        let id = u32::try_from(index).map_err(|_| io::ErrorKind::QuotaExceeded)?;
        let target = self.kernel.register_file(id, &spec)?;
        // Room for every file: nothing is allocated when one gets a line.
        self.lines.reserve(index + 1);
        self.files.put(index, OpenFile::new(spec, target));
        self.shares.attach(FileId(id));
        self.memory.bounce.shares.attach(FileId(id));
        self.make_places();
        Ok(FileId(id))
    }

    fn detach_file(&mut self, file: FileId) {
        assert!(self.shares.used(file) == Some(0), "{file:?} is in use or not attached");
        self.shares.detach(file);
        self.memory.bounce.shares.detach(file);
        self.make_places();
        self.windows.forget(file);
        if let Some(taken) = self.files.take(file) {
            debug_assert_eq!(taken.window_used, 0, "{file:?} has calls");
            self.kernel.unregister_file(file.0, taken.target);
        }
    }

    /// For all that the shares now allow.
    fn make_places(&mut self) {
        self.windows.are_kept = self.shares.disks() > 1;
        self.files.chosen_mut(None).for_each(|file| file.most_bytes = file.longest_call_bytes());
        let (disks, places) = (self.shares.disks(), self.shares.places());
        self.memory.ops.grow(places);
        self.finished.reserve((places as usize).saturating_sub(self.finished.len()));
        self.kernel.expect(disks, places);
    }

    fn has_calls_in_kernel(&mut self) -> bool {
        self.memory.ops.iter_mut().any(|(_, op)| op.in_kernel)
    }
}

impl<K: Kernel> Drop for Core<K> {
    /// Gives up every op, and waits until the kernel has let go of their memory.
    fn drop(&mut self) {
        if !self.has_calls_in_kernel() {
            return;
        }
        self.cancel(None);
        let deadline = Instant::now() + self.drain_timeout;
        let mut events = Vec::new();
        loop {
            self.reap(&mut events);
            events.clear();
            let left = deadline.saturating_duration_since(Instant::now());
            if !self.has_calls_in_kernel() {
                return;
            }
            if left.is_zero() || self.wait(Some(left)).is_err() {
                break;
            }
        }
        tracing::error!(
            timeout_s = self.drain_timeout.as_secs_f64(),
            "I/O did not end: its memory stays allocated for the rest of this process's life"
        );
        std::mem::forget(std::mem::take(&mut self.memory));
    }
}

/// When an op's next call can be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Admission {
    Now,
    NextTurn,
    /// Its file's window is full: when a call has its result.
    WithAResult,
}

/// Takes the call's cost from its file's turn and window, if both have room.
#[inline]
fn admit(windows: &mut Windows, submission: Submission, op: &mut OpState, file: &mut OpenFile) -> Admission {
    op.settle_stage(file);
    if !windows.are_kept {
        let is_now = file.turn.take(submission, op.cost_bytes(file));
        return if is_now { Admission::Now } else { Admission::NextTurn };
    }
    let room = windows.open(op.file, file);
    let cost = op.window_cost(file);
    if !window::has_room(room, file.window_used, cost) {
        return Admission::WithAResult;
    }
    if !file.turn.take(submission, op.cost_bytes(file)) {
        return Admission::NextTurn;
    }
    op.window_cost = cost;
    windows.take(op.file, file, cost);
    Admission::Now
}

fn record_of(op: &OpState, call: &Call) -> Record {
    let Call { verb, flags, offset_bytes, len_bytes, .. } = *call;
    Record {
        verb,
        file: op.file,
        token: op.token,
        flags,
        offset_bytes,
        len_bytes,
        issued: 0,
        completed: None,
    }
}

#[cfg(test)]
mod tests;
