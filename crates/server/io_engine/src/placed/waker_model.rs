//! A loom model: no interleaving loses a wake-up. loom reports a lost wake-up as a deadlock.

use loom::model::Builder;
use loom::sync::atomic::AtomicUsize;
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

use super::*;

/// An eventfd: remembers that it was written to.
struct Sticky(Mutex<bool>, Condvar);

impl Sticky {
    fn new() -> Self {
        Self(Mutex::new(false), Condvar::new())
    }

    fn sleep(&self) {
        let mut sounded = self.0.lock().unwrap();
        while !*sounded {
            sounded = self.1.wait(sounded).unwrap();
        }
        *sounded = false;
    }
}

impl Signal for Sticky {
    fn signal(&self) {
        *self.0.lock().unwrap() = true;
        self.1.notify_one();
    }
}

fn sleeper(waker: &Waker<Sticky>, published: &[AtomicUsize], all: usize) {
    let seen = || published.iter().map(|tail| tail.load(Ordering::Acquire)).sum::<usize>();
    let mut have = seen();
    while have < all {
        waker.begin_sleep();
        if seen() == have {
            waker.signal.sleep();
        }
        waker.end_sleep();
        have = seen();
    }
}

fn publisher(waker: &Waker<Sticky>, tail: &AtomicUsize, times: usize) {
    for count in 1..=times {
        tail.store(count, Ordering::Release);
        waker.wake();
    }
}

fn check(publishers: usize, times: usize) {
    let mut model = Builder::new();
    // All interleavings with at most three preemptions. More would take hours.
    model.preemption_bound = Some(3);
    model.check(move || {
        let shared = Arc::new((Waker::new(Sticky::new()), [AtomicUsize::new(0), AtomicUsize::new(0)]));
        let threads: Vec<_> = (0..publishers)
            .map(|index| {
                let shared = Arc::clone(&shared);
                thread::spawn(move || publisher(&shared.0, &shared.1[index], times))
            })
            .collect();
        sleeper(&shared.0, &shared.1, publishers * times);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

#[test]
fn sleeper_finds_everything_that_one_thread_publishes() {
    check(1, 2);
}

#[test]
fn sleeper_finds_everything_that_two_threads_publish() {
    check(2, 1);
}
