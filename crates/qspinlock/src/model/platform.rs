//! An operating system for models: nodes, thread numbers, futexes and deadlines, as loom needs them.
//!
//! Two futexes, because each hides what the other shows:
//! - [`Strict`] sleeps until it is woken. A wake that is lost is a deadlock, which loom reports. But who is woken is
//!   ordered after its waker, so an ordering that the lock itself forgot may go unnoticed on that path.
//! - [`Spurious`] looks once and returns, as futexes may: no order between threads comes of it. A wake that is lost
//!   goes unnoticed.
//!
//! A deadline passes when [`tick`] is called, and a thread may learn of that as late as the memory model lets it.
//!
//! Not here: Linux (`linux.rs`).

use core::marker::PhantomData;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::string::{String, ToString};
use std::vec::Vec;

use crate::atomic::AtomicU32;
use core::sync::atomic::Ordering::Relaxed;
use loom::thread::{self, Thread};

use crate::{Clock, Deadline, Event, NODES_PER_THREAD, Node, Platform, Slept};

/// Threads with nodes of their own that a model can have.
const MOST_THREADS: u32 = 3;
/// Nodes of nobody.
const COMMON_NODES: u32 = 2;

loom::lazy_static! {
    static ref NODES: Vec<Node> =
        (0..COMMON_NODES + MOST_THREADS * NODES_PER_THREAD).map(|_| Node::new()).collect();
    static ref TICKS: AtomicU32 = AtomicU32::new(0);
}

loom::thread_local! {
    static NUMBER: Cell<Option<u32>> = Cell::new(None);
}

std::thread_local! {
    /// Who sleeps. All threads of a model are coroutines of one real thread, and no other runs between two of its
    /// operations on loom's objects: this list changes in one step with the operation before.
    static SLEEPERS: RefCell<Vec<Sleeper>> = const { RefCell::new(Vec::new()) };
    /// How often what happened in all executions of a model so far.
    static EVENTS: RefCell<Vec<(Event, u64)>> = const { RefCell::new(Vec::new()) };
    /// What happened in this execution, for whoever looks for a mistake.
    /// Executions of the model so far.
    static EXECUTIONS: Cell<u64> = const { Cell::new(0) };
    static TRACE: RefCell<Vec<(u32, String)>> = const { RefCell::new(Vec::new()) };
}

struct Sleeper {
    word: usize,
    thread: Thread,
    is_woken: Rc<Cell<bool>>,
}

/// An operating system whose futexes are `F`'s.
pub(super) struct Modelled<F>(PhantomData<F>);

/// How threads sleep.
pub(super) trait Futex: 'static {
    /// In which epoch the process is; each but the first is a forked child's, which looks at those of nodes.
    const EPOCH: u32 = 1;

    /// Sleeps while the word is `expected`, without a deadline.
    fn wait(word: &AtomicU32, expected: u32);
}

/// See the file's head.
pub(super) struct Strict;
/// As [`Strict`], in a forked child, whose nodes waited in the parent, if at all.
pub(super) struct StrictInChild;
/// See the file's head.
pub(super) struct Spurious;

/// The first line of each execution: what the last one left is gone, and the nodes are there before other threads.
pub(super) fn begin() {
    SLEEPERS.with_borrow_mut(Vec::clear);
    TRACE.with_borrow_mut(Vec::clear);
    EXECUTIONS.set(EXECUTIONS.get() + 1);
    assert_eq!(NODES.len() + TICKS.load(Relaxed) as usize, NODES.len());
}

/// The first line of each thread: its nodes. A thread that does not say has none, and borrows common ones.
pub(super) fn enter_as(number: u32) {
    assert!(number < MOST_THREADS, "thread {number} of {MOST_THREADS}");
    NUMBER.with(|own| own.set(Some(number)));
}

/// Gives the thread's nodes up.
pub(super) fn leave() {
    NUMBER.with(|own| own.set(None));
}

/// From now on, deadlines at 1 have passed.
pub(super) fn tick() {
    TICKS.store(1, Relaxed); // Relaxed: threads see it late, or soon
}

/// A deadline that passes with [`tick`].
pub(super) const SOON: Deadline = Deadline { clock: Clock::Monotonic, at_ns: 1 };
/// One that has passed.
pub(super) const PAST: Deadline = Deadline { clock: Clock::Monotonic, at_ns: 0 };

/// How often it happened since the model's beginning. A model that never gets where it wants to go shows nothing.
pub(super) fn count(event: Event) -> u64 {
    EVENTS
        .with_borrow(|events| events.iter().filter(|(seen, _)| *seen == event).map(|(_, count)| count).sum())
}

/// Notes what the thread is about to do.
pub(super) fn trace(what: &str) {
    let number = NUMBER.with(Cell::get).unwrap_or(u32::MAX);
    TRACE.with_borrow_mut(|trace| trace.push((number, what.to_string())));
}

/// How many executions the model has had.
pub(super) fn executions() -> u64 {
    EXECUTIONS.get()
}

/// Prints the last execution of the model if it fails.
pub(super) struct PrintsTrace;

impl Drop for PrintsTrace {
    fn drop(&mut self) {
        if std::thread::panicking() {
            TRACE.with_borrow(|trace| {
                trace.iter().for_each(|(thread, what)| std::eprintln!("thread {thread}: {what}"))
            });
        }
    }
}

/// Forgets the counts of the models that ran before in this thread.
pub(super) fn forget_counts() {
    EXECUTIONS.set(0);
    EVENTS.with_borrow_mut(Vec::clear);
}

// SAFETY: one array for each execution, which lives as long as it does; each thread has the numbers it entered with.
unsafe impl<F: Futex> Platform for Modelled<F> {
    fn nodes() -> &'static [Node] {
        NODES.as_slice()
    }

    fn own_nodes() -> Option<u32> {
        let number = NUMBER.with(Cell::get)?;
        Some(COMMON_NODES + number * NODES_PER_THREAD)
    }

    fn common_nodes() -> u32 {
        COMMON_NODES
    }

    fn epoch() -> u32 {
        F::EPOCH
    }

    fn wait(word: &AtomicU32, expected: u32, deadline: Option<Deadline>) -> Slept {
        match deadline {
            None => F::wait(word, expected),
            Some(deadline) => return wait_until(word, expected, deadline),
        }
        Slept::Woken
    }

    fn wake_one(word: &AtomicU32) {
        // A step of its own, which depends on others' sleeping on the word. No read-modify-write: loom keeps no single
        // order of those and the owner's plain stores, and would let the owner read this one after its own.
        let value = word.load(Relaxed);
        trace(&std::format!("wakes a sleeper on {:x}, seen as {value}", address(word) % 65536));
        if let Some(sleeper) = take_sleeper(word) {
            sleeper.is_woken.set(true);
            sleeper.thread.unpark();
        }
    }

    fn after_ns(_clock: Clock, _ns: u64) -> Deadline {
        SOON
    }

    fn is_past(deadline: Deadline) -> bool {
        u64::from(TICKS.load(Relaxed)) >= deadline.at_ns
    }

    fn relax() {
        thread::yield_now();
    }

    fn sleep_ns(_ns: u64, _deadline: Option<Deadline>) {
        thread::yield_now();
    }

    fn note(event: Event) {
        trace(&std::format!("{event:?}"));
        EVENTS.with_borrow_mut(|events| match events.iter_mut().find(|(seen, _)| *seen == event) {
            Some((_, count)) => *count += 1,
            None => events.push((event, 1)),
        });
    }
}

impl Futex for Strict {
    fn wait(word: &AtomicU32, expected: u32) {
        if look(word) != expected {
            return;
        }
        let is_woken = fall_asleep(word);
        trace(&std::format!("sleeps on {:x}, which is {expected}", address(word) % 65536));
        while !is_woken.get() {
            thread::park();
        }
    }
}

impl Futex for StrictInChild {
    const EPOCH: u32 = 2;

    fn wait(word: &AtomicU32, expected: u32) {
        Strict::wait(word, expected);
    }
}

impl Futex for Spurious {
    fn wait(word: &AtomicU32, expected: u32) {
        if word.load(Relaxed) == expected {
            thread::yield_now();
        }
    }
}

/// With a deadline both futexes spin: loom cannot wake a thread that nobody wakes. What ends the sleep, and that a
/// wake for a sleeper which is gone is lost, is as in `Strict`.
fn wait_until(word: &AtomicU32, expected: u32, deadline: Deadline) -> Slept {
    if look(word) != expected {
        return Slept::Woken;
    }
    let is_woken = fall_asleep(word);
    loop {
        let is_past = u64::from(TICKS.load(Relaxed)) >= deadline.at_ns;
        if is_woken.get() {
            return Slept::Woken;
        }
        if is_past {
            SLEEPERS.with_borrow_mut(|all| all.retain(|sleeper| !Rc::ptr_eq(&sleeper.is_woken, &is_woken)));
            return Slept::TimedOut;
        }
        thread::yield_now();
    }
}

/// The newest value, as the kernel sees it under its own lock: a read-modify-write cannot read an older one. It orders
/// nothing, and tells loom that sleeping and waking depend on each other.
fn look(word: &AtomicU32) -> u32 {
    word.fetch_add(0, Relaxed)
}

fn fall_asleep(word: &AtomicU32) -> Rc<Cell<bool>> {
    let is_woken = Rc::new(Cell::new(false));
    let sleeper = Sleeper { word: address(word), thread: thread::current(), is_woken: Rc::clone(&is_woken) };
    SLEEPERS.with_borrow_mut(|all| all.push(sleeper));
    is_woken
}

fn take_sleeper(word: &AtomicU32) -> Option<Sleeper> {
    SLEEPERS.with_borrow_mut(|all| {
        let at = all.iter().position(|sleeper| sleeper.word == address(word))?;
        Some(all.remove(at))
    })
}

fn address(word: &AtomicU32) -> usize {
    core::ptr::from_ref(word).addr()
}
