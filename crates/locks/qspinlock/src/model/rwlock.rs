//! The reader/writer lock with its real queue: two threads in all interleavings, three with a bound.
//!
//! Threads sleep whenever they can: none polls twice. Writers write a number under the lock and readers read
//! it; loom checks the accesses. A lost wake is a deadlock.
//!
//! See also: the queue alone (`two.rs`, `three.rs`).

use loom::cell::UnsafeCell;
use loom::thread::{self, JoinHandle};
use std::sync::Arc; // not loom's, as in `rig.rs`

use super::platform::{self, Futex, Modelled, PAST, SOON, Spurious, Strict};
use super::rig::Interleavings::{self, All, Preempted};
use super::rig::{assert_happened, check};
use crate::{Deadline, Event, QueueRwLock};

struct Guarded<F: Futex> {
    lock: QueueRwLock<Modelled<F>>,
    number: UnsafeCell<u32>,
}

// SAFETY: only threads that hold the lock access the number; loom checks exactly that.
unsafe impl<F: Futex> Sync for Guarded<F> {}
// SAFETY: nothing in it is bound to a thread.
unsafe impl<F: Futex> Send for Guarded<F> {}

impl<F: Futex> Guarded<F> {
    fn new() -> Arc<Self> {
        platform::begin();
        platform::enter_as(0);
        Arc::new(Self { lock: QueueRwLock::new(), number: UnsafeCell::new(0) })
    }

    fn spawn<T: 'static>(
        self: &Arc<Self>,
        number: u32,
        run: impl FnOnce(&Self) -> T + 'static,
    ) -> JoinHandle<T> {
        let theirs = Arc::clone(self);
        thread::spawn(move || {
            platform::enter_as(number);
            run(&theirs)
        })
    }

    /// Only for a reader or a writer.
    fn look(&self) -> u32 {
        // SAFETY: the pointer is the cell's; loom panics if a writer's access is not ordered with this one.
        self.number.with(|number| unsafe { *number })
    }

    /// Only for a writer.
    fn add_one(&self) {
        // SAFETY: as in `look`.
        self.number.with_mut(|number| unsafe { *number += 1 });
    }

    fn release_read(&self) {
        // SAFETY: a reader that is inside calls this, once.
        unsafe { self.lock.release_read() };
    }

    fn release_write(&self) {
        // SAFETY: the writer that is inside calls this, once.
        unsafe { self.lock.release_write() };
    }

    fn write(&self) {
        self.lock.write();
        self.add_one();
        self.release_write();
    }

    fn write_and_release_fairly(&self) {
        self.lock.write();
        self.add_one();
        // SAFETY: acquired above.
        unsafe { self.lock.release_write_fairly() };
    }

    fn write_and_downgrade(&self) {
        self.lock.write();
        self.add_one();
        let written = self.look();
        // SAFETY: acquired above.
        unsafe { self.lock.downgrade() };
        assert_eq!(self.look(), written);
        self.release_read();
    }

    fn read(&self) -> u32 {
        self.lock.read();
        let seen = self.look();
        self.release_read();
        seen
    }

    fn read_and_release_fairly(&self) -> u32 {
        self.lock.read();
        let seen = self.look();
        // SAFETY: acquired above.
        unsafe { self.lock.release_read_fairly() };
        seen
    }

    fn read_recursively(&self) -> u32 {
        self.lock.read_recursive();
        let seen = self.look();
        self.release_read();
        seen
    }

    fn try_write(&self) -> u32 {
        self.write_if(self.lock.try_write())
    }

    fn write_before(&self, deadline: Deadline) -> u32 {
        self.write_if(self.lock.write_before(deadline))
    }

    fn write_if(&self, is_in: bool) -> u32 {
        if is_in {
            self.add_one();
            self.release_write();
        }
        u32::from(is_in)
    }

    fn try_read(&self) -> bool {
        self.read_if(self.lock.try_read())
    }

    fn read_before(&self, deadline: Deadline) -> bool {
        self.read_if(self.lock.read_before(deadline))
    }

    fn read_if(&self, is_in: bool) -> bool {
        if is_in {
            self.look();
            self.release_read();
        }
        is_in
    }

    /// Must be called when all threads have finished. Asserts that the number is `sum` and that no thread is in the
    /// lock or its queue.
    fn assert_done(&self, sum: u32) {
        assert!(
            self.lock.try_write(),
            "an ended thread still holds the lock or waits for it: {:?}",
            self.lock
        );
        assert_eq!(self.look(), sum);
        self.release_write();
        assert!(!self.lock.is_held());
        assert!(self.try_read());
    }
}

/// For two threads with more than one operation each, which have too many interleavings to explore all of them.
const PAIR: Interleavings = Preempted(3, 4);
/// For three threads.
const THREE: Interleavings = Preempted(2, 3);
/// With more preemptions, loom lets two threads that wake without a reason yield to each other for ever.
const THREE_WITH_SPURIOUS_WAKES: Interleavings = Preempted(2, 2);

/// One operation each, in all interleavings.
fn pair<F: Futex>(first: fn(&Guarded<F>), second: fn(&Guarded<F>), sum: u32) {
    check(All, move || {
        let guarded = Guarded::<F>::new();
        let other = guarded.spawn(1, second);
        first(&guarded);
        other.join().unwrap();
        guarded.assert_done(sum);
    });
}

fn both_write_twice<F: Futex>() {
    check(PAIR, || {
        let guarded = Guarded::<F>::new();
        let other = guarded.spawn(1, |theirs| {
            theirs.write();
            theirs.write();
        });
        guarded.write();
        guarded.write();
        other.join().unwrap();
        guarded.assert_done(4);
    });
    assert_happened(&[Event::Halted]);
}

#[test]
fn writer_beside_a_writer_in_all_interleavings() {
    pair::<Strict>(writes, writes, 2);
    assert_happened(&[Event::Halted, Event::Kicked]);
    pair::<Spurious>(writes, writes, 2);
}

#[test]
fn reader_beside_a_writer_in_all_interleavings() {
    pair::<Strict>(reads, writes, 1);
    assert_happened(&[Event::Halted, Event::Kicked]);
    pair::<Spurious>(reads, writes, 1);
}

#[test]
fn recursive_reader_beside_a_writer_in_all_interleavings() {
    pair::<Strict>(reads_recursively, writes, 1);
    assert_happened(&[Event::Halted, Event::Kicked]);
}

#[test]
fn downgrading_writer_beside_a_writer_in_all_interleavings() {
    pair::<Strict>(downgrades, writes, 2);
    assert_happened(&[Event::Halted, Event::Kicked]);
    pair::<Spurious>(downgrades, writes, 2);
}

#[test]
fn downgrading_writer_beside_a_reader_in_all_interleavings() {
    pair::<Strict>(downgrades, reads, 1);
    assert_happened(&[Event::Halted, Event::Kicked]);
    pair::<Spurious>(downgrades, reads, 1);
}

#[test]
fn two_writers_never_meet_and_both_finish() {
    both_write_twice::<Strict>();
    assert_happened(&[Event::Kicked]);
}

#[test]
fn two_writers_never_meet_with_spurious_wakes() {
    both_write_twice::<Spurious>();
}

fn one_writes_one_reads<F: Futex>() {
    check(PAIR, || {
        let guarded = Guarded::<F>::new();
        let other = guarded.spawn(1, |theirs| {
            let first = theirs.read();
            assert!(first <= theirs.read());
        });
        guarded.write();
        guarded.write();
        other.join().unwrap();
        guarded.assert_done(2);
    });
    assert_happened(&[Event::Halted]);
}

#[test]
fn reader_and_writer_never_meet_and_both_finish() {
    one_writes_one_reads::<Strict>();
    assert_happened(&[Event::Kicked]);
}

#[test]
fn reader_and_writer_never_meet_with_spurious_wakes() {
    one_writes_one_reads::<Spurious>();
}

fn one_writes_one_reads_recursively<F: Futex>(which: Interleavings) {
    check(which, || {
        let guarded = Guarded::<F>::new();
        let other = guarded.spawn(1, |theirs| {
            theirs.write();
            theirs.write();
        });
        guarded.lock.read();
        let outer = guarded.look();
        assert_eq!(guarded.read_recursively(), outer);
        assert_eq!(guarded.read_recursively(), outer);
        guarded.release_read();
        guarded.read_recursively();
        other.join().unwrap();
        guarded.assert_done(2);
    });
    assert_happened(&[Event::Halted]);
}

#[test]
fn reader_reads_again_beside_a_writer_that_waits_and_both_finish() {
    one_writes_one_reads_recursively::<Strict>(PAIR);
    assert_happened(&[Event::Kicked]);
}

#[test]
fn reader_reads_again_beside_a_writer_with_spurious_wakes() {
    one_writes_one_reads_recursively::<Spurious>(THREE);
}

fn one_downgrades<F: Futex>(other: fn(&Guarded<F>)) {
    check(PAIR, move || {
        let guarded = Guarded::<F>::new();
        let other = guarded.spawn(1, move |theirs| {
            other(theirs);
            theirs.write_and_downgrade();
        });
        guarded.write_and_downgrade();
        guarded.read();
        other.join().unwrap();
        let sum = guarded.read();
        guarded.assert_done(sum);
    });
    assert_happened(&[Event::Halted]);
}

#[test]
fn downgraded_writer_keeps_writers_out_and_both_finish() {
    one_downgrades::<Strict>(|_| ());
    assert_happened(&[Event::Kicked]);
}

#[test]
fn downgraded_writer_lets_a_reader_in_and_both_finish() {
    one_downgrades::<Strict>(|theirs| assert!(theirs.read() <= 1));
    assert_happened(&[Event::Kicked]);
}

#[test]
fn downgraded_writer_is_ordered_with_spurious_wakes() {
    one_downgrades::<Spurious>(|_| ());
}

#[test]
fn fair_unlocks_lose_nobody_and_leave_a_lock_that_can_be_tried() {
    check(PAIR, || {
        let guarded = Guarded::<Strict>::new();
        let other = guarded.spawn(1, |theirs| {
            theirs.read_and_release_fairly();
            theirs.write_and_release_fairly();
        });
        guarded.write_and_release_fairly();
        guarded.read_and_release_fairly();
        other.join().unwrap();
        guarded.assert_done(2);
    });
    assert_happened(&[Event::Halted, Event::Kicked]);
}

#[test]
fn trying_beside_a_reader_and_a_writer_never_meets_them() {
    check(PAIR, || {
        let guarded = Guarded::<Strict>::new();
        let other = guarded.spawn(1, |theirs| {
            theirs.write();
            theirs.read();
        });
        guarded.try_read();
        let tried = guarded.try_write();
        other.join().unwrap();
        guarded.assert_done(1 + tried);
    });
}

#[test]
fn writer_that_gives_up_leaves_a_lock_that_works() {
    check(PAIR, || {
        let guarded = Guarded::<Strict>::new();
        let other = guarded.spawn(1, |theirs| theirs.write_before(SOON));
        guarded.lock.read();
        platform::tick();
        guarded.release_read();
        guarded.write();
        let in_time = other.join().unwrap();
        guarded.assert_done(1 + in_time);
    });
    assert_happened(&[Event::Halted, Event::TimedOut]);
}

#[test]
fn reader_that_gives_up_leaves_a_lock_that_works() {
    check(PAIR, || {
        let guarded = Guarded::<Strict>::new();
        let other = guarded.spawn(1, |theirs| theirs.read_before(SOON));
        platform::tick();
        guarded.write();
        guarded.write_and_downgrade();
        other.join().unwrap();
        guarded.assert_done(2);
    });
    assert_happened(&[Event::Halted, Event::TimedOut]);
}

#[test]
fn late_reader_and_writer_leave_a_lock_that_works() {
    check(PAIR, || {
        let guarded = Guarded::<Strict>::new();
        let other = guarded.spawn(1, |theirs| {
            theirs.read_before(PAST);
            theirs.write_before(PAST)
        });
        guarded.write();
        guarded.read();
        let in_time = other.join().unwrap();
        guarded.assert_done(1 + in_time);
    });
    assert_happened(&[Event::TimedOut]);
}

/// A model of three threads: `first`, `second` and `third` are the operations of one thread each.
fn three<F: Futex>(
    which: Interleavings,
    first: fn(&Guarded<F>),
    second: fn(&Guarded<F>),
    third: fn(&Guarded<F>),
    sum: u32,
) {
    check(which, move || {
        let guarded = Guarded::<F>::new();
        let others = [guarded.spawn(1, second), guarded.spawn(2, third)];
        first(&guarded);
        others.into_iter().for_each(|other| other.join().unwrap());
        guarded.assert_done(sum);
    });
    assert_happened(&[Event::Halted]);
}

fn reads<F: Futex>(guarded: &Guarded<F>) {
    guarded.read();
}

fn reads_recursively<F: Futex>(guarded: &Guarded<F>) {
    guarded.read_recursively();
}

fn reads_recursively_twice<F: Futex>(guarded: &Guarded<F>) {
    guarded.read_recursively();
    guarded.read_recursively();
}

fn writes<F: Futex>(guarded: &Guarded<F>) {
    guarded.write();
}

fn writes_twice<F: Futex>(guarded: &Guarded<F>) {
    guarded.write();
    guarded.write();
}

fn downgrades<F: Futex>(guarded: &Guarded<F>) {
    guarded.write_and_downgrade();
}

fn releases_fairly<F: Futex>(guarded: &Guarded<F>) {
    guarded.write_and_release_fairly();
}

#[test]
fn three_writers_all_finish() {
    three::<Strict>(THREE, writes, writes, writes, 3);
}

#[test]
fn three_writers_never_meet_with_spurious_wakes() {
    three::<Spurious>(THREE_WITH_SPURIOUS_WAKES, writes, writes, writes, 3);
}

#[test]
fn two_readers_and_a_writer_all_finish() {
    three::<Strict>(THREE, reads, reads, writes, 1);
}

#[test]
fn two_writers_and_a_reader_all_finish() {
    three::<Strict>(THREE, writes, reads, writes, 2);
}

#[test]
fn two_writers_and_a_recursive_reader_all_finish() {
    three::<Strict>(THREE, writes, reads_recursively_twice, writes, 2);
}

/// One reader leaves, and another enters before the writer that the first reader has woken. Only with three
/// preemptions does the model show that the second reader needs an acquire.
#[test]
fn recursive_reader_before_a_writer_that_is_being_woken_sees_what_was_written() {
    three::<Strict>(THREE, writes_twice, reads, reads_recursively, 2);
}

#[test]
fn two_recursive_readers_and_a_writer_never_meet_with_spurious_wakes() {
    three::<Spurious>(THREE_WITH_SPURIOUS_WAKES, reads_recursively, reads_recursively, writes, 1);
}

#[test]
fn downgrading_writers_and_a_reader_all_finish() {
    three::<Strict>(THREE, downgrades, downgrades, reads, 2);
}

#[test]
fn fair_unlocks_among_three_lose_nobody() {
    three::<Strict>(THREE, releases_fairly, writes, reads, 2);
}

#[test]
fn writer_that_gives_up_lets_the_reader_behind_it_in() {
    check(THREE, || {
        let guarded = Guarded::<Strict>::new();
        let late = guarded.spawn(1, |theirs| theirs.write_before(SOON));
        let behind = guarded.spawn(2, Guarded::read);
        guarded.lock.read();
        platform::tick();
        guarded.release_read();
        let in_time = late.join().unwrap();
        behind.join().unwrap();
        guarded.assert_done(in_time);
    });
    assert_happened(&[Event::Halted, Event::TimedOut]);
}
