//! The engine logic that all backends share: it accepts ops, queues calls for them, and returns completions.
//!
//! `push → op table → issue → backend.queue … submit … backend.pop → settle → the next call, or the completion`
//!
//! - The core resumes, bounces, retries and orders syncs. A backend only queues calls and returns results.
//! - All queues are allocated for the full number of ops at the start: the core allocates nothing per op.
//! - Each file has its share of ops and bounce buffers (`shares.rs`). Ops that must wait do so in their own file's
//!   queue (`waiting.rs`), so a disk that hangs blocks only its own ops.
//! - A result that leads to another call queues it immediately. The next `submit` or `wait` starts it.
//!
//! The step from an op to its call is in `op.rs`, the meaning of a result in `result.rs`, and files, cancellation and the
//! end of an engine in `lifetime.rs`.

mod admission;
pub(crate) mod bounce;
pub(crate) mod files;
pub(crate) mod flush_gate;
mod lifetime;
pub(crate) mod op;
pub(crate) mod op_table;
#[cfg(not(any(test, feature = "test-util")))]
#[path = "no_record.rs"]
mod recording;
#[cfg(any(test, feature = "test-util"))]
mod recording;
mod result;
pub(crate) mod shares;
pub(crate) mod turn;
mod waiting;
pub(crate) mod window;

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use guest_mem::GuestMemory;
use rustix::io::Errno;

use self::admission::{Admission, admit};
use self::bounce::Bounce;
use self::files::{FileTable, OpenFile};
use self::op::{NoCall, OpState};
use self::op_table::OpTable;
use self::recording::Recording;
use self::result::Next;
use self::shares::Shares;
use self::turn::Submission;
use self::window::Windows;
use crate::backend::{IoBackend, RawResult};
use crate::engine::{Completion, Engine, Event, FileId, FileSpec, Op, OpError, Stats, WatchId, WatchToken};
use crate::placed::LEAST_SHARE;

/// Reserve of each file, however many files there are. A request with many segments needs this many ops at once.
#[allow(clippy::cast_possible_truncation)] // 32
const LEAST_OPS: u32 = LEAST_SHARE as u32;

/// The memory that calls in flight use.
#[derive(Default)]
struct Memory {
    ops: OpTable,
    bounce: Bounce,
}

/// An engine over the backend `B`.
pub struct Core<B: IoBackend> {
    // Declared before `memory`, so that a ring is closed before the memory that it may point to is freed.
    pub(crate) backend: B,
    memory: Memory,
    files: FileTable,
    /// Each file's share of `memory.ops`.
    shares: Shares,
    /// Ops of all files that wait for a bounce buffer.
    waiting: usize,
    /// Ops of all files whose call found the backend's queue full.
    backlogged: usize,
    /// The file that is served first when a resource becomes free.
    first: usize,
    /// The submission that is being filled. Each file gets one turn per submission.
    submission: Submission,
    /// Limits how many calls each file has in flight.
    windows: Windows,
    /// Files with ops that wait for their next turn or for window space. Each file is listed once.
    lines: VecDeque<FileId>,
    /// Some ops wait for their next turn, so the next submission must start them.
    turns_are_due: bool,
    /// Scratch buffer of `end_flush`.
    shared_flushes: Vec<u32>,
    /// Ops that ended outside `reap`.
    finished: VecDeque<(u32, Result<(), OpError>)>,
    stats: Stats,
    /// Calls queued since `take_unseen_work` that continue an op or start one that had waited for its turn.
    continued: usize,
    recording: Recording,
    drain_timeout: Duration,
}

impl<B: IoBackend + std::fmt::Debug> std::fmt::Debug for Core<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Core").field("backend", &self.backend).finish_non_exhaustive()
    }
}

impl<B: IoBackend> Engine for Core<B> {
    fn describe(&self) -> String {
        self.backend.describe()
    }

    fn start(&mut self) -> io::Result<()> {
        self.backend.start()
    }

    fn batch(&self) -> usize {
        self.backend.batch()
    }

    fn check_shareable(&self) -> io::Result<()> {
        self.backend.check_shareable()
    }

    fn room(&self) -> usize {
        self.shares.room_for_any()
    }

    fn room_of(&self, file: FileId) -> usize {
        self.shares.room(file)
    }

    fn in_flight(&self) -> usize {
        self.memory.ops.len()
    }

    #[inline]
    fn push(&mut self, mut op: Op) -> Result<(), Op> {
        if self.take(&mut op) { Ok(()) } else { Err(op) }
    }

    fn submit(&mut self) -> io::Result<()> {
        self.issue_rest();
        let submitted = self.backend.submit();
        self.submission.next();
        submitted
    }

    fn reap(&mut self, events: &mut Vec<Event>) {
        while let Some((index, result)) = self.finished.pop_front() {
            self.end(index, result, events);
        }
        self.backend.begin_reap();
        while let Some(raw) = self.backend.pop() {
            self.settle(raw, events);
        }
        self.backend.take_ready(events);
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.issue_rest();
        let may_sleep = self.finished.is_empty() && !self.has_due_lines();
        let waited = self.backend.wait(if may_sleep { timeout } else { Some(Duration::ZERO) });
        self.submission.next();
        waited
    }

    fn arm(&mut self) -> io::Result<bool> {
        self.issue_rest();
        let may_sleep = self.backend.arm()?;
        self.submission.next();
        Ok(may_sleep && self.finished.is_empty() && !self.has_due_lines())
    }

    fn disarm(&mut self) -> io::Result<()> {
        self.backend.disarm()
    }

    fn descriptor(&mut self) -> io::Result<OwnedFd> {
        self.backend.descriptor()?.try_clone_to_owned()
    }

    fn watch(&mut self, fd: Arc<OwnedFd>, token: WatchToken) -> io::Result<WatchId> {
        self.backend.watch(fd, token)
    }

    fn watch_own(&mut self, fd: Arc<OwnedFd>, token: WatchToken) -> io::Result<WatchId> {
        self.backend.watch_own(fd, token)
    }

    fn unwatch(&mut self, id: WatchId) {
        self.backend.unwatch(id);
    }

    fn cancel_all(&mut self) {
        self.cancel(None);
    }

    fn cancel_file(&mut self, file: FileId) {
        self.cancel(Some(file));
    }

    fn attach_file(&mut self, spec: FileSpec) -> io::Result<FileId> {
        self.attach(spec)
    }

    fn detach_file(&mut self, file: FileId) {
        self.detach(file);
    }

    fn serve_one_disk(&mut self) {
        self.shares.do_not_split();
        self.memory.bounce.shares.do_not_split();
        self.backend.serve_one_disk();
    }

    fn use_memory(&mut self, memory: &Arc<GuestMemory>) {
        self.backend.use_memory(memory);
    }

    fn forget_memory(&mut self, memory: &Arc<GuestMemory>) {
        self.backend.forget_memory(memory);
    }

    fn stats(&self) -> Stats {
        self.stats
    }

    fn take_unseen_work(&mut self) -> usize {
        std::mem::take(&mut self.continued)
    }
}

impl<B: IoBackend> Core<B> {
    /// Returns false if the file has no room. Copies `op` field by field: copying it whole would stall on the caller's
    /// recent stores.
    #[inline]
    fn take(&mut self, op: &mut Op) -> bool {
        if !self.shares.take(op.file) {
            assert!(self.files.is_attached(op.file), "{:?} is not attached", op.file);
            return false;
        }
        let op = OpState::new(op);
        let Some((index, op)) = self.memory.ops.insert(op) else {
            unreachable!("the op table has a slot for each share")
        };
        if op.is_empty() {
            self.finished.push_back((index, Ok(())));
        } else if op.is_at_sync() {
            self.start_call(index);
        } else {
            self.issue(index);
        }
        true
    }

    /// Queues the op's next call. A sync waits while another sync of its file is in flight.
    #[inline]
    fn start_call(&mut self, index: u32) {
        if !self.memory.ops.at(index).is_at_sync() || self.enters_gate(index) {
            self.issue(index);
        }
    }

    #[cold]
    fn enters_gate(&mut self, index: u32) -> bool {
        self.file_of(index).flushes.enter(index)
    }

    fn file_of(&mut self, index: u32) -> &mut OpenFile {
        self.files.at(self.memory.ops.at(index).file)
    }

    /// Queues the op's next call if its file's turn and window have room. Otherwise the op waits in its file's queue.
    #[inline]
    fn issue(&mut self, index: u32) {
        let op = self.memory.ops.at(index);
        let file = self.files.at(op.file);
        if !file.turn.has_line() && admit(&mut self.windows, self.submission, op, file) == Admission::Now {
            self.issue_in_turn(index);
        } else {
            self.line_up(index);
        }
    }

    /// Queues the op's next call behind the waiting calls of its file.
    #[inline]
    fn issue_in_turn(&mut self, index: u32) {
        if self.backlogged > 0 && self.is_behind_others(index) || !self.try_issue(index) {
            self.put_off(index);
        }
    }

    /// Returns false if the backend's queue is full.
    #[inline]
    fn try_issue(&mut self, index: u32) -> bool {
        let (name, op) = self.memory.ops.named_at(index);
        let file = self.files.at(op.file);
        let direct = if self.recording.is_on() { None } else { op.direct_transfer(file) };
        if let Some(call) = direct {
            // SAFETY: 1. memory: the op table owns the op's buffers and does not move them, and `Drop` leaks them if a
            // call is still in flight; 2. contents: the buffers are guest memory, because `direct_transfer` makes no
            // call with a bounce buffer; 3. file: `detach` panics while ops are in flight.
            if unsafe { self.backend.queue(name, file.target, &call) }.is_ok() {
                op.in_kernel = true;
                return true;
            }
        }
        self.issue_any(index)
    }

    /// Does the same as `try_issue` for every kind of call, and handles bounce buffers and the recorder.
    #[inline(never)]
    fn issue_any(&mut self, index: u32) -> bool {
        let Memory { ops, bounce } = &mut self.memory;
        let (name, op) = ops.named_at(index);
        let file = self.files.at(op.file);
        let call = match op.next_call(file, bounce, &mut self.stats) {
            Ok(call) => call,
            Err(why) => {
                self.not_issued(index, &why);
                return true;
            }
        };
        // SAFETY: 1. memory: the op table owns the op's buffers and the bounce buffers, neither moves, and `Drop` leaks
        // them if a call is still in flight; 2. contents: data buffers are guest memory or a bounce buffer that only
        // this op holds; zeroes are only read; 3. file: `detach` panics while ops are in flight.
        let mut queued = unsafe { self.backend.queue(name, file.target, &call) };
        if queued.is_err() {
            // If the error persists, the next `submit` reports it.
            let _ = self.backend.submit();
            // SAFETY: as above; the first attempt queued nothing.
            queued = unsafe { self.backend.queue(name, file.target, &call) };
        }
        if queued.is_err() {
            return false;
        }
        op.in_kernel = true;
        self.recording.issued(index, op, &call);
        true
    }

    #[cold]
    fn not_issued(&mut self, index: u32, why: &NoCall) {
        match why {
            NoCall::NoBounce => {
                self.leave_window(index);
                self.file_of(index).waiting.push_back(index);
                self.waiting += 1;
            }
            NoCall::LostMemory => self.finished.push_back((index, Err(OpError::Errno(Errno::FAULT)))),
        }
    }

    /// Handles the result of a call.
    #[inline]
    fn settle(&mut self, raw: RawResult, events: &mut Vec<Event>) {
        let Some((index, op)) = self.memory.ops.find_mut(raw.user_data) else {
            // The backend returned a result twice. The second one must not end another op.
            debug_assert!(false, "no op has this result: {raw:?}");
            return;
        };
        let file = self.files.at(op.file);
        op.in_kernel = false;
        self.windows.give_back(op, file);
        self.recording.completed(index, raw.result);
        match op.on_result(raw.result, file, &self.memory.bounce, &mut self.stats) {
            Next::Call => {
                self.continued += 1;
                self.start_call(index);
            }
            Next::Done(result) if op.is_at_sync() => self.end_flush(index, result, events),
            Next::Done(result) => self.give_back(index, result, events),
        }
    }

    fn end(&mut self, index: u32, result: Result<(), OpError>, events: &mut Vec<Event>) {
        if self.memory.ops.at(index).is_at_sync() {
            self.end_flush(index, result, events);
        } else {
            self.give_back(index, result, events);
        }
    }

    /// Ends the flushes that shared this sync. The first flush that arrived later starts the next sync.
    fn end_flush(&mut self, index: u32, result: Result<(), OpError>, events: &mut Vec<Event>) {
        let mut shared = std::mem::take(&mut self.shared_flushes);
        let next = self.file_of(index).flushes.leave(index, |op| shared.push(op));
        self.give_back(index, result, events);
        shared.drain(..).for_each(|op| self.give_back(op, result, events));
        self.shared_flushes = shared;
        if let Some(next) = next {
            self.issue(next);
        }
    }

    #[inline]
    fn give_back(&mut self, index: u32, result: Result<(), OpError>, events: &mut Vec<Event>) {
        if self.memory.ops.at(index).window_cost > 0 {
            self.leave_window(index); // its call was never made
        }
        let op = self.memory.ops.remove(index);
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
}

#[cfg(test)]
mod tests;
