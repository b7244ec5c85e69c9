//! Measures the cost of statistics: the same loop with the bare lock, and with statistics off, counting,
//! sampling and timing everything.
//!
//! A turn is 50 steps of a generator under the lock and 100 without it; each step depends on the one before.
//! Every round runs all variants one after another, in a different order than the round before. A figure is
//! the median over rounds of the ratio to the same round's "off". Threads are pinned round robin.
//!
//! Next to each figure is its 95 % confidence interval.
//!
//! Times are CPU times, so that a busy machine disturbs little: per turn and thread, summed over all threads.
//!
//! `cargo bench -p qspinlock --bench stats --features stats`. See also: what is counted (`tests/stats/main.rs`).
#![allow(missing_docs, clippy::unwrap_used, clippy::cast_possible_truncation, clippy::cast_precision_loss)]

use std::hint::black_box;
use std::sync::Barrier;
use std::thread;
use std::time::Instant;

use lock_api::{Mutex, RawMutex};
use qspinlock::stats::{Mode, Profiled, set_mode};
use qspinlock::{Fifo, Hybrid, PvQSpinLock};

const INSIDE: u32 = 50;
const OUTSIDE: u32 = 100;

/// The number of rounds and turns: for a real measurement, or just to see that it runs.
#[derive(Clone, Copy)]
struct Size {
    rounds: usize,
    turns: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct Cost {
    cpu_ns: f64,
    wall_ns: f64,
}

fn steps(mut x: u64, n: u32) -> u64 {
    // Hidden from the compiler, which would otherwise merge n steps into one.
    let factor = black_box(6_364_136_223_846_793_005);
    for _ in 0..n {
        x = x.wrapping_mul(factor).wrapping_add(1_442_695_040_888_963_407);
    }
    x
}

fn pin(core: usize) {
    // SAFETY: a set of processors is plain data, and all zero bytes are the empty one.
    let mut set = unsafe { std::mem::zeroed::<libc::cpu_set_t>() };
    // SAFETY: the core's number is far below the set's size.
    unsafe { libc::CPU_SET(core, &mut set) };
    // SAFETY: `set` has that size and is only read; 0 means the calling thread.
    unsafe { libc::sched_setaffinity(0, size_of_val(&set), &raw const set) };
}

fn thread_cpu_ns() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a timespec that the call may write to.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}

#[inline(never)]
fn turn<L: RawMutex>(lock: &Mutex<L, u64>, own: u64) -> u64 {
    let mut shared = lock.lock();
    *shared = steps(*shared, INSIDE);
    drop(shared);
    steps(own, OUTSIDE)
}

/// The cost of one turn.
fn run<L: RawMutex + Send + Sync>(threads: usize, turns: u32) -> Cost {
    let lock = Mutex::<L, u64>::new(1);
    let cores = thread::available_parallelism().unwrap().get();
    let start = Barrier::new(threads + 1);
    let body = |number: usize| {
        pin(number % cores);
        (0..turns / 20).fold(0, |own, _| turn(&lock, own)); // warms up its number, its row, its caches
        start.wait();
        let before = thread_cpu_ns();
        black_box((0..turns).fold(number as u64, |own, _| turn(&lock, own)));
        thread_cpu_ns() - before
    };
    let all = threads as f64 * f64::from(turns);
    thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|number| scope.spawn(move || body(number))).collect();
        start.wait();
        let started = Instant::now();
        let cpu_ns: f64 = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
        Cost { cpu_ns: cpu_ns / all, wall_ns: started.elapsed().as_nanos() as f64 / all }
    })
}

const VARIANTS: [(&str, Option<Mode>); 6] = [
    ("off", Some(Mode::Off)),
    ("lock alone", None),
    ("counters", Some(Mode::Counters)),
    ("one in 17", Some(Mode::Sampled { one_in: 17 })),
    ("one in 127", Some(Mode::SAMPLED)),
    ("all timed", Some(Mode::Full)),
];

fn run_variant<L: RawMutex + Send + Sync>(mode: Option<Mode>, threads: usize, turns: u32) -> Cost {
    let Some(mode) = mode else { return run::<L>(threads, turns) };
    set_mode(mode);
    let cost = run::<Profiled<L>>(threads, turns);
    set_mode(Mode::Off);
    cost
}

/// The median, and the bounds of its 95 % confidence interval.
fn median(mut values: Vec<f64>) -> [f64; 3] {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    let reach = (0.98 * (values.len() as f64).sqrt()).ceil() as usize;
    let at = |place: usize| values[place.min(values.len() - 1)];
    [at(middle.saturating_sub(reach)), at(middle), at(middle + reach)]
}

fn compare<L: RawMutex + Send + Sync>(name: &str, threads: usize, size: Size) {
    let round = |number: usize| {
        let mut costs = [Cost::default(); VARIANTS.len()];
        for place in 0..VARIANTS.len() {
            let variant = (place + number) % VARIANTS.len();
            costs[variant] = run_variant::<L>(VARIANTS[variant].1, threads, size.turns / threads as u32);
        }
        costs
    };
    let rounds: Vec<_> = (0..size.rounds).map(round).collect();
    for (variant, (what, _)) in VARIANTS.iter().enumerate() {
        let cpu = median(rounds.iter().map(|costs| costs[variant].cpu_ns).collect());
        let change = |of: fn(&Cost) -> f64| {
            let ratio = |costs: &[Cost; VARIANTS.len()]| of(&costs[variant]) / of(&costs[0]);
            median(rounds.iter().map(ratio).collect()).map(|ratio| 100.0 * (ratio - 1.0))
        };
        let ([low, middle, high], [_, wall, _]) = (change(|cost| cost.cpu_ns), change(|cost| cost.wall_ns));
        println!(
            "{name:<7} {threads:>3} {what:<11} {:>8.1} ns {middle:>+7.2} % [{low:+.2} … {high:+.2}] {wall:>+7.2} %",
            cpu[1]
        );
    }
}

fn main() {
    // `cargo bench` passes this flag; a test run does not.
    let full = std::env::args().any(|argument| argument == "--bench");
    let size = if full { Size { rounds: 301, turns: 60_000 } } else { Size { rounds: 2, turns: 400 } };
    let cores = thread::available_parallelism().unwrap().get();
    println!(
        "{} rounds; processor time per turn, change to \"off\" [95 % interval of the median], change of the wall time",
        size.rounds
    );
    compare::<PvQSpinLock<Hybrid>>("hybrid", 1, size);
    compare::<PvQSpinLock<Hybrid>>("hybrid", 2 * cores, size);
    compare::<PvQSpinLock<Fifo>>("fifo", 2 * cores, Size { turns: size.turns / 10, ..size });
}
