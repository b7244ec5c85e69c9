//! Loom models: three threads book, give back and change a bucket in any order, and nothing that was booked is lost.

use loom::model::Builder;
use loom::sync::Arc as Shared;
use loom::thread;

use super::*;

const NOW: u64 = EPOCH + 1_000_000_000;
const MS: u64 = 1_000_000;

fn model() -> Builder {
    let mut model = Builder::new();
    // All interleavings with at most three preemptions.
    model.preemption_bound = Some(3);
    model
}

#[test]
fn bookings_of_three_threads_are_paid_one_after_the_other_and_one_that_is_given_back_counts_no_more() {
    model().check(|| {
        let bucket = Shared::new(Bucket::new(1000, 0));
        let book = |gives_back: bool| {
            let bucket = Shared::clone(&bucket);
            move || {
                let slot = bucket.book(MS, NOW);
                if gives_back {
                    bucket.give_back(MS);
                }
                slot
            }
        };
        let threads = [thread::spawn(book(false)), thread::spawn(book(true))];
        let mine = book(false)();
        let [first, _] = threads.map(|thread| thread.join().unwrap());
        // No slot is earlier than it would be without the third booking. A slot may be later if that booking was given
        // back afterwards.
        assert!(first.min(mine) >= NOW && first.max(mine) >= NOW + MS);
        assert_eq!(bucket.paid_at(), NOW + 2 * MS);
    });
}

#[test]
fn change_during_bookings_keeps_what_was_booked_before_it() {
    model().check(|| {
        let old = Shared::new(Bucket::new(1000, 0));
        let new = Shared::new(Bucket::new(2000, 0));
        old.book(5 * MS, NOW);
        let change = {
            let (old, new) = (Shared::clone(&old), Shared::clone(&new));
            move || new.take_over(old.paid_at(), NOW)
        };
        let book = |bucket: &Shared<Bucket>| {
            let bucket = Shared::clone(bucket);
            move || {
                bucket.book(MS, NOW);
            }
        };
        let threads = [thread::spawn(change), thread::spawn(book(&old))];
        book(&new)();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        let paid_at = new.paid_at();
        assert!((NOW + 5 * MS..=NOW + 7 * MS).contains(&paid_at), "{}", paid_at - NOW);
    });
}
