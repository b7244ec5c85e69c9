//! Models of three threads and the queued lock, with a bound on preemptions: queues of two, waiters' order.
//!
//! See also: two threads (`two.rs`).

use super::platform::{self, Futex, SOON, Spurious, Strict, StrictInChild};
use super::rig::{Guarded, Handing, Interleavings, Passing, ServingTheAwake, assert_happened, check};
use crate::{Event, Policy};

fn all_lock_once<P: Policy, F: Futex>(which: Interleavings) {
    check(which, || {
        let guarded = Guarded::<P, F>::new();
        let second = guarded.spawn(1, Guarded::locked_add_one);
        let third = guarded.spawn(2, Guarded::locked_add_one);
        guarded.locked_add_one();
        second.join().unwrap();
        third.join().unwrap();
        guarded.assert_done(3);
    });
    assert_happened(&[Event::Queued, Event::Halted]);
}

fn one_of_three_gives_up<P: Policy, F: Futex>(which: Interleavings) {
    check(which, || {
        let guarded = Guarded::<P, F>::new();
        let second = guarded.spawn(1, |theirs| u32::from(theirs.add_one_before(SOON)));
        let third = guarded.spawn(2, Guarded::locked_add_one);
        platform::tick();
        guarded.locked_add_one();
        let in_time = second.join().unwrap();
        third.join().unwrap();
        guarded.assert_done(2 + in_time);
    });
    assert_happened(&[Event::Queued, Event::TimedOut]);
}

/// The main thread holds the lock until the second thread waits; the third comes later, and must not get the
/// lock first.
fn first_come_is_first_served<P: Policy, F: Futex>(which: Interleavings) {
    check(which, || {
        let guarded = Guarded::<P, F>::new();
        guarded.lock.acquire();
        let second = guarded.spawn(1, |theirs| {
            theirs.lock.acquire();
            let before = theirs.number();
            theirs.add_one();
            theirs.release();
            before
        });
        while !guarded.lock.is_wanted() {
            loom::thread::yield_now();
        }
        let third = guarded.spawn(2, Guarded::locked_add_one);
        guarded.release();
        third.join().unwrap();
        assert_eq!(second.join().unwrap(), 0, "the third thread got the lock before the second");
        guarded.assert_done(2);
    });
    assert_happened(&[Event::Queued]);
}

#[test]
fn three_that_are_handed_a_lock_never_meet_and_all_finish() {
    all_lock_once::<Handing<0>, Strict>(Interleavings::Preempted(3, 4));
}

#[test]
fn three_in_a_forked_child_take_nobody_for_left_behind() {
    all_lock_once::<Handing<0>, StrictInChild>(Interleavings::Preempted(3, 4));
}

#[test]
fn three_that_are_handed_a_lock_never_meet_with_spurious_wakes() {
    // With more preemptions, loom lets two threads that wake without a reason yield to each other for ever.
    all_lock_once::<Handing<1>, Spurious>(Interleavings::Preempted(2, 2));
}

#[test]
fn three_of_which_the_awake_are_served_never_meet_and_all_finish() {
    all_lock_once::<ServingTheAwake<1, 1>, Strict>(Interleavings::Preempted(2, 3));
}

#[test]
fn three_that_pass_each_other_never_meet_and_all_finish() {
    all_lock_once::<Passing<1, 1>, Strict>(Interleavings::Preempted(2, 3));
}

#[test]
fn waiter_that_gives_up_in_a_queue_that_is_handed_over_leaves_the_others_in_order() {
    one_of_three_gives_up::<Handing<0>, Strict>(Interleavings::Preempted(3, 4));
}

#[test]
fn waiter_that_gives_up_in_a_queue_with_an_heir_leaves_the_others_in_order() {
    one_of_three_gives_up::<Passing<1, 1>, Strict>(Interleavings::Preempted(2, 3));
}

#[test]
fn first_waiter_of_a_lock_that_is_handed_over_is_served_first() {
    first_come_is_first_served::<Handing<0>, Strict>(Interleavings::Preempted(3, 4));
}
