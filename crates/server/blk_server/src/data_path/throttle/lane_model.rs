//! A loom model: three queues of a disk book units at once. Each unit that they get is paid for, and none is lost.

use loom::model::Builder;
use loom::sync::Arc as Shared;
use loom::thread;

use super::super::bucket::EPOCH;
use super::*;

const NOW: u64 = EPOCH + 1_000_000_000;
const MS: u64 = 1_000_000;
/// Units in the bucket.
const CREDIT: u64 = 1;

#[test]
fn units_of_three_queues_are_paid_for_and_one_that_is_given_back_is_used() {
    let mut model = Builder::new();
    // All interleavings with at most two preemptions.
    model.preemption_bound = Some(2);
    model.check(|| {
        let bucket = Arc::new(Bucket::new(1000, CREDIT));
        let lane = Shared::new(Lane::new(1, (1, 1), 1000, vec![Arc::clone(&bucket)]));
        let queue = |gives_back: bool| {
            let lane = Shared::clone(&lane);
            move || {
                let is_granted = lane.reach(lane.book(u64::MAX).end, NOW).is_ok();
                if is_granted && gives_back {
                    lane.give_back(1);
                }
                is_granted
            }
        };
        let threads = [thread::spawn(queue(false)), thread::spawn(queue(true))];
        let mine = queue(false)();
        let [other, giver] = threads.map(|thread| thread.join().unwrap());
        let given_back = u64::from(giver);
        // The queues can use the credit, the unit of this instant, and the unit that was given back.
        let used = u64::from(mine) + u64::from(other);
        assert!(used + given_back <= CREDIT + 1 + given_back, "{used} used, {given_back} given back");
        // Each unit that was granted, and a turn that waits for its slot, is booked in the bucket exactly once.
        let granted = lane.granted.load(Relaxed) - given_back;
        let waits = u64::from(lane.turn.load(Relaxed) != NONE);
        assert_eq!(bucket.paid_at(), NOW - CREDIT * MS + (granted + waits) * MS);
        // Two turns later, all three bookings are granted.
        assert_eq!(lane.reach(3, NOW + 2 * MS), Ok(()));
    });
}
