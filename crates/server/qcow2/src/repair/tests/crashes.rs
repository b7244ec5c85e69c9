//! A loss of power after each call of a repair: the image is not worse than before, and can be repaired.

use fastrand::Rng;
use xtask::sizes::Size;

use crate::repair::Scope;
use crate::repair::tests::damage::{Damaged, repairable};
use crate::repair::tests::rig::{Call, assert_not_worse, run};
use crate::write::tests::disk::{Content, Item};
use crate::write::tests::images::Kind;

/// With so many unsynced sectors, all subsets are tried.
const EXHAUSTIVE: usize = 3;
/// With more, so many random subsets.
const DRAWS: Size<usize> = Size { smoke: 3, full: 40 };

/// The files that power losses may leave after each of the calls but the first `skipped`.
fn crashes(before: &Content, calls: &[Call], skipped: usize, rng: &mut Rng) -> Vec<Content> {
    let (mut durable, mut unsynced, mut all) = (before.clone(), Vec::<Item>::new(), Vec::new());
    for (at, call) in calls.iter().enumerate() {
        unsynced.extend(call.iter().cloned());
        let with = |has: &mut dyn FnMut(usize) -> bool| {
            let mut content = durable.clone();
            let chosen = unsynced.iter().enumerate().filter(|(index, _)| has(*index));
            chosen.for_each(|(_, item)| content.apply(item));
            content
        };
        if at < skipped {
            // Only what these calls leave behind.
        } else if unsynced.len() <= EXHAUSTIVE {
            all.extend((0..1 << unsynced.len()).map(|subset: usize| with(&mut |at| subset & (1 << at) != 0)));
        } else {
            all.push(with(&mut |_| true));
            all.extend((0..DRAWS.now()).map(|_| with(&mut |_| rng.bool())));
        }
        if call.is_empty() {
            unsynced.iter().for_each(|item| durable.apply(item));
            unsynced.clear();
        }
    }
    all
}

#[test]
fn power_loss_at_any_instant_leaves_no_worse_image_and_a_second_repair_ends_it() {
    let mut rng = Rng::with_seed(1);
    for (what, image) in repairable() {
        for scope in [Scope::Leaks, Scope::All] {
            let before = image.content();
            let outcome = run(before.clone(), scope);
            let calls = outcome.disk.calls.borrow();
            for crashed in crashes(&before, &calls, 0, &mut rng) {
                assert_not_worse(&before, &crashed);
                let again = run(crashed, Scope::All);
                assert_eq!(again.sums()[2], (0, 0), "{what}: {:?}", again.left);
            }
        }
    }
}

/// A kill loses nothing, so the second repair reads what is not durable.
#[test]
fn power_loss_during_a_second_repair_after_a_kill_leaves_no_worse_image() {
    let mut rng = Rng::with_seed(2);
    for (what, image) in repairable() {
        for scopes in [[Scope::Leaks, Scope::All], [Scope::All, Scope::All], [Scope::All, Scope::Leaks]] {
            let before = image.content();
            let first = run(before.clone(), scopes[0]).disk.calls.take();
            for killed in 1..first.len() {
                let mut calls = first[..killed].to_vec();
                let mut now = before.clone();
                calls.iter().flatten().for_each(|item| now.apply(item));
                calls.extend(run(now, scopes[1]).disk.calls.take());
                for crashed in crashes(&before, &calls, killed, &mut rng) {
                    assert_not_worse(&before, &crashed);
                    let again = run(crashed, Scope::All);
                    assert_eq!(again.sums()[2], (0, 0), "{what}: {:?}", again.left);
                }
            }
        }
    }
}

/// A program that was killed may have written tables which are not durable yet.
#[test]
fn first_call_is_a_sync_also_before_marks_are_cleared() {
    let lens = |image: Damaged| {
        let calls = run(image.content(), Scope::All).disk.calls.take();
        calls.iter().map(Vec::len).collect::<Vec<_>>()
    };
    for (what, image) in repairable() {
        assert_eq!(lens(image).first(), Some(&0), "{what}");
    }
    let mut sound = Damaged::new(Kind::PLAIN);
    sound.bytes[79] |= 3;
    assert_eq!(lens(sound), [0, 1, 0]);
}
