//! Many readers and writers: a writer is alone, readers are inside only with readers, and both kinds get in.
//!
//! See also: the order of readers and writers (`tests/it/rwlock.rs`), forks.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Instant;

use fastrand::Rng;
use qspinlock::QueueRwLock;

use crate::rig::{self, CROWD_PER_CORE, Counted, soon, watched};

/// Two plain words that are equal whenever no writer is inside.
struct Pair {
    lock: QueueRwLock<Counted>,
    words: UnsafeCell<[u64; 2]>,
}

// SAFETY: the words are accessed only with the lock held; the test checks that this excludes.
unsafe impl Sync for Pair {}

impl std::fmt::Display for Pair {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.lock)
    }
}

impl Pair {
    const fn new() -> Self {
        Self { lock: QueueRwLock::new(), words: UnsafeCell::new([0; 2]) }
    }

    fn word(&self, at: usize) -> *mut u64 {
        // SAFETY: there are two words.
        unsafe { self.words.get().cast::<u64>().add(at) }
    }

    /// Both words must stay equal while this reader is inside.
    fn read(&self, rng: &mut Rng) {
        // SAFETY: no writer writes the word if the lock works.
        let first = unsafe { self.word(0).read_volatile() };
        rig::linger(rng);
        // SAFETY: as above.
        let second = unsafe { self.word(1).read_volatile() };
        if first != second {
            rig::end_with(&format_args!("a writer is inside with readers: {first} and {second}: {self}"));
        }
    }

    fn write(&self, rng: &mut Rng) {
        // SAFETY: no other thread accesses the word if the lock works.
        let count = unsafe { self.word(0).read_volatile() };
        // SAFETY: as above.
        unsafe { self.word(0).write_volatile(count + 1) };
        rig::linger(rng);
        // SAFETY: as above.
        let second = unsafe { self.word(1).read_volatile() };
        if second != count {
            rig::end_with(&format_args!("two writers are inside: {second} and {count}: {self}"));
        }
        // SAFETY: as above.
        unsafe { self.word(1).write_volatile(count + 1) };
    }

    fn read_somehow(&self, rng: &mut Rng) -> bool {
        let acquired = match rng.u8(..6) {
            0 => self.lock.try_read(),
            1 => self.lock.try_read_recursive(),
            2 => self.lock.read_before(soon(rng)),
            3 => self.lock.read_recursive_before(soon(rng)),
            _ => {
                self.lock.read();
                true
            }
        };
        if acquired {
            self.read(rng);
            // SAFETY: acquired above.
            unsafe { self.lock.release_read() };
        }
        acquired
    }

    /// Writes, and sometimes downgrades to a reader.
    fn write_somehow(&self, rng: &mut Rng) -> bool {
        let acquired = match rng.u8(..4) {
            0 => self.lock.try_write(),
            1 => self.lock.write_before(soon(rng)),
            _ => {
                self.lock.write();
                true
            }
        };
        if !acquired {
            return false;
        }
        self.write(rng);
        if rng.u8(..8) == 0 {
            // SAFETY: acquired above.
            unsafe { self.lock.downgrade() };
            self.read(rng);
            // SAFETY: downgraded above.
            unsafe { self.lock.release_read() };
        } else {
            // SAFETY: acquired above.
            unsafe { self.lock.release_write() };
        }
        true
    }
}

/// One visit in `writes_in` is a write.
fn torture(threads: usize, writes_in: u32) {
    let pairs = [const { Pair::new() }; 2];
    let end = rig::end();
    let [written, read] = [const { AtomicU64::new(0) }; 2];
    watched(&pairs, || {
        thread::scope(|scope| {
            for seed in 0..threads as u64 {
                let (pairs, written, read) = (&pairs, &written, &read);
                scope.spawn(move || {
                    let mut rng = Rng::with_seed(seed);
                    while Instant::now() < end {
                        let pair = &pairs[rng.usize(..2)];
                        if rng.u32(..writes_in) == 0 {
                            written.fetch_add(u64::from(pair.write_somehow(&mut rng)), Relaxed);
                        } else {
                            read.fetch_add(u64::from(pair.read_somehow(&mut rng)), Relaxed);
                        }
                    }
                });
            }
        });
    });
    println!("{threads} threads: {written:?} writes, {read:?} reads");
    // SAFETY: all threads have ended.
    let counted: u64 = pairs.iter().map(|pair| unsafe { pair.word(1).read() }).sum();
    assert_eq!(counted, written.into_inner());
    assert!(counted > 0 && read.into_inner() > 0);
    assert!(pairs.iter().all(|pair| !pair.lock.is_held() && pair.lock.try_write()));
}

#[test]
fn crowd_of_readers_and_few_writers_keeps_apart_and_all_finish() {
    torture(CROWD_PER_CORE * rig::cores(), 20);
}

#[test]
fn crowd_of_readers_and_as_many_writers_keeps_apart_and_all_finish() {
    torture(8 * rig::cores(), 2);
}
