//! `qspinlock-timed`: how late a timed lock times out on a machine with more threads than cores.
//!
//! `sample → contest over one lock (the load) ∥ a thread per core: timed attempt on a second lock, sleep, …`
//!
//! - The second lock is always held, so every attempt ends at its deadline. Between attempts, the same thread sleeps
//!   for the same times with `clock_nanosleep`, which shows the system's own lateness.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use lock_api::Mutex;
use qspinlock::peers::FutexLock;
use qspinlock::{Fair, Fifo, Hybrid, PvQSpinLock};

use super::locks::{Lock, ids};
use crate::error::LabError;
use crate::experiment::{
    Bench, Cell, Column, Declaration, Difference, Effort, Experiment, Published, PublishedColumn,
    PublishedRow, RatioForm, Reading, SampleError, Setup, Source, Target, Workload, Yardstick,
};
use crate::load::cores;
use crate::load::locks::contest;
use crate::load::locks::contest::Found;
use crate::load::locks::exclusive::{Lines, Timed};
use crate::load::locks::turn::Load;
use crate::load::nanos;
use crate::machine::StoragePlace;
use crate::stop::Stop;

const LOCKS: [Lock; 5] = [Lock::Hybrid, Lock::Fair, Lock::Fifo, Lock::ParkingLot, Lock::Futex];
const PER_CORE: [usize; 3] = [1, 4, 16];
/// The timeouts, used in rotation.
const TIMEOUTS_MS: [u64; 5] = [1, 2, 3, 4, 5];
const EXCESS: &str = "excess";
const LATE: &str = "late-p99";
const RATE: &str = "rate";

pub(crate) fn experiment() -> Experiment {
    Experiment { declaration: declaration(), make: |setup| Box::new(Overshoot { setup: setup.clone() }) }
}

struct Overshoot {
    setup: Setup,
}

/// Lateness of timeouts, in ns.
struct Late {
    lock: Histogram<u64>,
    sleep: Histogram<u64>,
    /// Number of attempts that got the lock although it was never released.
    acquired: u64,
}

impl Late {
    fn none() -> Result<Self, SampleError> {
        Ok(Self { lock: contest::histogram()?, sleep: contest::histogram()?, acquired: 0 })
    }

    fn and(mut self, other: &Self) -> Self {
        self.lock += &other.lock;
        self.sleep += &other.sleep;
        self.acquired += other.acquired;
        self
    }
}

fn measure<L: Timed>(threads: usize, seconds: f64, stop: &Stop) -> Result<(Late, Found), SampleError> {
    let (held, busy, is_over) = (L::new(), L::new(), AtomicBool::new(false));
    held.with(|_| {
        std::thread::scope(|scope| {
            let waiters: Result<Vec<_>, SampleError> = (0..cores::all().len())
                .map(|place| {
                    let (late, held, is_over) = (Late::none()?, &held, &is_over);
                    Ok(scope.spawn(move || wait_and_sleep(late, place, held, is_over)))
                })
                .collect();
            let found = contest::run(&busy, Load::usual(threads), seconds, stop);
            is_over.store(true, Relaxed); // no data depends on it
            let mut late = Late::none()?;
            for waiter in waiters? {
                let panicked = |_| SampleError::Unavailable("a thread that waited panicked".into());
                late = late.and(&waiter.join().map_err(panicked)?);
            }
            Ok((late, found?))
        })
    })
}

fn wait_and_sleep<L: Timed>(mut late: Late, place: usize, held: &L, is_over: &AtomicBool) -> Late {
    cores::pin_this_thread(place);
    let mut turn = place;
    while !is_over.load(Relaxed) {
        let timeout = Duration::from_millis(TIMEOUTS_MS[turn % TIMEOUTS_MS.len()]);
        turn += 1;
        let asked = Instant::now();
        late.acquired += u64::from(held.with_within(timeout, |_: &mut Lines| ()).is_some());
        late.lock.saturating_record(beyond_ns(asked, timeout));
        let asked = Instant::now();
        std::thread::sleep(timeout);
        late.sleep.saturating_record(beyond_ns(asked, timeout));
    }
    late
}

fn beyond_ns(asked: Instant, timeout: Duration) -> u64 {
    nanos(asked.elapsed().saturating_sub(timeout))
}

impl Bench for Overshoot {
    fn prepare(&mut self, _: &mut dyn FnMut(&str, f64)) -> Result<(), LabError> {
        Ok(())
    }

    fn sample(&mut self, cell: Cell) -> Result<Reading, SampleError> {
        let (threads, seconds) = (PER_CORE[cell.workload] * cores::all().len(), cell.seconds);
        let stop = &self.setup.stop;
        let (late, found) = match LOCKS[cell.variant] {
            Lock::Hybrid => measure::<Mutex<PvQSpinLock<Hybrid>, Lines>>(threads, seconds, stop)?,
            Lock::Fair => measure::<Mutex<PvQSpinLock<Fair>, Lines>>(threads, seconds, stop)?,
            Lock::Fifo => measure::<Mutex<PvQSpinLock<Fifo>, Lines>>(threads, seconds, stop)?,
            Lock::ParkingLot => measure::<Mutex<parking_lot::RawMutex, Lines>>(threads, seconds, stop)?,
            _ => measure::<Mutex<FutexLock, Lines>>(threads, seconds, stop)?,
        };
        if late.acquired > 0 {
            let why = format!("the lock was held all the time, but was acquired {} times", late.acquired);
            return Err(SampleError::Unavailable(why));
        }
        Ok(reading(&late, &found))
    }

    fn storages(&self) -> Vec<StoragePlace> {
        Vec::new()
    }

    fn notes(&self) -> Vec<String> {
        vec![format!("{} cores; every thread is pinned to one, round robin.", cores::all().len())]
    }
}

/// Returns the figures in the order of the columns.
#[allow(clippy::cast_precision_loss)] // ns of one sample
fn reading(late: &Late, found: &Found) -> Reading {
    let ms = |histogram: &Histogram<u64>, quantile| {
        (!histogram.is_empty()).then(|| histogram.value_at_quantile(quantile) as f64 / 1e6)
    };
    let (lock, sleep) = (ms(&late.lock, 0.99), ms(&late.sleep, 0.99));
    vec![
        Some(found.per_second() / 1e3),
        ms(&late.lock, 0.5),
        lock,
        ms(&late.sleep, 0.5),
        sleep,
        lock.zip(sleep).map(|(lock, sleep)| lock - sleep),
        Some(late.lock.len() as f64),
    ]
}

fn declaration() -> Declaration {
    Declaration {
        name: "qspinlock-timed".into(),
        question: "How late does a timed lock give up?".into(),
        source: Source {
            title: "pthread_mutex_timedlock (POSIX)".into(),
            year: 2024,
            setup: "any lateness is allowed".into(),
        },
        published: published(),
        differences: vec![Difference::new(
            "no figures",
            "timeouts of 1 to 5 ms on a lock that is held, beside threads that contend for another lock of \
             the same kind",
            "the lateness of the system's timers is measured in the same threads and subtracted",
        )],
        variants: LOCKS.map(Lock::variant).into(),
        workloads: PER_CORE.map(workload).into(),
        columns: columns(),
        baseline: Lock::Futex.id().into(),
        compared: RATE.into(),
        ratio_title: "load, relative to plain futex".into(),
        ratio_form: RatioForm::Share,
        plots: Vec::new(),
        curves: Vec::new(),
        courses: Vec::new(),
        stacks: Vec::new(),
        maps: Vec::new(),
        targets: vec![Target {
            text: "16 threads per core: a timed lock gives up within 2 ms of clock_nanosleep, at the 99th \
                   percentile"
                .into(),
            variants: ids(&[Lock::Hybrid, Lock::Fair, Lock::Fifo]),
            workloads: vec!["timed-16x".into()],
            at_least: 0.0,
            half_width_max: 1.0,
            yardstick: Yardstick::Figure { column: EXCESS.into(), at_most: 2.0 },
        }],
        full: Effort { rounds: 9, seconds: 1.0, file_bytes: 0 },
        quick: Effort { rounds: 1, seconds: 0.1, file_bytes: 0 },
    }
}

fn columns() -> Vec<Column> {
    let column = Column::new;
    let beyond = "Time from the end of the requested timeout until the call returned.";
    vec![
        column(RATE, "load", "k/s", 1, "Acquisitions of the other lock per second, by the load's threads."),
        column("late-p50", "late p50", "ms", 3, beyond),
        column(LATE, "late p99", "ms", 3, beyond),
        column(
            "sleep-p50",
            "sleep late p50",
            "ms",
            3,
            "Like late p50, but for clock_nanosleep, which the same threads call between two attempts.",
        ),
        column("sleep-p99", "sleep late p99", "ms", 3, "Like late p99, but for clock_nanosleep."),
        column(
            EXCESS,
            "beyond sleep p99",
            "ms",
            3,
            "99th percentile of the lock's lateness minus that of clock_nanosleep, in one sample.",
        ),
        column(
            "attempts",
            "attempts",
            "",
            0,
            "Number of timed attempts in the sample; the number of sleeps is the same.",
        ),
    ]
}

fn workload(per_core: usize) -> Workload {
    Workload::new(&format!("timed-{per_core}x"), &format!("{per_core} threads per core as load"))
}

fn published() -> Published {
    let row = |lock: Lock| PublishedRow::new("not published", lock.id(), &[]);
    Published {
        caption: "Milliseconds beyond the requested timeout, 99th percentile".into(),
        columns: vec![PublishedColumn::new("16 threads per core", "timed-16x", LATE)],
        rows: LOCKS.map(row).into(),
        conclusion: "No publication promises a bound.".into(),
    }
}
