//! The logic all engines share: which op is where, from `push` to its completion.
//!
//! `push → op table → (waits for a bounce buffer) → (backlog) → kernel queue → result → again or finished`
//!
//! - Every queue here has room for all ops from the start: nothing is allocated per op.
//! - A result that leads to another call queues it at once; it starts with the next `submit` or `wait`.
//! - Dropping waits for the kernel to let go of the memory, or else leaks it: it is never freed under a
//!   call in flight.
//!
//! One thread owns all of it, by two handles that share it (`halves.rs`). Or several threads do, one at a time
//! (`placed/shared.rs`).
//! Not here: what a result means (`completion.rs`), system calls (`kernel.rs` and below).

mod handles;

use std::collections::VecDeque;
use std::io;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use crate::bounce::Bounce;
use crate::completion::{Next, NoCall, OpState};
use crate::contract::{Completion, EngineConfig, Event, FileId, FileSpec, Op, OpError, Stats};
use crate::files::{FileTable, OpenFile};
use crate::kernel::{Call, Kernel, RawResult};
use crate::op_table::OpTable;
use crate::record::{Record, Recorder};

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
    /// Ops that wait for a bounce buffer, in order.
    waiting: VecDeque<u32>,
    /// Ops whose call found the kernel's queue full, in order.
    backlog: VecDeque<u32>,
    /// Scratch of `end_flush`.
    shared_flushes: Vec<u32>,
    /// Ops that ended outside `reap`.
    finished: VecDeque<(u32, Result<(), OpError>)>,
    stats: Stats,
    recorder: Option<Recorder>,
    drain_timeout: Duration,
}

impl<K: Kernel> Core<K> {
    pub fn new(kernel: K, config: &EngineConfig) -> Self {
        let queue = || VecDeque::with_capacity(config.depth as usize);
        Self {
            kernel,
            memory: Memory { ops: OpTable::new(config.depth), bounce: Bounce::default() },
            files: FileTable::default(),
            waiting: queue(),
            backlog: queue(),
            shared_flushes: Vec::with_capacity(config.depth as usize),
            finished: VecDeque::with_capacity(config.depth as usize),
            stats: Stats::default(),
            recorder: config.recorder.clone(),
            drain_timeout: config.drain_timeout,
        }
    }

    /// The caller has checked that there is room. What is in `op` is taken from where its maker wrote it, field by
    /// field: a copy of it all would wait for its stores.
    #[inline]
    fn push(&mut self, op: &mut Op) {
        let Some(file) = self.files.get_mut(op.file) else { panic!("{:?} is not attached", op.file) };
        file.in_flight += 1;
        let op = OpState::new(op, self.kernel.has_durable_writes());
        let Some((index, op)) = self.memory.ops.insert(op) else { return };
        if op.is_empty() {
            self.finished.push_back((index, Ok(())));
        } else if op.is_at_sync() {
            self.start(index);
        } else {
            self.issue(index);
        }
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
        let file = self.memory.ops.get_mut(index).map(|op| op.file);
        let file = file.and_then(|file| self.files.get_mut(file));
        file.is_none_or(|file| file.flushes.enter(index))
    }

    /// Queues the op's next call, behind those that wait already.
    #[inline]
    fn issue(&mut self, index: u32) {
        if !self.backlog.is_empty() || !self.try_issue(index) {
            self.backlog.push_back(index);
        }
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
            NoCall::NoBounce => self.waiting.push_back(index),
            NoCall::LostMemory => self.finished.push_back((index, Err(OpError::Errno(Errno::FAULT)))),
        }
    }

    fn issue_backlog(&mut self) {
        while let Some(&index) = self.backlog.front() {
            if !self.try_issue(index) {
                return;
            }
            self.backlog.pop_front();
        }
    }

    fn submit(&mut self) -> io::Result<()> {
        self.issue_backlog();
        self.kernel.submit()
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
        if let Some(recorder) = &self.recorder {
            recorder.completed(op.record, raw.result);
        }
        match op.on_result(raw.result, file, &self.memory.bounce, &mut self.stats) {
            Next::Call => self.start(index),
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
        let Some(op) = self.memory.ops.remove(index) else { return };
        if let Some(file) = self.files.get_mut(op.file) {
            file.in_flight -= 1;
        }
        if let Some(bounce) = op.bounce {
            self.memory.bounce.give_back(bounce);
            if let Some(next) = self.waiting.pop_front() {
                self.issue(next);
            }
        }
        let sync_failed = matches!(result, Err(OpError::Errno(_))) && op.is_at_sync();
        let OpState { token, stored_bytes, buffers, .. } = op;
        let completion = Completion { token, result, sync_failed, stored_bytes, buffers };
        events.push(Event::Completed(completion));
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.issue_backlog();
        let timeout = if self.finished.is_empty() { timeout } else { Some(Duration::ZERO) };
        self.kernel.wait(timeout)
    }

    fn arm(&mut self) -> io::Result<bool> {
        self.issue_backlog();
        Ok(self.kernel.arm()? && self.finished.is_empty())
    }

    /// `only`: ops on this file; `None`: all.
    fn cancel(&mut self, only: Option<FileId>) {
        let (ops, finished) = (&mut self.memory.ops, &mut self.finished);
        for not_started in [&mut self.waiting, &mut self.backlog] {
            not_started.retain(|&index| {
                let is_meant = ops.get_mut(index).is_some_and(|op| only.is_none_or(|only| op.file == only));
                if is_meant {
                    finished.push_back((index, Err(OpError::Cancelled)));
                }
                !is_meant
            });
        }
        for file in self.files.chosen_mut(only) {
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
        self.files.put(index, OpenFile::new(spec, target));
        Ok(FileId(id))
    }

    fn detach_file(&mut self, file: FileId) {
        let taken = self.files.take(file);
        assert!(taken.as_ref().is_some_and(|file| file.in_flight == 0), "{file:?} is in use or not attached");
        if let Some(taken) = taken {
            self.kernel.unregister_file(file.0, taken.target);
        }
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
#[path = "core_tests.rs"]
mod tests;
