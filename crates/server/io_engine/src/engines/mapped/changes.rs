//! Changes of the tables that ops wait for: questions to the metadata thread of the disk, and its answers.
//!
//! `ask: a token with the slot → … → take_answers: is the op still there? → go_on`

use disk_image::volume::link::{Answer, Change, ChangeError, Done, Refused};
use rustix::io::Errno;

use super::MappedEngine;
use super::steps::Begun;
use crate::engine::OpError;

/// The metadata thread has ended.
const CLOSED: OpError = OpError::Errno(Errno::IO);

impl MappedEngine {
    /// Makes the op wait for a change.
    pub(super) fn ask(&mut self, slot: u32, change: Change) -> Begun {
        self.asked = self.asked.wrapping_add(1);
        let token = u64::from(self.asked) << 32 | u64::from(slot);
        // A guest that goes on must not see a change later.
        let may_leave = !matches!(change, Change::Zero { .. });
        let (state, disk) = self.op_and_disk(slot);
        let Some(member) = &mut disk.member else { unreachable!("only writable disks need changes") };
        match member.ask(token, change) {
            Ok(()) => {
                (state.asked, state.may_leave, state.is_waiting) = (Some(token), may_leave, true);
                state.pending += 1;
                Begun::Waits
            }
            Err(Refused::NoRoom) => Begun::Later,
            Err(Refused::Closed) => {
                state.fail(state.begun_bytes, CLOSED);
                Begun::Failed
            }
        }
    }

    /// Makes durable what a durable op depends on, once its pieces have ended.
    pub(super) fn make_durable(&mut self, slot: u32) -> Begun {
        let (state, disk) = self.op_and_disk(slot);
        let is_dirty = disk.member.as_ref().is_some_and(|member| member.is_dirty());
        let is_needed = state.work.is_durable() && !state.is_synced && state.failed.is_none();
        if !is_needed || !is_dirty {
            return Begun::Yes;
        }
        if state.cancelled {
            state.fail(state.begun_bytes, OpError::Cancelled);
            return Begun::Failed;
        }
        self.ask(slot, Change::Sync)
    }

    #[cold]
    pub(super) fn take_all_answers(&mut self) {
        #[allow(clippy::cast_possible_truncation)] // each is a file's number
        let disks = self.disks.len() as u32;
        for disk in 0..disks {
            let Some(attached) = &mut self.disks[disk as usize] else { continue };
            if attached.member.as_ref().is_some_and(|member| member.has_news()) {
                attached.read_news();
                attached.member.iter_mut().for_each(disk_image::volume::link::Member::take_news);
                self.take_answers(disk);
            }
        }
    }

    fn take_answers(&mut self, disk: u32) {
        while let Some(answer) = self.attached(disk).member.as_mut().and_then(|member| member.next_answer()) {
            self.on_answer(answer);
        }
        if self.attached(disk).member.as_ref().is_some_and(|member| member.is_closed()) {
            self.fail_waiting(disk);
        }
        self.go_on_in_line(disk);
    }

    fn on_answer(&mut self, Answer { token, result }: Answer) {
        #[allow(clippy::cast_possible_truncation)] // the slot
        let slot = token as u32;
        let op = &mut self.ops[slot as usize];
        if op.asked != Some(token) {
            // The op has ended, and its slot may have another one.
            return;
        }
        self.continued += 1;
        self.stop_waiting(slot);
        let (op, disk) = self.op_and_disk(slot);
        match result {
            Ok(Done::Loaded { slice, words }) => {
                let volume = std::sync::Arc::clone(&disk.volume);
                return self.go_on(slot, Some(volume.loaded(slice, &words)));
            }
            Ok(Done::Zeroed { to }) => {
                let done_bytes = to.min(op.offset_bytes + op.len_bytes).saturating_sub(op.at());
                op.begin_piece(done_bytes);
            }
            Ok(Done::Synced) => op.is_synced = true,
            Ok(Done::Claimed | Done::Merged(_)) => {}
            Err(error) => {
                op.sync_failed |= matches!(error, ChangeError::SyncFailed(_));
                op.fail(op.begun_bytes, op_error(error));
            }
        }
        self.go_on(slot, None);
    }

    fn stop_waiting(&mut self, slot: u32) {
        let op = &mut self.ops[slot as usize];
        (op.asked, op.is_waiting) = (None, false);
        op.pending -= 1;
    }

    /// Fails the ops that wait for answers of a thread that has ended.
    fn fail_waiting(&mut self, disk: u32) {
        #[allow(clippy::cast_possible_truncation)] // slots have 32 bits
        for slot in 0..self.ops.len() as u32 {
            let op = &mut self.ops[slot as usize];
            if op.file.0 == disk && op.asked.is_some() {
                op.fail(op.begun_bytes, CLOSED);
                self.stop_waiting(slot);
                self.go_on(slot, None);
            }
        }
    }

    /// Ends the cancelled ops that wait for changes, and those in line behind them.
    #[cold]
    pub(super) fn end_waiting(&mut self) {
        #[allow(clippy::cast_possible_truncation)] // slots have 32 bits
        for slot in 0..self.ops.len() as u32 {
            let op = &self.ops[slot as usize];
            if op.cancelled && op.asked.is_some() && op.may_leave {
                self.stop_waiting(slot);
                self.go_on(slot, None);
            }
        }
        self.go_on_in_all_lines();
    }
}

fn op_error(error: ChangeError) -> OpError {
    match error {
        ChangeError::Errno(errno) | ChangeError::SyncFailed(errno) => {
            OpError::Errno(Errno::from_raw_os_error(errno))
        }
        ChangeError::Damaged => OpError::Damaged,
    }
}
