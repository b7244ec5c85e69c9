//! Checks whether an op's next call fits its file's turn (`turn.rs`) and window (`window.rs`).

use super::files::OpenFile;
use super::op::OpState;
use super::turn::Submission;
use super::window::{self, Windows};

/// When an op's next call can be queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Admission {
    Now,
    NextTurn,
    /// The file's window is full. One of the file's calls must complete first.
    WithAResult,
}

/// Charges the call's cost to its file's turn and window if both have room.
#[inline]
pub(super) fn admit(
    windows: &mut Windows,
    submission: Submission,
    op: &mut OpState,
    file: &mut OpenFile,
) -> Admission {
    op.settle_stage(file);
    if !windows.are_kept {
        let is_now = file.turn.take(submission, op.cost_bytes(file));
        return if is_now { Admission::Now } else { Admission::NextTurn };
    }
    let room = windows.open(op.file, file);
    let cost = window::cost_bytes(op.call_bytes(file));
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
