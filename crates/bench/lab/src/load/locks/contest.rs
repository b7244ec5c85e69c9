//! Threads that take one lock as often as they can: how often and how evenly they get it, and how long they wait.
//!
//! `start, pin (unless left to the scheduler) → all at the gate → settle → count (the caller's thread reads all counts)
//! → end → Found`
//!
//! - Each thread counts in its own cache line; the caller's thread reads all of them when the counted time begins and
//!   ends. So a thread counts nothing while it does not get a processor.
//! - Waits are sampled: a thread that was fast during the settling time times only one acquisition in up to 64, a slow
//!   thread times every one. Each timed wait also stands for the untimed ones after it. A timed acquisition costs two
//!   clock readings, about 50 ns, the second with the lock held.
//! - A wait that is not over at the end counts towards the longest wait: otherwise a starving thread would not be
//!   noticed.
//! - Threads check for the end between two acquisitions. With a lock that hands over to preempted threads, they leave
//!   one by one; [`Found::drain`] is the time until all have left.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize};
use std::sync::{PoisonError, RwLock};
use std::thread::{Builder, Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;

use super::events::{Counting, LockEvents};
use super::exclusive::Exclusive;
use super::turn::Load;
use crate::experiment::SampleError;
use crate::load::cpu::Usage;
use crate::load::{cpu, nanos};
use crate::stop::Stop;

/// Length of the uncounted settling time before a sample, as a share of the sample.
const SETTLE: f64 = 0.25;
/// Time between two checks of the user's request to stop.
const LOOK: Duration = Duration::from_millis(20);
const STACK_BYTES: usize = 256 << 10;
/// The histogram's upper bound.
const LONGEST_NS: u64 = 600_000_000_000;
/// At least one acquisition in this many is timed.
const MOST_SKIPPED: u64 = 64;
/// A thread's stride is its number of acquisitions during the settling time, divided by this.
const SETTLED: u64 = 250;

/// Figures of one sample.
#[derive(Debug)]
pub(crate) struct Found {
    /// Length of the counted time.
    pub seconds: f64,
    /// Acquisitions in the counted time, by thread.
    pub counts: Vec<u64>,
    /// Times from the request until the lock was acquired, in ns.
    pub waits: Histogram<u64>,
    /// The longest timed wait, in ns, including waits not over at the end.
    pub longest_ns: u64,
    /// The process's usage during the counted time.
    pub usage: Usage,
    /// The process's CPU time during the counted time.
    pub cpu_ns: u64,
    pub events: LockEvents,
    /// Time from the end of the counted time until all threads have noticed it.
    pub drain: Duration,
}

#[allow(clippy::cast_precision_loss)] // counts of one sample
impl Found {
    pub fn acquired(&self) -> u64 {
        self.counts.iter().sum()
    }

    pub fn per_second(&self) -> f64 {
        if self.seconds > 0.0 { self.acquired() as f64 / self.seconds } else { 0.0 }
    }

    /// Converts `count` to a rate per thousand acquisitions.
    pub fn per_thousand(&self, count: u64) -> Option<f64> {
        (self.acquired() > 0).then(|| 1000.0 * count as f64 / self.acquired() as f64)
    }

    /// Average number of busy processors.
    pub fn busy_cores(&self) -> Option<f64> {
        (self.seconds > 0.0).then(|| self.cpu_ns as f64 / 1e9 / self.seconds)
    }

    /// The wait at `quantile`, in µs: this share of the waits is at most as long.
    pub fn wait_us(&self, quantile: f64) -> Option<f64> {
        (!self.waits.is_empty()).then(|| self.waits.value_at_quantile(quantile) as f64 / 1000.0)
    }
}

const SETTLING: u8 = 0;
const COUNTING: u8 = 1;
const ENDING: u8 = 2;

/// Results that one thread writes and the calling thread reads, on separate cache lines.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Slot {
    acquired: AtomicU64,
    /// Start of the timed wait in progress, on the common clock, plus one; 0 if there is none.
    asked_ns: AtomicU64,
}

struct Common<'l, L> {
    lock: &'l L,
    load: Load,
    clock: Instant,
    phase: AtomicU8,
    /// Number of threads that wait at the gate.
    ready: AtomicUsize,
    /// The gate is closed while this lock is write-locked.
    gate: RwLock<()>,
    slots: Vec<Slot>,
    /// An empty histogram, of which every thread starts with a copy.
    no_waits: Histogram<u64>,
}

impl<L> Common<'_, L> {
    fn now_ns(&self) -> u64 {
        nanos(self.clock.elapsed())
    }

    fn counts(&self) -> Vec<u64> {
        self.slots.iter().map(|slot| slot.acquired.load(Relaxed)).collect()
    }

    fn is(&self, phase: u8) -> bool {
        self.phase.load(Relaxed) == phase
    }
}

/// Lets the threads of `load` contend for `lock` for `seconds`.
pub(crate) fn run<L: Exclusive>(
    lock: &L,
    load: Load,
    seconds: f64,
    stop: &Stop,
) -> Result<Found, SampleError> {
    let threads = load.threads;
    let common = Common {
        lock,
        load,
        clock: Instant::now(),
        phase: AtomicU8::new(SETTLING),
        ready: AtomicUsize::new(0),
        gate: RwLock::new(()),
        slots: (0..threads).map(|_| Slot::default()).collect(),
        no_waits: histogram()?,
    };
    let _counting = Counting::start();
    std::thread::scope(|scope| {
        let closed = common.gate.write().unwrap_or_else(PoisonError::into_inner);
        let started: Result<Vec<_>, _> = (0..threads).map(|place| start(scope, &common, place)).collect();
        if started.is_err() {
            common.phase.store(ENDING, Relaxed); // no data depends on it
        }
        while started.is_ok() && common.ready.load(Relaxed) < threads && !stop.is_asked() {
            std::thread::sleep(Duration::from_micros(100));
        }
        drop(closed);
        let started = started.map_err(|why| SampleError::because("a thread", &why))?;
        pass(seconds * SETTLE, stop);
        let mut found = count(&common, seconds, stop);
        let ended = Instant::now();
        for waits in started.into_iter().map(ScopedJoinHandle::join) {
            let waits =
                waits.map_err(|_| SampleError::Unavailable("a thread of the load panicked".into()))?;
            found.longest_ns = found.longest_ns.max(waits.longest_ns);
            found.waits += waits.histogram;
        }
        found.drain = ended.elapsed();
        if stop.is_asked() { Err(SampleError::Interrupted) } else { Ok(found) }
    })
}

fn pass(seconds: f64, stop: &Stop) {
    let end = Instant::now() + Duration::from_secs_f64(seconds);
    while Instant::now() < end && !stop.is_asked() {
        std::thread::sleep(LOOK.min(end.saturating_duration_since(Instant::now())));
    }
}

/// Measures during the counted time.
fn count<L>(common: &Common<'_, L>, seconds: f64, stop: &Stop) -> Found {
    let (usage, cpu_ns, events) = (Usage::of_this_process(), cpu::process_ns(), LockEvents::now());
    let (from, before) = (Instant::now(), common.counts());
    common.phase.store(COUNTING, Relaxed);
    pass(seconds, stop);
    let (after, counted) = (common.counts(), from.elapsed());
    let (now_ns, cpu_after_ns) = (common.now_ns(), cpu::process_ns());
    let usage = Usage::of_this_process().since(usage);
    let events = LockEvents::now().since(events);
    let asked = common.slots.iter().map(|slot| slot.asked_ns.load(Relaxed)).filter(|&asked| asked > 0);
    let longest_ns = asked.map(|asked| now_ns.saturating_sub(asked)).max().unwrap_or(0);
    common.phase.store(ENDING, Relaxed);
    Found {
        seconds: counted.as_secs_f64(),
        counts: after.iter().zip(&before).map(|(after, before)| after - before).collect(),
        waits: common.no_waits.clone(),
        longest_ns,
        usage,
        cpu_ns: cpu_after_ns - cpu_ns,
        events,
        drain: Duration::ZERO,
    }
}

/// An empty histogram with two significant digits, which takes 30 KiB per thread.
pub(crate) fn histogram() -> Result<Histogram<u64>, SampleError> {
    Histogram::new_with_bounds(1, LONGEST_NS, 2).map_err(|why| SampleError::because("a histogram", &why))
}

/// One thread's waits.
struct Waits {
    histogram: Histogram<u64>,
    longest_ns: u64,
}

fn start<'s, 'e, L: Exclusive>(
    scope: &'s Scope<'s, 'e>,
    common: &'e Common<'e, L>,
    place: usize,
) -> std::io::Result<ScopedJoinHandle<'s, Waits>> {
    let body = move || {
        common.load.place_this_thread(place);
        common.ready.fetch_add(1, Relaxed); // only a number
        drop(common.gate.read().unwrap_or_else(PoisonError::into_inner));
        Hand::new(common, place).work()
    };
    Builder::new().name("lab-contest".into()).stack_size(STACK_BYTES).spawn_scoped(scope, body)
}

/// The state of one thread of the contest.
struct Hand<'c, L> {
    common: &'c Common<'c, L>,
    slot: &'c Slot,
    acquired: u64,
    /// One acquisition in this many is timed.
    stride: u64,
    /// Acquisitions until the next timed one.
    until_timed: u64,
    is_counting: bool,
    waits: Waits,
    /// State of the work that the thread does without the lock.
    value: u64,
}

impl<'c, L: Exclusive> Hand<'c, L> {
    fn new(common: &'c Common<'c, L>, place: usize) -> Self {
        Self {
            common,
            slot: &common.slots[place],
            acquired: 0,
            stride: 1,
            until_timed: 0,
            is_counting: false,
            waits: Waits { histogram: common.no_waits.clone(), longest_ns: 0 },
            value: place as u64,
        }
    }

    fn work(mut self) -> Waits {
        while !self.common.is(ENDING) {
            if !self.is_counting && self.common.is(COUNTING) {
                self.is_counting = true;
                self.stride = (self.acquired / SETTLED).clamp(1, MOST_SKIPPED);
            }
            if self.until_timed == 0 {
                self.until_timed = self.stride;
                self.timed();
            } else {
                let held = self.common.load.held;
                self.common.lock.with(|lines| held.work(lines));
            }
            self.until_timed -= 1;
            self.acquired += 1;
            self.slot.acquired.store(self.acquired, Relaxed);
            self.value = self.common.load.outside.work(self.value);
        }
        self.waits
    }

    fn timed(&mut self) {
        let common = self.common;
        let asked_ns = common.now_ns();
        self.slot.asked_ns.store(asked_ns + 1, Relaxed);
        let had_ns = common.lock.with(|lines| {
            let had_ns = common.now_ns();
            common.load.held.work(lines);
            had_ns
        });
        self.slot.asked_ns.store(0, Relaxed);
        // Ignores waits that ended during the settling time or after the counted time.
        if common.is(COUNTING) {
            let waited_ns = had_ns.saturating_sub(asked_ns);
            self.waits.histogram.saturating_record_n(waited_ns, self.stride);
            self.waits.longest_ns = self.waits.longest_ns.max(waited_ns);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::locks::exclusive::Lines;

    type Peer = lock_api::Mutex<qspinlock::peers::FutexLock, Lines>;

    #[test]
    fn every_thread_gets_the_lock_and_what_it_gets_is_counted() {
        let found = run(&Peer::new(Lines::default()), Load::usual(3), 0.2, &Stop::default()).unwrap();
        assert_eq!(found.counts.len(), 3);
        assert!(found.acquired() > 0 && found.per_second() > 0.0, "{found:?}");
        assert!(!found.waits.is_empty() && found.wait_us(0.999).unwrap() > 0.0);
        assert!(found.longest_ns >= found.waits.min());
    }

    #[test]
    fn contest_that_is_stopped_has_no_figures() {
        let stop = Stop::default();
        stop.ask();
        let ended = run(&Peer::new(Lines::default()), Load::usual(2), 60.0, &stop);
        assert!(matches!(ended, Err(SampleError::Interrupted)), "{ended:?}");
    }
}
