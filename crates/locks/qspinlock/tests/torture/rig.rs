//! Data behind a lock that shows when two threads were inside, random use of it, a watchdog.
//!
//! The tests are in the other files of this folder.

use std::cell::{Cell, UnsafeCell};
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use fastrand::Rng;
use qspinlock::{Clock, Deadline, Event, Linux, Node, Platform, Policy, QueueLock, Slept};
use xtask::sizes;

/// Long, because a slow machine must not look like a lock that hangs.
const PATIENCE: Duration = Duration::from_secs(240);
/// With more than this, a spinlock makes no progress in the time of a test.
pub const CROWD_PER_CORE: usize = 64;

/// The number of threads that can run at the same time.
pub fn cores() -> usize {
    thread::available_parallelism().map_or(2, usize::from).max(2)
}

/// When this part ends.
pub fn end() -> Instant {
    Instant::now() + sizes::TORTURE.now()
}

/// [`Linux`], but counts for each thread how often it had no node.
#[derive(Debug)]
pub struct Counted;

thread_local! {
    static WITHOUT_NODE: Cell<u64> = const { Cell::new(0) };
}

/// How often this thread had no node.
pub fn waits_without_node() -> u64 {
    WITHOUT_NODE.get()
}

// SAFETY: forwards everything to `Linux`.
unsafe impl Platform for Counted {
    fn nodes() -> &'static [Node] {
        Linux::nodes()
    }
    fn own_nodes() -> Option<u32> {
        Linux::own_nodes()
    }
    fn common_nodes() -> u32 {
        Linux::common_nodes()
    }
    fn epoch() -> u32 {
        Linux::epoch()
    }
    fn wait(word: &AtomicU32, expected: u32, deadline: Option<Deadline>) -> Slept {
        Linux::wait(word, expected, deadline)
    }
    fn wake_one(word: &AtomicU32) {
        Linux::wake_one(word);
    }
    fn is_past(deadline: Deadline) -> bool {
        Linux::is_past(deadline)
    }
    fn after_ns(clock: Clock, ns: u64) -> Deadline {
        Linux::after_ns(clock, ns)
    }
    fn relax() {
        Linux::relax();
    }
    fn sleep_ns(ns: u64, deadline: Option<Deadline>) {
        Linux::sleep_ns(ns, deadline);
    }
    fn note(event: Event) {
        WITHOUT_NODE.set(WITHOUT_NODE.get() + u64::from(event == Event::NoNode));
    }
}

/// Plain words that are equal whenever no thread is inside.
pub struct Guarded<P> {
    pub lock: QueueLock<P, Counted>,
    words: UnsafeCell<[u64; 6]>,
}

// SAFETY: the words are accessed only with the lock held; the test checks that this excludes.
unsafe impl<P> Sync for Guarded<P> {}

impl<P: Policy> Guarded<P> {
    pub const fn new() -> Self {
        Self { lock: QueueLock::new(), words: UnsafeCell::new([0; 6]) }
    }

    /// Increments each word, with `pause` half way. The caller holds the lock.
    pub fn enter(&self, pause: impl FnOnce()) {
        let first = self.words.get().cast::<u64>();
        // SAFETY: one of the words, which no other thread writes if the lock works.
        let count = unsafe { first.read_volatile() };
        let mut pause = Some(pause);
        for at in 0..6 {
            // SAFETY: there are that many words.
            let word = unsafe { first.add(at) };
            // SAFETY: as above.
            let found = unsafe { word.read_volatile() };
            if found != count {
                end_with(&format_args!(
                    "two are inside: word {at} is {found}, the first was {count}: {self}"
                ));
            }
            // SAFETY: as above.
            unsafe { word.write_volatile(count + 1) };
            if at == 2 {
                pause.take().into_iter().for_each(|pause| pause());
            }
        }
    }

    /// Acquires, visits, releases.
    pub fn visit(&self) {
        self.lock.acquire();
        self.enter(|| ());
        // SAFETY: acquired above.
        unsafe { self.lock.release() };
    }

    /// Visits by a random call with a random time limit. Returns whether it got in.
    pub fn visit_somehow(&self, rng: &mut Rng) -> bool {
        let acquired = match rng.u8(..10) {
            0..5 => {
                self.lock.acquire();
                true
            }
            5..7 => self.lock.try_acquire(),
            _ => self.lock.acquire_before(soon(rng)),
        };
        if !acquired {
            return false;
        }
        self.enter(|| linger(rng));
        if rng.u8(..8) == 0 {
            // SAFETY: acquired above.
            unsafe { self.lock.release_fairly() };
        } else {
            // SAFETY: acquired above.
            unsafe { self.lock.release() };
        }
        true
    }

    /// The number of visits. Only while no thread is inside.
    pub fn visits(&self) -> u64 {
        // SAFETY: the caller guarantees that.
        unsafe { self.words.get().cast::<u64>().read() }
    }

    /// Asserts that no thread is inside or waits, and that nothing was left behind.
    pub fn assert_quiet(&self) {
        assert!(!self.lock.is_held() && !self.lock.is_wanted() && self.word() == 0, "{self}");
    }

    /// The lock's own word.
    pub fn word(&self) -> u32 {
        let word = (&raw const self.lock).cast::<AtomicU32>();
        // SAFETY: a lock is one atomic word, and `self` is borrowed.
        unsafe { &*word }.load(Relaxed)
    }
}

impl<P: Policy> std::fmt::Display for Guarded<P> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}, word {:#010x}", self.lock, self.word())
    }
}

/// At most half a millisecond from now.
pub fn soon(rng: &mut Rng) -> Deadline {
    let clock = if rng.bool() { Clock::Monotonic } else { Clock::Realtime };
    let now = qspinlock::now(clock);
    Deadline { at_ns: now.at_ns + rng.u64(..500_000), ..now }
}

/// Usually a moment; sometimes as long as a preempted thread is away.
pub fn linger(rng: &mut Rng) {
    match rng.u16(..512) {
        0 => thread::sleep(Duration::from_micros(rng.u64(..200))),
        1..6 => thread::yield_now(),
        spins => (0..spins % 32).for_each(|_| std::hint::spin_loop()),
    }
}

/// Prints what is wrong and ends the process: after a panic with a lock held, others would wait forever.
pub fn end_with(what: &dyn std::fmt::Display) -> ! {
    eprintln!("{what}");
    std::process::abort()
}

/// Runs `body`. If it takes much longer than a part should, prints `locks` and ends the process.
pub fn watched(locks: &[impl std::fmt::Display + Sync], body: impl FnOnce()) {
    let limit = sizes::TORTURE.now() + PATIENCE;
    thread::scope(|scope| {
        let (done, is_done) = channel::<()>();
        scope.spawn(move || {
            if is_done.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
                let mut states = String::new();
                locks.iter().for_each(|lock| writeln!(states, "{lock}").unwrap());
                end_with(&format_args!("not done after {limit:?}; the locks:\n{states}"));
            }
        });
        body();
        drop(done);
    });
}
