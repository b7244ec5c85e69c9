//! Creation and drop of a core, attaching and detaching files, and cancellation.
//!
//! Dropping a core waits until the kernel no longer uses its memory. After a time limit the core leaks the memory: it
//! never frees memory that a call in flight may use.

use std::collections::VecDeque;
use std::io;
use std::time::Instant;

use super::bounce::Bounce;
use super::files::{FileTable, OpenFile};
use super::op_table::OpTable;
use super::recording::Recording;
use super::shares::Shares;
use super::turn::{Submission, TURN_COST};
use super::window::Windows;
use super::{Core, LEAST_OPS, Memory};
use crate::backend::IoBackend;
use crate::config::EngineConfig;
use crate::engine::{Engine, FileId, FileSpec, OpError, Stats};

impl<B: IoBackend> Core<B> {
    /// Makes an engine of `config.depth`. The thread that uses the engine must start it.
    pub fn over(backend: B, config: &EngineConfig) -> Self {
        Self {
            backend,
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
            recording: Recording::of(config),
            drain_timeout: config.drain_timeout,
        }
    }

    pub(super) fn attach(&mut self, spec: FileSpec) -> io::Result<FileId> {
        let alignment = spec.alignment;
        if !alignment.memory_bytes.is_power_of_two() || !alignment.offset_bytes.is_power_of_two() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "alignment is not a power of two"));
        }
        let index = self.files.next_index();
        let id = u32::try_from(index).map_err(|_| io::ErrorKind::QuotaExceeded)?;
        let target = self.backend.register_file(id, &spec)?;
        // Capacity for every file, so that queueing a file allocates nothing.
        self.lines.reserve(index + 1);
        let durable = self.backend.has_durable_writes(target);
        self.files.put(index, OpenFile::new(spec, target, durable));
        self.shares.attach(FileId(id));
        self.memory.bounce.shares.attach(FileId(id));
        self.make_places();
        Ok(FileId(id))
    }

    pub(super) fn detach(&mut self, file: FileId) {
        assert!(self.shares.used(file) == Some(0), "{file:?} is in use or not attached");
        self.shares.detach(file);
        self.memory.bounce.shares.detach(file);
        self.make_places();
        self.windows.forget(file);
        let taken = self.files.take(file);
        debug_assert_eq!(taken.window_used, 0, "{file:?} has calls");
        self.backend.unregister_file(file.0, taken.target);
    }

    /// Grows the op table to the size that the shares now allow.
    fn make_places(&mut self) {
        self.windows.are_kept = self.shares.disks() > 1;
        self.files.chosen_mut(None).for_each(|file| file.most_bytes = file.longest_call_bytes());
        let (disks, places) = (self.shares.disks(), self.shares.places());
        self.memory.ops.grow(places);
        self.finished.reserve((places as usize).saturating_sub(self.finished.len()));
        self.backend.expect(disks, places);
    }

    /// Cancels the ops on the file `only`, or all ops.
    pub(super) fn cancel(&mut self, only: Option<FileId>) {
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
            self.backend.cancel(self.memory.ops.name(index));
        }
    }

    fn has_calls_in_kernel(&mut self) -> bool {
        self.memory.ops.iter_mut().any(|(_, op)| op.in_kernel)
    }
}

impl<B: IoBackend> Drop for Core<B> {
    /// Cancels every op, and waits until the kernel no longer uses their memory.
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
            "I/O did not end in time: its memory stays allocated until this process ends"
        );
        std::mem::forget(std::mem::take(&mut self.memory));
    }
}
