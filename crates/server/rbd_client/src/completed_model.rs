//! A loom model: the lane gets each completed request once, with what its callback stored, and misses no signal. loom
//! reports a lost signal as a deadlock.

use loom::cell::UnsafeCell;
use loom::model::Builder;
use loom::sync::atomic::AtomicUsize;
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

use super::*;

/// An eventfd: remembers that it was written.
struct Sticky(Mutex<bool>, Condvar);

impl Sticky {
    fn sleep(&self) {
        let mut written = self.0.lock().unwrap();
        while !*written {
            written = self.1.wait(written).unwrap();
        }
        *written = false;
    }
}

impl Signal for Sticky {
    fn signal(&self) {
        *self.0.lock().unwrap() = true;
        self.1.notify_one();
    }
}

/// A request. loom notices if its result is read while the callback stores it.
struct Slot {
    number: usize,
    result: UnsafeCell<usize>,
    freed: Arc<AtomicUsize>,
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.freed.fetch_add(1, Ordering::Relaxed);
    }
}

type List = CompletedList<Slot, Sticky>;

fn request(number: usize, freed: &Arc<AtomicUsize>) -> Box<Entry<Slot>> {
    Entry::new(Slot { number, result: UnsafeCell::new(0), freed: Arc::clone(freed) })
}

/// A thread of librbd.
fn complete(list: &List, entry: Box<Entry<Slot>>) -> Option<Box<Entry<Slot>>> {
    // SAFETY: 1. loom checks that nothing else uses the cell.
    entry.value.result.with_mut(|result| unsafe { *result = entry.value.number + 100 });
    list.push(entry)
}

fn result(entry: &Entry<Slot>) -> usize {
    // SAFETY: 1. loom checks that nothing stores to the cell.
    entry.value.result.with(|result| unsafe { *result })
}

/// Collects results until there are `count`, like a worker that sleeps whenever it found nothing.
fn collect(list: &List, count: usize, mut each: impl FnMut(Box<Entry<Slot>>)) {
    let mut found = 0;
    while found < count {
        let before = found;
        list.take(|entry| {
            found += 1;
            assert_eq!(result(&entry), entry.value.number + 100);
            each(entry);
        });
        if found == before {
            list.signal.sleep();
        }
    }
}

fn model(check: impl Fn(&Arc<List>, &Arc<AtomicUsize>) + Sync + Send + 'static) {
    let mut model = Builder::new();
    // All interleavings with at most three preemptions. More would take hours.
    model.preemption_bound = Some(3);
    model.check(move || {
        let list = Arc::new(List::new(Sticky(Mutex::new(false), Condvar::new())));
        check(&list, &Arc::new(AtomicUsize::new(0)));
    });
}

#[test]
fn lane_gets_each_request_of_two_threads_once() {
    model(|list, freed| {
        let threads = [0, 1].map(|number| {
            let (list, entry) = (Arc::clone(list), request(number, freed));
            thread::spawn(move || assert!(complete(&list, entry).is_none()))
        });
        let mut seen = [0; 2];
        collect(list, 2, |entry| seen[entry.value.number] += 1);
        assert_eq!(seen, [1, 1]);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        list.take(|_| panic!("a third result"));
    });
}

#[test]
fn entry_that_is_used_again_at_once_is_taken_once_for_each_use() {
    model(|list, freed| {
        let other = {
            let (list, entry) = (Arc::clone(list), request(1, freed));
            thread::spawn(move || assert!(complete(&list, entry).is_none()))
        };
        let mut seen = [0; 2];
        assert!(complete(list, request(0, freed)).is_none());
        let mut again = Vec::new();
        list.take(|entry| {
            seen[entry.value.number] += 1;
            if entry.value.number == 0 {
                again.push(entry);
            }
        });
        // The other thread may have seen this entry at the top before.
        again.drain(..).for_each(|entry| assert!(complete(list, entry).is_none()));
        let left = 3 - seen[0] - seen[1];
        collect(list, left, |entry| seen[entry.value.number] += 1);
        assert_eq!(seen, [2, 1]);
        other.join().unwrap();
    });
}

#[test]
fn each_request_is_freed_once_although_the_lane_goes_away_meanwhile() {
    model(|list, freed| {
        let threads = [0, 1].map(|number| {
            let (list, entry) = (Arc::clone(list), request(number, freed));
            thread::spawn(move || drop(complete(&list, entry)))
        });
        list.take(drop);
        list.close(drop);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(freed.load(Ordering::Relaxed), 2);
    });
}
