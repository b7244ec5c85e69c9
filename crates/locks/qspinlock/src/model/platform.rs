//! A simulated operating system for models: nodes, thread numbers, futexes and deadlines, as loom needs them.
//!
//! There are two futexes, because each hides errors that the other shows:
//! - [`Strict`] sleeps until it is woken. A lost wake is a deadlock, which loom reports. But a woken thread
//!   is ordered after its waker, so a missing ordering in the lock itself may go undetected on that path.
//! - [`Spurious`] reads the word once and returns, as futexes may: it creates no order between threads. A lost
//!   wake goes undetected.
//!
//! A deadline passes when [`tick`] is called; a thread may see that as late as the memory model allows.
//!
//! See also: Linux (`linux/`).

use core::marker::PhantomData;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::string::{String, ToString};
use std::vec::Vec;

use crate::atomic::AtomicU32;
use core::sync::atomic::Ordering::Relaxed;
use loom::thread::{self, Thread};

use crate::{Clock, Deadline, Event, NODES_PER_THREAD, Node, Platform, Slept};

/// Maximum number of threads with their own nodes in a model.
const MOST_THREADS: u32 = 3;
/// Nodes that threads without a node borrow.
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
    /// The sleeping threads. All threads of a model are coroutines of one real thread, and loom switches only
    /// at operations on its own objects: this list changes in one step with the operation before it.
    static SLEEPERS: RefCell<Vec<Sleeper>> = const { RefCell::new(Vec::new()) };
    /// How often each event happened in all executions of the model so far.
    static EVENTS: RefCell<Vec<(Event, u64)>> = const { RefCell::new(Vec::new()) };
    /// Executions of the model so far.
    static EXECUTIONS: Cell<u64> = const { Cell::new(0) };
    /// The steps of this execution, for debugging.
    static TRACE: RefCell<Vec<(u32, String)>> = const { RefCell::new(Vec::new()) };
}

struct Sleeper {
    word: usize,
    thread: Thread,
    is_woken: Rc<Cell<bool>>,
}

/// An operating system with the futexes of `F`.
pub(super) struct Modelled<F>(PhantomData<F>);

/// How threads sleep.
pub(super) trait Futex: 'static {
    /// The process's epoch. Any epoch but the first is that of a forked child, which compares it with the nodes'
    /// epochs.
    const EPOCH: u32 = 1;

    /// Sleeps while the word is `expected`, without a deadline.
    fn wait(word: &AtomicU32, expected: u32);
}

/// See the file's head.
pub(super) struct Strict;
/// Like [`Strict`], but in a forked child: the nodes' earlier waits, if any, were in the parent.
pub(super) struct StrictInChild;
/// See the file's head.
pub(super) struct Spurious;

/// Must be the first line of each execution: clears what the last execution left, and creates the nodes
/// before other threads start.
pub(super) fn begin() {
    SLEEPERS.with_borrow_mut(Vec::clear);
    TRACE.with_borrow_mut(Vec::clear);
    EXECUTIONS.set(EXECUTIONS.get() + 1);
    assert_eq!(NODES.len() + TICKS.load(Relaxed) as usize, NODES.len());
}

/// Must be the first line of each thread that has nodes. A thread that does not call this has no nodes of its own, and
/// borrows shared ones.
pub(super) fn enter_as(number: u32) {
    assert!(number < MOST_THREADS, "thread {number} of {MOST_THREADS}");
    NUMBER.with(|own| own.set(Some(number)));
}

/// Gives up the thread's nodes.
pub(super) fn leave() {
    NUMBER.with(|own| own.set(None));
}

/// From now on, deadlines at 1 have passed.
pub(super) fn tick() {
    TICKS.store(1, Relaxed); // Relaxed: threads may see it late or soon
}

/// A deadline that passes with [`tick`].
pub(super) const SOON: Deadline = Deadline { clock: Clock::Monotonic, at_ns: 1 };
/// A deadline that has passed.
pub(super) const PAST: Deadline = Deadline { clock: Clock::Monotonic, at_ns: 0 };

/// How often the event happened since the model began. Shows whether the model reaches the case that it is for.
pub(super) fn count(event: Event) -> u64 {
    EVENTS
        .with_borrow(|events| events.iter().filter(|(seen, _)| *seen == event).map(|(_, count)| count).sum())
}

/// Notes what the thread is about to do.
pub(super) fn trace(what: &str) {
    let number = NUMBER.with(Cell::get).unwrap_or(u32::MAX);
    TRACE.with_borrow_mut(|trace| trace.push((number, what.to_string())));
}

/// How many executions the model has had so far.
pub(super) fn executions() -> u64 {
    EXECUTIONS.get()
}

/// Prints the model's last execution if the model fails.
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

/// Clears the counts of models that ran before in this thread.
pub(super) fn forget_counts() {
    EXECUTIONS.set(0);
    EVENTS.with_borrow_mut(Vec::clear);
}

// SAFETY: one array for each execution, which lives as long as the execution; each thread keeps the number it
// entered with.
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
        // A separate step, so that loom sees the dependency on threads that go to sleep on the word. Not a
        // read-modify-write: loom keeps no single order of read-modify-writes and the owner's plain stores, and
        // would let the owner read the value written here after its own store.
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

/// With a deadline both futexes spin, because loom has no timer that wakes a thread. The sleep ends under the same
/// conditions as in `Strict`. Also as in `Strict`, a wake for a sleeper that has left is lost.
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

/// Reads the newest value, as the kernel does under its own lock: a read-modify-write cannot read an older
/// one. It orders nothing, and tells loom that sleeping and waking depend on each other.
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
