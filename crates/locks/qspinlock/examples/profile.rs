//! Many threads take three locks on four lines; prints their statistics.
//!
//! `cargo run --release -p qspinlock --features stats --example profile`. See also: how to read the table
//! (`docs/how-to/qspinlock-statistics.md`).
#![allow(missing_docs)]

use std::hint::black_box;
use std::thread;

use lock_api::Mutex;
use qspinlock::stats::{self, Mode, Profiled};
use qspinlock::{Hybrid, PvQSpinLock};

type Lock = Mutex<Profiled<PvQSpinLock<Hybrid>>, u64>;

static PAGE_LIST: Lock = Lock::new(0);
static FREE_LIST: Lock = Lock::new(0);
static RUN_QUEUE: Lock = Lock::new(0);

fn work(mut x: u64, steps: u32) -> u64 {
    let factor = black_box(6_364_136_223_846_793_005);
    for _ in 0..steps {
        x = x.wrapping_mul(factor).wrapping_add(1);
    }
    x
}

fn with(lock: &mut u64, steps: u32) {
    *lock = work(*lock, steps);
}

fn job(own: u64) -> u64 {
    with(&mut PAGE_LIST.lock(), 50);
    if own.is_multiple_of(4) {
        with(&mut PAGE_LIST.lock(), 400); // rarely, but for long
    }
    with(&mut FREE_LIST.lock(), 30);
    with(&mut RUN_QUEUE.lock(), 20);
    work(own, 300)
}

fn main() {
    let threads = 4 * thread::available_parallelism().map_or(1, usize::from);
    stats::set_mode(Mode::SAMPLED);
    thread::scope(|scope| {
        (0..threads as u64)
            .for_each(|own| _ = scope.spawn(move || (0..200_000).fold(own, |own, _| job(own))));
    });
    print!("{}", stats::snapshot());
}
