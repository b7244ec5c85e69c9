//! Models of two threads and the queued lock, with a bound on preemptions.
//!
//! Each model runs with both futexes (`platform.rs`). The limit of polls is 0, so that threads sleep whenever they
//! can, or 1, so that they also get the lock without sleeping.
//! See also: three threads (`three.rs`).

use super::platform::{self, Futex, PAST, SOON, Spurious, Strict};
use super::rig::{
    Ahead, Guarded, Handing, Interleavings, Looking, Napping, Passing, ServingTheAwake, assert_happened,
    check,
};
use crate::{Event, Policy};

fn both_lock_twice<P: Policy, F: Futex>(which: Interleavings) {
    check(which, || {
        let guarded = Guarded::<P, F>::new();
        let other = guarded.spawn(1, |theirs| {
            theirs.locked_add_one();
            theirs.locked_add_one();
        });
        platform::tick(); // ends naps and timed waits
        guarded.locked_add_one();
        guarded.locked_add_one();
        other.join().unwrap();
        guarded.assert_done(4);
    });
    assert_happened(&[Event::Queued]);
}

fn one_tries_twice<P: Policy, F: Futex>(which: Interleavings) {
    check(which, || {
        let guarded = Guarded::<P, F>::new();
        let other = guarded.spawn(1, Guarded::locked_add_one);
        platform::tick(); // ends naps and timed waits
        let tried = u32::from(guarded.try_add_one()) + u32::from(guarded.try_add_one());
        other.join().unwrap();
        guarded.assert_done(1 + tried);
    });
}

/// The holder's timing decides whether the second attempt reuses the node of the first or takes another.
fn one_gives_up_and_comes_again<P: Policy, F: Futex>(which: Interleavings) {
    check(which, || {
        let guarded = Guarded::<P, F>::new();
        let other = guarded.spawn(1, |theirs| {
            let in_time = u32::from(theirs.add_one_before(SOON));
            theirs.locked_add_one();
            in_time
        });
        platform::tick(); // ends naps and timed waits
        guarded.locked_add_one();
        guarded.locked_add_one();
        let in_time = other.join().unwrap();
        guarded.assert_done(3 + in_time);
    });
    assert_happened(&[Event::Queued, Event::TimedOut]);
}

fn one_is_late_from_the_beginning<P: Policy, F: Futex>(which: Interleavings) {
    check(which, || {
        let guarded = Guarded::<P, F>::new();
        let other = guarded.spawn(1, |theirs| u32::from(theirs.add_one_before(PAST)));
        platform::tick(); // ends naps and timed waits
        guarded.locked_add_one();
        guarded.locked_add_one();
        let in_time = other.join().unwrap();
        guarded.assert_done(2 + in_time);
    });
    assert_happened(&[Event::TimedOut]);
}

fn one_hands_over<P: Policy, F: Futex>(which: Interleavings) {
    check(which, || {
        let guarded = Guarded::<P, F>::new();
        let other = guarded.spawn(1, |theirs| {
            theirs.locked_add_one();
            theirs.locked_add_one_fairly();
        });
        platform::tick(); // ends naps and timed waits
        guarded.locked_add_one_fairly();
        guarded.locked_add_one();
        other.join().unwrap();
        guarded.assert_done(4);
    });
    assert_happened(&[Event::Queued]);
}

/// Each thread borrows a common node.
fn neither_has_nodes<P: Policy, F: Futex>(which: Interleavings) {
    check(which, || {
        let guarded = Guarded::<P, F>::new();
        platform::leave();
        let other = guarded.spawn(1, |theirs| {
            platform::leave();
            theirs.locked_add_one();
        });
        platform::tick(); // ends naps and timed waits
        guarded.locked_add_one();
        guarded.locked_add_one();
        other.join().unwrap();
        guarded.assert_done(3);
    });
    assert_happened(&[Event::Queued, Event::NoNode]);
}

/// Runs a policy with both futexes. The numbers in a module's name are the policy's parameters: how often newcomers
/// may pass, and how many polls come before sleep.
macro_rules! models {
    ($($name:ident: $policy:ty, $which:ident($($bound:expr),*);)*) => {
        $(mod $name {
            use super::*;

            type Chosen = $policy;
            const WHICH: Interleavings = Interleavings::$which($($bound),*);

            #[test]
            fn two_that_lock_twice_never_meet_and_both_finish() {
                both_lock_twice::<Chosen, Strict>(WHICH);
                assert_happened(&[Event::Halted, Event::Kicked]);
            }
            #[test]
            fn two_that_lock_twice_never_meet_with_spurious_wakes() {
                both_lock_twice::<Chosen, Spurious>(WHICH);
                assert_happened(&[Event::Halted]);
            }
            #[test]
            fn try_lock_beside_lock_never_meets_it_and_counts_what_it_did() {
                one_tries_twice::<Chosen, Strict>(WHICH);
            }
            #[test]
            fn waiter_that_gives_up_leaves_a_lock_that_works() {
                one_gives_up_and_comes_again::<Chosen, Strict>(WHICH);
            }
            #[test]
            fn waiter_that_is_late_leaves_a_lock_that_works() {
                one_is_late_from_the_beginning::<Chosen, Strict>(WHICH);
            }
            #[test]
            fn fair_release_among_others_loses_nobody() {
                one_hands_over::<Chosen, Strict>(WHICH);
            }
            #[test]
            fn fair_release_among_others_orders_what_was_done_with_spurious_wakes() {
                one_hands_over::<Chosen, Spurious>(WHICH);
            }
            #[test]
            fn threads_without_nodes_borrow_them() {
                neither_has_nodes::<Chosen, Strict>(WHICH);
            }
        })*
    };
}

models! {
    fifo_0: Handing<0>, Preempted(5, 6);
    fifo_1: Handing<1>, Preempted(5, 5);
    fair_1_0: ServingTheAwake<1, 0>, Preempted(2, 3);
    fair_1_1: ServingTheAwake<1, 1>, Preempted(3, 3);
    hybrid_1_0: Passing<1, 0>, Preempted(3, 3);
    hybrid_1_1: Passing<1, 1>, Preempted(3, 3);
    hybrid_2_1: Passing<2, 1>, Preempted(3, 3);
    hybrid_naps: Napping<1>, Preempted(3, 3);
    hybrid_looks: Looking<1>, Preempted(3, 3);
    ahead_0: Ahead<0>, Preempted(3, 4);
    ahead_1: Ahead<1>, Preempted(2, 3);
}
