//! Two threads and the queued lock, in all interleavings.
//!
//! Not here: three (`three.rs`).

use super::platform::{self, Futex, Modelled, SOON, Spurious, Strict};
use super::rig::{Guarded, Sleepy, assert_happened, exhaustively};
use crate::{Event, Policy};

fn both_lock_twice<P: Policy, F: Futex>() {
    exhaustively(|| {
        let guarded = Guarded::<P, F>::new();
        let other = guarded.spawn(1, |theirs| {
            theirs.locked_add_one();
            theirs.locked_add_one();
        });
        guarded.locked_add_one();
        guarded.locked_add_one();
        other.join().unwrap();
        guarded.assert_done(4);
    });
}

#[test]
fn stand_in_strict() {
    both_lock_twice::<Sleepy<0, 0>, Strict>();
}
#[test]
fn stand_in_spurious() {
    both_lock_twice::<Sleepy<0, 0>, Spurious>();
}
#[test]
fn stand_in_timed() {
    exhaustively(|| {
        let guarded = Guarded::<Sleepy<0, 0>, Strict>::new();
        let other = guarded.spawn(1, |theirs| theirs.add_one_before(SOON));
        platform::tick();
        guarded.locked_add_one();
        let got = u32::from(other.join().unwrap());
        guarded.assert_done(1 + got);
    });
}
