//! A loom model: every refused request gets its room once there is some. loom reports a lost signal as a deadlock.

use loom::model::Builder;
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

use super::*;

/// The eventfd that every worker watches: each worker remembers that it was written.
struct Workers([(Mutex<bool>, Condvar); 2]);

impl Workers {
    fn new() -> Self {
        Self([(); 2].map(|()| (Mutex::new(false), Condvar::new())))
    }

    fn sleep(&self, worker: usize) {
        let (written, woken) = &self.0[worker];
        let mut written = written.lock().unwrap();
        while !*written {
            written = woken.wait(written).unwrap();
        }
        *written = false;
    }
}

impl Signal for Workers {
    fn signal(&self) {
        for (written, woken) in &self.0 {
            *written.lock().unwrap() = true;
            woken.notify_one();
        }
    }
}

/// Reserves as soon as there is room, like a worker that has nothing else to do.
fn reserve(bytes: &InFlightBytes<Workers>, worker: usize, len_bytes: u64) {
    while !bytes.try_reserve(len_bytes) {
        bytes.signal.sleep(worker);
    }
}

fn model(check: impl Fn() + Sync + Send + 'static) {
    let mut model = Builder::new();
    // All interleavings with at most three preemptions. More would take hours.
    model.preemption_bound = Some(3);
    model.check(check);
}

#[test]
fn refused_worker_gets_room_when_another_workers_request_completes() {
    model(|| {
        let bytes = Arc::new(InFlightBytes::new(Workers::new()));
        assert!(bytes.try_reserve(MAX_BYTES));
        let callback = {
            let bytes = Arc::clone(&bytes);
            thread::spawn(move || bytes.release(MAX_BYTES))
        };
        reserve(&bytes, 0, 1);
        callback.join().unwrap();
    });
}

#[test]
fn two_workers_that_each_need_all_room_get_it_in_turn() {
    model(|| {
        let bytes = Arc::new(InFlightBytes::new(Workers::new()));
        let other = {
            let bytes = Arc::clone(&bytes);
            thread::spawn(move || {
                reserve(&bytes, 1, MAX_BYTES);
                bytes.release(MAX_BYTES);
            })
        };
        reserve(&bytes, 0, MAX_BYTES);
        bytes.release(MAX_BYTES);
        other.join().unwrap();
        assert_eq!(bytes.bytes.load(Ordering::Relaxed), 0);
    });
}
