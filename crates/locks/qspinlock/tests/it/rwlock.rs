//! The reader/writer locks with real threads: who may be inside together, who comes first, who times out.
//!
//! See also: all interleavings of a few threads (`src/model/rwlock.rs`), full counts (`src/rwlock/tests.rs`).
#![allow(missing_docs, clippy::unwrap_used)]
#![cfg(not(loom))]

use std::fmt::Debug;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::thread;
use std::time::Duration;

use lock_api::{RawRwLock, RawRwLockTimed, RwLock};
use qspinlock::{Clock, Deadline, QRwLock, RecursiveQRwLock, now};

const ROUNDS: u32 = if cfg!(miri) { 10 } else { 2_000 };
/// Tests only wait for this to end, so a slow machine does no harm.
const SOON: Duration = Duration::from_millis(20);

fn in_time(time: Duration) -> Deadline {
    let now = now(Clock::Monotonic);
    Deadline { at_ns: now.at_ns + u64::try_from(time.as_nanos()).unwrap(), ..now }
}

/// Waits until another thread has done something that shows only from outside.
fn until(mut is_so: impl FnMut() -> bool) {
    while !is_so() {
        thread::sleep(Duration::from_millis(1));
    }
}

/// Whether a writer is first in line.
fn writer_waits(lock: &impl Debug) -> bool {
    format!("{lock:?}").contains("writer_waits: true")
}

/// The same for the raw lock behind the data.
fn writer_waits_for<R: RawRwLock + Debug, T>(lock: &RwLock<R, T>) -> bool {
    // SAFETY: the raw lock is only read.
    writer_waits(unsafe { lock.raw() })
}

/// Two words that are equal unless a writer is changing them.
type Words = [u32; 2];

fn add_one(words: &mut Words) {
    words[0] += 1;
    thread::yield_now();
    words[1] += 1;
}

fn readers_are_inside_together<R: RawRwLock + Sync>() {
    let lock = RwLock::<R, _>::new(());
    let both_inside = Barrier::new(2);
    thread::scope(|scope| {
        (0..2).for_each(|_| {
            scope.spawn(|| {
                let _inside = lock.read();
                both_inside.wait(); // forever, if the other thread is kept out
            });
        });
    });
    assert!(!lock.is_locked());
}

fn writers_are_inside_alone<R: RawRwLock + Sync>(writers: u32, readers: u32) {
    let lock = RwLock::<R, Words>::new([0; 2]);
    let torn = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..writers {
            scope.spawn(|| (0..ROUNDS).for_each(|_| add_one(&mut lock.write())));
        }
        for _ in 0..readers {
            scope.spawn(|| {
                for _ in 0..ROUNDS {
                    let words = lock.read();
                    thread::yield_now();
                    torn.fetch_or(words[0] != words[1], SeqCst);
                }
            });
        }
    });
    assert!(!torn.load(SeqCst) && !lock.is_locked());
    assert_eq!(lock.into_inner(), [writers * ROUNDS; 2]);
}

fn trying_is_refused_where_waiting_would_wait<R: RawRwLock>() {
    let lock = RwLock::<R, _>::new(());
    let reader = lock.read();
    assert!(lock.try_write().is_none() && lock.try_read().is_some() && !lock.is_locked_exclusive());
    drop(reader);
    let writer = lock.write();
    assert!(lock.try_write().is_none() && lock.try_read().is_none() && lock.is_locked_exclusive());
    drop(writer);
    assert!(!lock.is_locked());
    assert!(lock.try_write().is_some());
    assert!(lock.try_read().is_some());
}

fn timed_reader_and_writer_give_up_and_the_lock_goes_on<R: RawRwLockTimed<Duration = Duration> + Sync>() {
    let lock = RwLock::<R, Words>::new([0; 2]);
    let writer = lock.write();
    thread::scope(|scope| {
        let late_reader = scope.spawn(|| lock.try_read_for(SOON).is_none());
        let late_writer = scope.spawn(|| lock.try_write_for(SOON).is_none());
        assert!(late_reader.join().unwrap() && late_writer.join().unwrap());
    });
    drop(writer);
    assert_eq!(*lock.try_read_for(SOON).unwrap(), [0; 2]);
    let reader = lock.read();
    assert!(thread::scope(|scope| scope.spawn(|| lock.try_write_for(SOON).is_none()).join().unwrap()));
    assert!(lock.try_read().is_some(), "a writer that gave up keeps no reader out");
    drop(reader);
    add_one(&mut lock.try_write_for(SOON).unwrap());
    assert_eq!(*lock.read(), [1; 2]);
}

macro_rules! contract {
    ($module:ident, $lock:ty) => {
        mod $module {
            #[test]
            fn readers_are_inside_together() {
                super::readers_are_inside_together::<$lock>();
            }
            #[test]
            fn writers_are_inside_alone() {
                super::writers_are_inside_alone::<$lock>(4, 0);
            }
            #[test]
            fn sixteen_threads_mixed_see_no_torn_words() {
                super::writers_are_inside_alone::<$lock>(6, 10);
            }
            #[test]
            fn trying_is_refused_where_waiting_would_wait() {
                super::trying_is_refused_where_waiting_would_wait::<$lock>();
            }
            #[test]
            fn timed_reader_and_writer_give_up_and_the_lock_goes_on() {
                super::timed_reader_and_writer_give_up_and_the_lock_goes_on::<$lock>();
            }
        }
    };
}

contract!(fair, qspinlock::QRwLock);
contract!(recursive, qspinlock::RecursiveQRwLock);

#[test]
fn lock_has_eight_bytes_and_is_made_in_a_constant() {
    static COUNT: qspinlock::RwLock<u32> = qspinlock::RwLock::new(1);
    *COUNT.write() += 1;
    assert_eq!(*COUNT.read(), 2);
    assert_eq!((size_of::<QRwLock>(), size_of::<RecursiveQRwLock>()), (8, 8));
}

#[test]
fn stream_of_readers_does_not_starve_a_writer() {
    let lock = qspinlock::RwLock::new(false);
    thread::scope(|scope| {
        // Each continues until the writer has been inside, and they overlap: some reader is always inside.
        for _ in 0..4 {
            scope.spawn(|| {
                loop {
                    let is_written = lock.read();
                    thread::yield_now();
                    if *is_written {
                        return;
                    }
                }
            });
        }
        *lock.write() = true;
    });
    assert!(*lock.read());
}

#[test]
fn stream_of_writers_does_not_starve_a_reader() {
    let lock = QRwLock::new();
    let has_read = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !has_read.load(SeqCst) {
                    lock.write();
                    thread::yield_now();
                    // SAFETY: acquired above.
                    unsafe { lock.release_write() };
                }
            });
        }
        lock.read();
        has_read.store(true, SeqCst);
        // SAFETY: acquired above.
        unsafe { lock.release_read() };
    });
    assert!(!lock.is_held());
}

#[test]
fn newcomer_reader_queues_behind_a_writer_that_waits() {
    let lock = qspinlock::RwLock::new(0);
    let reader = lock.read();
    thread::scope(|scope| {
        scope.spawn(|| *lock.write() += 1);
        until(|| writer_waits_for(&lock));
        assert!(lock.try_read().is_none());
        let newcomer = scope.spawn(|| *lock.read());
        drop(reader);
        assert_eq!(newcomer.join().unwrap(), 1, "the writer came first");
    });
}

#[test]
fn reader_that_is_inside_reads_again_while_a_writer_waits() {
    let lock = QRwLock::new();
    lock.read();
    thread::scope(|scope| {
        scope.spawn(|| {
            lock.write();
            // SAFETY: acquired above.
            unsafe { lock.release_write() };
        });
        until(|| writer_waits(&lock));
        assert!(!lock.try_read());
        lock.read_recursive();
        assert!(lock.try_read_recursive() && lock.read_recursive_before(in_time(SOON)));
        // SAFETY: acquired four times above.
        (0..4).for_each(|_| unsafe { lock.release_read() });
    });
    assert!(!lock.is_held());
}

#[test]
fn recursive_lock_is_read_again_through_lock_api_while_a_writer_waits() {
    let lock = RwLock::<RecursiveQRwLock, _>::new(0);
    let outer = lock.read();
    thread::scope(|scope| {
        scope.spawn(|| *lock.write() += 1);
        until(|| writer_waits_for(&lock));
        let inner = lock.read();
        assert_eq!(*inner, 0);
        drop((inner, outer));
    });
    assert_eq!(*lock.read(), 1);
}

#[test]
fn sleeping_writer_is_woken_although_recursive_readers_come_and_go() {
    let lock = RwLock::<RecursiveQRwLock, _>::new(0);
    let is_done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !is_done.load(SeqCst) {
                let reader = lock.read();
                thread::sleep(Duration::from_micros(200));
                drop(reader);
                thread::sleep(Duration::from_micros(100));
            }
        });
        for _ in 0..ROUNDS / 20 {
            *lock.write() += 1;
        }
        is_done.store(true, SeqCst);
    });
    assert_eq!(*lock.read(), ROUNDS / 20);
}

#[test]
fn writer_that_gives_up_lets_the_reader_behind_it_in() {
    let lock = QRwLock::new();
    lock.read();
    thread::scope(|scope| {
        let late = scope.spawn(|| lock.write_before(in_time(SOON)));
        let behind = scope.spawn(|| lock.read()); // in either order it must get in
        assert!(!late.join().unwrap());
        behind.join().unwrap();
        // SAFETY: acquired twice above.
        (0..2).for_each(|_| unsafe { lock.release_read() });
    });
    assert!(!lock.is_held());
}

#[test]
fn reader_that_gives_up_first_in_line_lets_the_writer_behind_it_in() {
    let lock = QRwLock::new();
    lock.write();
    thread::scope(|scope| {
        let late = scope.spawn(|| lock.read_before(in_time(SOON)));
        let behind = scope.spawn(|| lock.write());
        assert!(!late.join().unwrap());
        // SAFETY: acquired above.
        unsafe { lock.release_write() };
        behind.join().unwrap();
        // SAFETY: acquired by `behind`.
        unsafe { lock.release_write() };
    });
    assert!(!lock.is_held());
}

#[test]
fn downgraded_writer_lets_readers_in_and_writers_not() {
    let lock = qspinlock::RwLock::new(0);
    let mut writer = lock.write();
    let both_inside = Barrier::new(2);
    thread::scope(|scope| {
        scope.spawn(|| {
            let number = lock.read();
            assert_eq!(*number, 1);
            both_inside.wait();
        });
        *writer += 1;
        let reader = lock_api::RwLockWriteGuard::downgrade(writer);
        assert!(lock.try_write().is_none());
        both_inside.wait();
        assert_eq!(*reader, 1);
    });
    assert!(!lock.is_locked());
}

#[test]
fn writer_that_came_through_the_queue_downgrades_and_the_queue_goes_on() {
    let lock = qspinlock::RwLock::new(0);
    let reader = lock.read();
    let both_inside = Barrier::new(2);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut writer = lock.write();
            *writer += 1;
            let reader = lock_api::RwLockWriteGuard::downgrade(writer);
            both_inside.wait();
            drop(reader);
        });
        until(|| writer_waits_for(&lock));
        let newcomer = scope.spawn(|| {
            let number = lock.read();
            both_inside.wait();
            *number
        });
        drop(reader);
        assert_eq!(newcomer.join().unwrap(), 1);
    });
    *lock.write() += 1;
    assert_eq!(lock.into_inner(), 2);
}

#[test]
fn downgrading_threads_see_no_torn_words() {
    let lock = qspinlock::RwLock::<Words>::new([0; 2]);
    let torn = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..ROUNDS {
                    let mut writer = lock.write();
                    add_one(&mut writer);
                    let written = *writer;
                    let reader = lock_api::RwLockWriteGuard::downgrade(writer);
                    torn.fetch_or(*reader != written, SeqCst);
                }
            });
        }
    });
    assert!(!torn.load(SeqCst));
    assert_eq!(lock.into_inner(), [4 * ROUNDS; 2]);
}

/// A lock, and a check that it excludes.
#[derive(Default)]
struct Room {
    lock: QRwLock,
    inside: AtomicU32,
    writing: AtomicBool,
}

impl Room {
    fn stay_as_reader(&self) {
        self.inside.fetch_add(1, SeqCst);
        assert!(!self.writing.load(SeqCst));
        thread::yield_now();
        self.inside.fetch_sub(1, SeqCst);
    }

    fn stay_as_writer(&self) {
        assert!(!self.writing.swap(true, SeqCst) && self.inside.load(SeqCst) == 0);
        thread::yield_now();
        self.writing.store(false, SeqCst);
    }

    fn read_if(&self, is_in: bool) {
        if is_in {
            self.stay_as_reader();
            // SAFETY: the caller has acquired it.
            unsafe { self.lock.release_read() };
        }
    }

    fn write_if(&self, is_in: bool) {
        if is_in {
            self.stay_as_writer();
            // SAFETY: the caller has acquired it.
            unsafe { self.lock.release_write() };
        }
    }

    fn write_and_pass_on_if(&self, is_in: bool) {
        if is_in {
            self.stay_as_writer();
            // SAFETY: the caller has acquired it.
            unsafe { self.lock.release_write_fairly() };
        }
    }

    fn write_then_read(&self) {
        self.lock.write();
        self.stay_as_writer();
        // SAFETY: acquired above.
        unsafe { self.lock.downgrade() };
        self.stay_as_reader();
        // SAFETY: downgraded above.
        unsafe { self.lock.release_read_fairly() };
    }

    fn do_one_of_all(&self, which: u32) {
        let lock = &self.lock;
        match which % 9 {
            0 => self.read_if(lock.try_read()),
            1 => self.write_if(lock.try_write()),
            2 => self.read_if(lock.read_before(in_time(Duration::from_micros(50)))),
            3 => self.write_if(lock.write_before(in_time(Duration::from_micros(50)))),
            4 => self.write_then_read(),
            5 => self.read_if(lock.try_read_recursive()),
            6 => self.write_and_pass_on_if(lock.write_before(in_time(Duration::from_secs(3600)))),
            7 => self.read_if(lock.read_recursive_before(in_time(Duration::from_micros(100)))),
            _ => {
                lock.read();
                self.read_if(true);
            }
        }
    }
}

/// All operations at once, with time limits that can end at any point.
#[test]
fn sixteen_threads_that_try_wait_and_give_up_leave_a_free_lock() {
    let room = Room::default();
    thread::scope(|scope| {
        for thread in 0..16 {
            let room = &room;
            scope.spawn(move || (0..ROUNDS / 4).for_each(|round| room.do_one_of_all(round * 7 + thread)));
        }
    });
    assert!(!room.lock.is_held());
    assert!(room.lock.try_write());
}

#[test]
fn bumped_writer_lets_the_reader_in_that_waits() {
    let lock = qspinlock::RwLock::new(0);
    let mut writer = lock.write();
    thread::scope(|scope| {
        let reader = scope.spawn(|| *lock.read());
        *writer = 1;
        // The other thread may not have queued yet; until then there is no thread to let in.
        until(|| {
            lock_api::RwLockWriteGuard::bump(&mut writer);
            reader.is_finished()
        });
        *writer = 2;
        assert_eq!(reader.join().unwrap(), 1);
    });
}

#[test]
fn fair_unlock_with_nobody_in_line_leaves_a_lock_that_can_be_tried() {
    let lock = qspinlock::RwLock::new(0);
    lock_api::RwLockWriteGuard::unlock_fair(lock.write());
    lock_api::RwLockReadGuard::unlock_fair(lock.read());
    assert!(lock.try_write().is_some());
    assert!(lock.try_read().is_some());
}

#[test]
fn guards_are_released_by_other_threads() {
    let lock = qspinlock::RwLock::new(0);
    let held = lock.write();
    thread::scope(|scope| scope.spawn(|| drop(held)).join().unwrap());
    let held = lock.read();
    thread::scope(|scope| scope.spawn(|| drop(held)).join().unwrap());
    assert!(!lock.is_locked());
}

#[cfg(feature = "lock_api_04")]
#[test]
fn lock_api_04_has_recursive_readers() {
    let lock = lock_api_04::RwLock::<QRwLock, _>::new(0);
    let outer = lock.read();
    thread::scope(|scope| {
        scope.spawn(|| *lock.write() += 1);
        until(|| lock.try_read().is_none());
        assert_eq!(*lock.read_recursive(), 0);
        assert!(lock.try_read_recursive_for(SOON).is_some());
        drop(outer);
    });
    assert_eq!(*lock.read(), 1);
    assert!(lock.try_write_for(SOON).is_some());
}
