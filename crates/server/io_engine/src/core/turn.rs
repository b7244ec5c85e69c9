//! Limits how much work one file's calls may add to one submission, and thereby how long other files' calls wait.
//!
//! `next call → cost → within the file's turn: queued | otherwise in the file's wait queue → the next submission`
//!
//! - One submission starts the calls of all files of an engine. A call on cached data copies the data during the
//!   submission, and no result arrives before the submission ends. Each call can therefore wait for the sum of all
//!   turns.
//! - An op's first call and its later calls are charged alike.
//! - A call costs the bytes that it copies plus [`CALL_BYTES`]. This limits time without reading a clock.
//! - A file that has used up its turn delays only its own later calls. The worker does not sleep while ops wait in a
//!   file's queue, so a file that is alone gets its next turn at once.
//!
//! `turn.rs` of `blk_server` limits how many requests a worker takes from each ring.

/// Bytes that one file's calls may copy in one submission if the calls are few: 50 µs at 10 GB/s.
pub(crate) const TURN_BYTES: u64 = 512 << 10;
/// Fixed cost of a call, in bytes.
const CALL_BYTES: u64 = 4 << 10;
/// Cost limit of one file's calls in one submission: [`TURN_BYTES`] in up to eight calls.
pub(crate) const TURN_COST: u64 = TURN_BYTES + 8 * CALL_BYTES;
/// Divisor of a byte's cost with `O_DIRECT`, which copies nothing.
pub(crate) const DIRECT_FRACTION: u64 = 4;

/// The end of a wait queue.
pub(crate) const NONE: u32 = u32::MAX;

/// The cost of a call that moves `moved_bytes`.
#[inline]
pub(crate) fn cost_bytes(moved_bytes: u64, is_direct: bool) -> u64 {
    CALL_BYTES + if is_direct { moved_bytes / DIRECT_FRACTION } else { moved_bytes }
}

/// Storage of the links of a file's wait queue: each op holds the index of the next one.
pub(crate) trait NextInLine {
    /// The link of the op at `index`.
    fn next_of(&mut self, index: u32) -> &mut u32;
}

/// The submission that is being filled.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Submission {
    number: u64,
    /// Cost limit of each file's calls in the submission.
    turn_bytes: u64,
}

impl Submission {
    pub fn first(turn_bytes: u64) -> Self {
        Self { number: 1, turn_bytes }
    }

    /// Begins the next submission after this one was submitted.
    #[inline]
    pub fn next(&mut self) {
        self.number += 1;
    }
}

/// One file's turn, and the queue of its ops that wait for the next turn.
#[derive(Debug)]
pub(crate) struct Turn {
    /// The submission that `left_bytes` refers to.
    number: u64,
    left_bytes: u64,
    first: u32,
    last: u32,
}

impl Turn {
    pub fn new() -> Self {
        Self { number: 0, left_bytes: 0, first: NONE, last: NONE }
    }

    /// Charges a call's cost if it fits the turn. The first call of a turn always fits.
    #[inline]
    pub fn take(&mut self, now: Submission, cost_bytes: u64) -> bool {
        if self.number != now.number {
            (self.number, self.left_bytes) = (now.number, now.turn_bytes);
        }
        let is_within = cost_bytes <= self.left_bytes || self.left_bytes == now.turn_bytes;
        if is_within {
            self.left_bytes = self.left_bytes.saturating_sub(cost_bytes);
        }
        is_within
    }

    #[inline]
    pub fn has_line(&self) -> bool {
        self.first != NONE
    }

    /// The op whose call is next.
    pub fn first(&self) -> Option<u32> {
        self.has_line().then_some(self.first)
    }

    /// Appends an op to the wait queue.
    pub fn line_up(&mut self, index: u32, ops: &mut impl NextInLine) {
        *ops.next_of(index) = NONE;
        if self.has_line() {
            *ops.next_of(self.last) = index;
        } else {
            self.first = index;
        }
        self.last = index;
    }

    /// Removes the first op from the wait queue.
    pub fn leave_line(&mut self, ops: &mut impl NextInLine) -> Option<u32> {
        let index = self.first()?;
        self.first = *ops.next_of(index);
        Some(index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn call_that_is_larger_than_a_turn_is_made_alone() {
        let (mut turn, mut now) = (Turn::new(), Submission::first(100));
        assert_eq!([turn.take(now, 300), turn.take(now, 1)], [true, false]);
        now.next();
        assert_eq!([turn.take(now, 60), turn.take(now, 60), turn.take(now, 40)], [true, false, true]);
    }

    #[test]
    fn call_on_cached_data_costs_its_bytes_and_a_direct_one_a_fraction() {
        let costs = [cost_bytes(0, false), cost_bytes(1 << 20, false), cost_bytes(1 << 20, true)];
        assert_eq!(costs, [CALL_BYTES, CALL_BYTES + (1 << 20), CALL_BYTES + (1 << 18)]);
    }
    #[test]
    fn turn_has_room_for_two_direct_calls_of_half_its_bytes_and_for_one_cached_call() {
        let takes = |cost: u64| {
            let (mut turn, now) = (Turn::new(), Submission::first(TURN_COST));
            (0..9).filter(|_| turn.take(now, cost)).count()
        };
        let most_direct_bytes = TURN_BYTES * DIRECT_FRACTION;
        assert_eq!(
            [most_direct_bytes, most_direct_bytes / 2].map(|bytes| takes(cost_bytes(bytes, true))),
            [1, 2]
        );
        assert_eq!([TURN_BYTES, TURN_BYTES / 2].map(|bytes| takes(cost_bytes(bytes, false))), [1, 2]);
    }
}
