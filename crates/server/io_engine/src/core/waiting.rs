//! Ops whose next call cannot be queued yet, and the events that let them continue.
//!
//! | what the op waits for | where the op waits | what lets the op continue |
//! |---|---|---|
//! | its file's next turn (`turn.rs`) | its file's wait queue | the next submission |
//! | room in its file's window (`window.rs`) | its file's wait queue | a result of a call of its file |
//! | a bounce buffer (`bounce.rs`) | `OpenFile::waiting` | an op that returns its bounce buffer |
//! | room in the backend's queue | `OpenFile::backlog` | the next `submit` or `wait` |

use super::Core;
use super::admission::{Admission, admit};
use crate::backend::IoBackend;
use crate::engine::FileId;

impl<B: IoBackend> Core<B> {
    #[cold]
    pub(super) fn line_up(&mut self, index: u32) {
        let id = self.memory.ops.at(index).file;
        let file = self.files.at(id);
        if !file.turn.has_line() {
            self.lines.push_back(id);
        }
        file.turn.line_up(index, &mut self.memory.ops);
    }

    #[cold]
    pub(super) fn is_behind_others(&mut self, index: u32) -> bool {
        !self.file_of(index).backlog.is_empty()
    }

    #[cold]
    pub(super) fn put_off(&mut self, index: u32) {
        self.file_of(index).backlog.push_back(index);
        self.backlogged += 1;
    }

    /// Queues calls that could not be queued before.
    #[inline]
    pub(super) fn issue_rest(&mut self) {
        if self.backlogged > 0 {
            self.issue_backlogs();
        }
        if !self.lines.is_empty() {
            self.issue_lines();
        }
    }

    /// If the backend refuses one file's calls, the other files' calls are still tried.
    #[cold]
    fn issue_backlogs(&mut self) {
        for file in self.files_in_turn() {
            while let Some(&index) = self.files.get_mut(file).and_then(|file| file.backlog.front()) {
                if !self.try_issue(index) {
                    break;
                }
                self.files.at(file).backlog.pop_front();
                self.backlogged -= 1;
            }
        }
    }

    /// Called after an op returned its bounce buffer.
    #[cold]
    pub(super) fn issue_waiting(&mut self) {
        for file in self.files_in_turn() {
            // Counts the free buffers in `room`, because an op in the wait queue takes its buffer only in its turn.
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

    /// All files, starting with a different one each time.
    fn files_in_turn(&mut self) -> impl Iterator<Item = FileId> + use<B> {
        let (count, first) = (self.files.places(), self.first);
        self.first = (first + 1) % count.max(1);
        #[allow(clippy::cast_possible_truncation)] // file numbers have 32 bits
        (0..count).map(move |turn| FileId(((first + turn) % count) as u32))
    }

    /// Called when the kernel has no call of the op in flight.
    #[cold]
    pub(super) fn leave_window(&mut self, index: u32) {
        let op = self.memory.ops.at(index);
        self.windows.give_back(op, self.files.at(op.file));
    }

    /// Queues calls of the waiting ops until each file's turn or window is full.
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

    /// Returns whether ops of this file still wait.
    fn issue_line(&mut self, id: FileId) -> bool {
        while let Some(file) = self.files.get_mut(id)
            && let Some(first) = file.turn.first()
        {
            match admit(&mut self.windows, self.submission, self.memory.ops.at(first), file) {
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

    /// Whether the next submission can start a waiting op. An op that waits for its file's window needs a result first,
    /// and a result wakes the worker. Called after `issue_rest`.
    pub(super) fn has_due_lines(&self) -> bool {
        !self.lines.is_empty() && self.turns_are_due
    }
}
