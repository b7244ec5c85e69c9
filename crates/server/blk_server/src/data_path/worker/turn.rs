//! The order in which a worker serves its queues, and how many requests it takes from one disk per pass.
//!
//! `kick → active → (a pass: disk after disk, queue after queue within the disk's budget) → inactive`
//!
//! - Each disk has one budget: a guest with 64 queues gets as much as a guest with one.
//! - Within a disk, the next pass starts with the queue after the one that was served last. Among the disks, it starts
//!   with the disk after the one with which this pass started.
//! - A spent budget delays no request for long: the worker starts the next pass at once.
//! - Memory is allocated when a queue joins, not when it is kicked.
//!
//! The engine has a similar budget for calls and resumed calls: `turn.rs` of `io_engine`.

use std::collections::VecDeque;

use virtqueue::MAX_QUEUE_SIZE;

/// Maximum number of requests of a disk per pass: two of the largest batches of a queue (`Engine::batch`).
const REQUESTS: usize = 64;
/// Maximum number of descriptors of a disk per pass: the number of pages in [`BYTES`].
const DESCRIPTORS: usize = 4 * REFUSED_DESCRIPTORS;
/// A refused chain costs as much budget as the longest chain.
pub(crate) const REFUSED_DESCRIPTORS: usize = MAX_QUEUE_SIZE as usize;
/// Maximum amount of a disk's data per pass. The engine limits how much of it is transferred at once.
const BYTES: u64 = 16 << 20;

/// A disk's remaining budget in this pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Budget {
    pub(crate) requests: usize,
    pub(crate) descriptors: usize,
    pub(crate) bytes: u64,
}

impl Budget {
    const FULL: Self = Self { requests: REQUESTS, descriptors: DESCRIPTORS, bytes: BYTES };

    #[inline]
    pub(crate) fn is_spent(&self) -> bool {
        self.requests == 0 || self.descriptors == 0 || self.bytes == 0
    }

    /// Counts one request with this many descriptors.
    #[inline]
    pub(crate) fn take(&mut self, descriptors: usize) {
        self.requests = self.requests.saturating_sub(1);
        self.descriptors = self.descriptors.saturating_sub(descriptors);
    }

    /// Records that there is no more room for the disk, so that the pass skips its other queues.
    #[inline]
    pub(crate) fn end(&mut self) {
        self.requests = 0;
    }

    #[inline]
    pub(crate) fn take_bytes(&mut self, bytes: u64) {
        self.bytes = self.bytes.saturating_sub(bytes);
    }
}

/// A disk with queues on this worker.
#[derive(Debug)]
struct DiskQueues {
    disk: u64,
    queues: usize,
    /// The active queues, the next one first.
    active: VecDeque<u32>,
}

/// The progress of a pass.
#[derive(Debug)]
pub(crate) struct Pass {
    disks_left: usize,
    /// Number of unserved queues of the current disk, which is the last one in `Turns::active`.
    queues_left: usize,
    pub(crate) budget: Budget,
}

/// The queues of one worker, by disk.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    disks: Vec<Option<DiskQueues>>,
    /// Indices of disks with active queues, the next disk first.
    active: VecDeque<usize>,
}

impl Turns {
    /// Adds a queue of `disk`. Returns the disk's index.
    pub(crate) fn join(&mut self, disk: u64) -> usize {
        let known = |place: &Option<DiskQueues>| place.as_ref().is_some_and(|known| known.disk == disk);
        let place = self.disks.iter().position(known).unwrap_or_else(|| self.add(disk));
        if let Some(disk) = &mut self.disks[place] {
            disk.queues += 1;
            disk.active.reserve(disk.queues - disk.active.len());
        }
        place
    }

    fn add(&mut self, disk: u64) -> usize {
        let place = self.disks.iter().position(Option::is_none).unwrap_or(self.disks.len());
        if place == self.disks.len() {
            self.disks.push(None);
        }
        self.disks[place] = Some(DiskQueues { disk, queues: 0, active: VecDeque::new() });
        self.active.reserve(self.disks.len() - self.active.len());
        place
    }

    /// Removes a queue.
    pub(crate) fn leave(&mut self, place: usize, queue: u32) {
        let Some(Some(disk)) = self.disks.get_mut(place) else { return };
        disk.active.retain(|&active| active != queue);
        disk.queues -= 1;
        if disk.active.is_empty() {
            self.active.retain(|&active| active != place);
        }
        self.disks[place].take_if(|disk| disk.queues == 0);
    }

    /// Makes an inactive queue active.
    pub(crate) fn activate(&mut self, place: usize, queue: u32) {
        let Some(Some(disk)) = self.disks.get_mut(place) else { return };
        if disk.active.is_empty() {
            self.active.push_back(place);
        }
        disk.active.push_back(queue);
    }

    /// Whether no queue is active.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.active.is_empty()
    }

    #[inline]
    pub(crate) fn begin(&mut self) -> Pass {
        let pass = Pass { disks_left: self.active.len(), queues_left: 0, budget: Budget::FULL };
        if pass.disks_left > 1 {
            // `next` rotates once more, so the pass starts with the second disk.
            self.active.rotate_left(1);
        }
        pass
    }

    /// The next queue of the pass.
    #[inline]
    pub(crate) fn next(&mut self, pass: &mut Pass) -> Option<u32> {
        while pass.queues_left == 0 || pass.budget.is_spent() {
            pass.disks_left = pass.disks_left.checked_sub(1)?;
            self.active.rotate_left(1);
            pass.queues_left = self.current()?.active.len();
            pass.budget = Budget::FULL;
        }
        pass.queues_left -= 1;
        let queues = &mut self.current()?.active;
        queues.rotate_left(1);
        queues.back().copied()
    }

    /// Makes the queue that [`Turns::next`] returned last inactive until it is activated again.
    pub(crate) fn rest(&mut self, pass: &mut Pass) {
        let Some(disk) = self.current() else { return };
        disk.active.pop_back();
        if disk.active.is_empty() {
            self.active.pop_back();
            pass.queues_left = 0;
        }
    }

    /// The disk that is being served.
    #[inline]
    fn current(&mut self) -> Option<&mut DiskQueues> {
        let place = *self.active.back()?;
        self.disks[place].as_mut()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: u64 = 10;
    const B: u64 = 11;

    /// Queues 0 to 3 belong to disk A, queue 4 to disk B.
    fn two_disks() -> Turns {
        let mut turns = Turns::default();
        let places = [A, A, A, A, B].map(|disk| turns.join(disk));
        (0..).zip(places).for_each(|(queue, place)| turns.activate(place, queue));
        turns
    }

    /// Returns the queues in the order in which a pass serves them, if each uses `requests` of the budget.
    fn pass(turns: &mut Turns, requests: usize) -> Vec<u32> {
        let mut pass = turns.begin();
        let mut order = Vec::new();
        while let Some(queue) = turns.next(&mut pass) {
            pass.budget.requests = pass.budget.requests.saturating_sub(requests);
            order.push(queue);
        }
        order
    }

    #[test]
    fn disks_take_turns_and_in_a_disks_turn_its_queues() {
        let mut turns = two_disks();
        assert_eq!(pass(&mut turns, 1), [4, 0, 1, 2, 3]);
        assert_eq!(pass(&mut turns, 1), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn queues_of_one_disk_share_one_budget_and_none_is_left_out() {
        let mut turns = two_disks();
        let half = REQUESTS / 2;
        assert_eq!(pass(&mut turns, half), [4, 0, 1]);
        assert_eq!(pass(&mut turns, half), [2, 3, 4]);
        assert_eq!(pass(&mut turns, half), [4, 0, 1]);
    }

    #[test]
    fn sixty_four_queues_take_no_more_of_a_pass_than_one() {
        let mut turns = Turns::default();
        (0..64).for_each(|queue| {
            let place = turns.join(A);
            turns.activate(place, queue);
        });
        let place = turns.join(B);
        turns.activate(place, 64);
        let served = pass(&mut turns, REQUESTS);
        assert_eq!(served, [64, 0]);
    }

    #[test]
    fn descriptors_and_bytes_end_a_turn_too() {
        let mut turns = two_disks();
        let mut pass = turns.begin();
        assert_eq!(turns.next(&mut pass), Some(4));
        assert_eq!(turns.next(&mut pass), Some(0));
        pass.budget.take(DESCRIPTORS);
        assert_eq!(turns.next(&mut pass), None);
        let mut pass = turns.begin();
        assert_eq!(turns.next(&mut pass), Some(1));
        pass.budget.take_bytes(BYTES + 1);
        assert_eq!(turns.next(&mut pass), Some(4));
        assert!(!pass.budget.is_spent());
    }

    #[test]
    fn queues_of_a_disk_without_room_are_asked_one_in_a_pass_and_each_in_its_turn() {
        let mut turns = two_disks();
        let looked_at = |turns: &mut Turns| {
            let (mut pass, mut order) = (turns.begin(), Vec::new());
            while let Some(queue) = turns.next(&mut pass) {
                pass.budget.end();
                order.push(queue);
            }
            order
        };
        assert_eq!([(); 4].map(|()| looked_at(&mut turns)), [[4, 0], [1, 4], [4, 2], [3, 4]]);
    }

    #[test]
    fn queues_at_rest_are_left_out_until_they_are_active_again() {
        let mut turns = two_disks();
        let mut cursor = turns.begin();
        while let Some(queue) = turns.next(&mut cursor) {
            if queue != 2 {
                turns.rest(&mut cursor);
            }
        }
        assert_eq!(pass(&mut turns, 1), [2]);
        turns.activate(1, 4);
        assert_eq!(pass(&mut turns, 1), [4, 2]);
    }

    #[test]
    fn place_of_a_disk_without_queues_is_used_again() {
        let mut turns = two_disks();
        (0..4).for_each(|queue| turns.leave(0, queue));
        assert_eq!(pass(&mut turns, 1), [4]);
        turns.leave(1, 4);
        assert!(turns.is_empty());
        assert_eq!([turns.join(B), turns.join(A)], [0, 1]);
    }
}
