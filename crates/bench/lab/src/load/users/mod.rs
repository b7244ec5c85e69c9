//! Many users, each with a number of short jobs, on all cores.
//!
//! `threads started and pinned → gate → steps, until all jobs are completed or the deadline has passed → Tally`
//!
//! - Either each user has its own thread, or there is one thread per core, which runs an equal share of the users and
//!   switches to the next user after each step. In the second case, as in a kernel, no thread that holds or waits for a
//!   lock is preempted for another user.
//! - A user with its own thread yields the core whenever its job takes a turn in the run queue. Otherwise each user
//!   would finish within one time slice, one after another.
//! - A deadline stops jobs that take too long under a lock. The rate is then computed from the completed work: steps of
//!   unfinished jobs count as parts of jobs.
//! - CPU time and waiting cover the whole sample, including the time after the deadline: a thread cannot leave a lock
//!   that only spins before it has acquired it.
//!
//! See also: the jobs (`system.rs`), the compared locks (`experiments/`).

pub(crate) mod locks;

pub(crate) mod meter;

mod system;

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread::{Builder, Thread};
use std::time::{Duration, Instant};

use self::locks::{Family, SpinUntilOver};
use self::meter::{CALLERS, Meter, Waits};
use self::system::{Job, STEPS, Sleeper, System};
use super::cpu::{Usage, process_ns};
use crate::experiment::SampleError;
use crate::stop::Stop;

/// Time between two checks of the user's request to stop.
const LOOK: Duration = Duration::from_millis(20);
/// Stack size of a user's thread: room for a few frames and for what the system puts on the stack.
const STACK_BYTES: usize = 128 << 10;

/// Which threads run the users' jobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Carried {
    /// One thread per user.
    ByThreads,
    /// One thread per core; the threads share all users.
    ByCores,
}

/// The load: users with jobs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Users {
    pub count: usize,
    pub carried: Carried,
    /// Jobs of each user.
    pub jobs: u64,
    /// The deadline, after which no further step starts.
    pub deadline_s: f64,
}

/// The measurements of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Tally {
    /// Steps of jobs completed before the end or the deadline.
    pub steps: u64,
    pub seconds: f64,
    /// Whether all jobs were completed.
    pub is_complete: bool,
    /// CPU time of the process, in ns.
    pub cpu_ns: u64,
    /// Resource usage of the users' threads.
    pub usage: Usage,
    /// Acquisitions by caller, indexed like [`CALLERS`].
    pub waits: [Waits; CALLERS.len()],
    /// Whether all structures were back in their initial state after the jobs.
    pub is_sound: bool,
}

#[allow(clippy::cast_precision_loss)] // counts of one sample
impl Tally {
    /// Completed jobs, including parts of jobs.
    pub fn jobs(&self) -> f64 {
        self.steps as f64 / STEPS as f64
    }

    pub fn jobs_per_minute(&self) -> f64 {
        if self.seconds > 0.0 { 60.0 * self.jobs() / self.seconds } else { 0.0 }
    }

    /// CPU time of acquisitions that did not find their lock free, in % of all CPU time.
    pub fn contention_percent(&self) -> f64 {
        self.percent_of_cpu(self.waits.iter().map(Waits::all_cpu_ns).sum())
    }

    /// CPU time of one caller's acquisitions that did not find the lock free, in % of all CPU time.
    pub fn caller_percent(&self, caller: usize) -> f64 {
        self.percent_of_cpu(self.waits.get(caller).map_or(0.0, Waits::all_cpu_ns))
    }

    fn percent_of_cpu(&self, ns: f64) -> f64 {
        if self.cpu_ns > 0 { 100.0 * ns / self.cpu_ns as f64 } else { 0.0 }
    }

    fn add(&mut self, part: &Self) {
        self.steps += part.steps;
        self.usage = self.usage.and(part.usage);
        self.waits.iter_mut().zip(&part.waits).for_each(|(sum, part)| *sum = sum.and(*part));
    }

    /// Sum over the acquisitions of all callers.
    pub fn all_waits(&self) -> Waits {
        self.waits.iter().fold(Waits::default(), |sum, part| sum.and(*part))
    }
}

/// State that all threads share.
struct Common<F: Family> {
    system: System<F>,
    users: Users,
    cores: Vec<usize>,
    gate: Gate,
    is_over: AtomicBool,
    /// Number of threads that have jobs left.
    busy: AtomicUsize,
    conductor: Thread,
}

/// The gate where threads wait until all have arrived.
#[derive(Default)]
struct Gate {
    /// How many threads have arrived, and whether the gate is open.
    state: Mutex<(usize, bool)>,
    changed: Condvar,
}

impl Gate {
    fn pass(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.0 += 1;
        self.changed.notify_all();
        drop(self.changed.wait_while(state, |state| !state.1));
    }

    fn wait_for(&self, count: usize) {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.changed.wait_while(state, |state| state.0 < count));
    }

    fn open(&self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).1 = true;
        self.changed.notify_all();
    }
}

/// Runs the load with the locks of `F`.
pub(crate) fn run<F: Family>(users: Users, stop: &Stop) -> Result<Tally, SampleError> {
    let cores = allowed_cores();
    let carriers = match users.carried {
        Carried::ByThreads => users.count,
        Carried::ByCores => users.count.min(cores.len().max(1)),
    };
    let common = Common::<F> {
        system: System::new(users.count, cores.len()),
        users,
        cores,
        gate: Gate::default(),
        is_over: AtomicBool::new(false),
        busy: AtomicUsize::new(carriers),
        conductor: std::thread::current(),
    };
    let mut tally = under_load(&common, carriers, stop)?;
    tally.is_complete = tally.steps == users.count as u64 * users.jobs * STEPS as u64;
    tally.is_sound = !tally.is_complete || common.system.is_idle();
    if stop.is_asked() { Err(SampleError::Interrupted) } else { Ok(tally) }
}

/// Cores that this thread may run on.
fn allowed_cores() -> Vec<usize> {
    let places = 0..rustix::thread::CpuSet::MAX_CPU;
    let allowed = rustix::thread::sched_getaffinity(None);
    allowed.map(|set| places.filter(|&core| set.is_set(core)).collect()).unwrap_or_default()
}

fn under_load<F: Family>(common: &Common<F>, carriers: usize, stop: &Stop) -> Result<Tally, SampleError> {
    std::thread::scope(|scope| {
        let start = |carrier| {
            let body = move || Carrier::new(common, carrier, carriers).work();
            Builder::new().name("lab-user".into()).stack_size(STACK_BYTES).spawn_scoped(scope, body)
        };
        let hands: Result<Vec<_>, _> = (0..carriers).map(start).collect();
        if let Err(error) = &hands {
            common.is_over.store(true, Relaxed); // ordered by the gate
            common.gate.open();
            return Err(SampleError::because(&format!("one of {carriers} threads"), error));
        }
        common.gate.wait_for(carriers);
        let before_ns = process_ns();
        common.gate.open();
        let seconds = conduct(common, stop);
        let parts = hands.unwrap_or_default().into_iter().filter_map(|hand| hand.join().ok());
        let mut sum = Tally { seconds, ..Tally::default() };
        parts.for_each(|part| sum.add(&part));
        sum.cpu_ns = process_ns().saturating_sub(before_ns);
        Ok(sum)
    })
}

/// Waits until all jobs are completed or the deadline has passed. Returns the elapsed time.
fn conduct<F: Family>(common: &Common<F>, stop: &Stop) -> f64 {
    SpinUntilOver::set_over(false);
    let since = Instant::now();
    let end = since + Duration::from_secs_f64(common.users.deadline_s);
    // Acquire pairs with the release of the last thread, which must have ended before the clock is read.
    while common.busy.load(Acquire) > 0 && Instant::now() < end && !stop.is_asked() {
        std::thread::park_timeout(LOOK.min(end.saturating_duration_since(Instant::now())));
    }
    let seconds = since.elapsed().as_secs_f64();
    common.is_over.store(true, Relaxed); // no data depends on it
    SpinUntilOver::set_over(true);
    seconds
}

/// A thread's state and the users that it runs.
struct Carrier<'c, F: Family> {
    common: &'c Common<F>,
    core: Option<usize>,
    jobs: Vec<Job>,
    /// Jobs left for each user.
    left: u64,
    meter: Meter,
    steps: u64,
}

impl<'c, F: Family> Carrier<'c, F> {
    fn new(common: &'c Common<F>, number: usize, of: usize) -> Self {
        let Users { count, jobs, .. } = common.users;
        let own = number * count / of..(number + 1) * count / of;
        Self {
            common,
            core: common.cores.get(number % common.cores.len().max(1)).copied(),
            jobs: own.map(Job::of).collect(),
            left: jobs,
            meter: Meter::new(u32::try_from(number).unwrap_or(0)),
            steps: 0,
        }
    }

    fn work(mut self) -> Tally {
        if let Some(core) = self.core {
            pin(core);
        }
        self.common.gate.pass();
        let before = Usage::of_this_thread();
        let mut sleeper = Sleeper::new(self.common.users.carried == Carried::ByThreads);
        while self.left > 0 && !self.jobs.is_empty() && self.go_round(&mut sleeper) {}
        // Release pairs with the acquire in `conduct`.
        if self.common.busy.fetch_sub(1, Release) == 1 {
            self.common.conductor.unpark();
        }
        let usage = Usage::of_this_thread().since(before);
        Tally { steps: self.steps, usage, waits: *self.meter.waits(), ..Tally::default() }
    }

    /// Makes one step for each user. Returns false if the deadline has passed.
    fn go_round(&mut self, sleeper: &mut Sleeper) -> bool {
        let mut ended = false;
        for job in &mut self.jobs {
            ended = job.advance(&self.common.system, sleeper, &mut self.meter);
            if self.common.is_over.load(Relaxed) {
                return false;
            }
            self.steps += 1;
        }
        // All users are at the same step.
        self.left -= u64::from(ended);
        true
    }
}

/// If pinning is not allowed, the scheduler places the threads.
fn pin(core: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(core);
    let _ = rustix::thread::sched_setaffinity(None, &set);
}

#[cfg(test)]
mod tests {
    use qspinlock::{StdMutex, TicketLock};

    use super::*;
    use crate::load::users::locks::Exclusive;

    struct Std;

    impl Family for Std {
        type Lock = StdMutex;
        type Table<T: Send + Sync> = std::sync::RwLock<T>;
    }

    struct ParkingLot;

    impl Family for ParkingLot {
        type Lock = parking_lot::RawMutex;
        type Table<T: Send + Sync> = parking_lot::RwLock<T>;
    }

    struct Ticket;

    impl Family for Ticket {
        type Lock = TicketLock;
        type Table<T: Send + Sync> = Exclusive<TicketLock, T>;
    }

    fn users(count: usize, carried: Carried) -> Users {
        Users { count, carried, jobs: 3, deadline_s: 60.0 }
    }

    fn complete<F: Family>(users: Users) -> Tally {
        let tally = run::<F>(users, &Stop::default()).unwrap();
        assert!(tally.is_complete && tally.is_sound, "{tally:?}");
        tally
    }

    #[test]
    fn all_jobs_of_all_users_end_and_leave_everything_as_it_was() {
        let tally = complete::<Std>(users(40, Carried::ByThreads));
        assert!((tally.jobs() - 120.0).abs() < 1e-9, "{tally:?}");
        complete::<ParkingLot>(users(40, Carried::ByThreads));
    }

    #[test]
    fn users_that_share_a_thread_do_all_their_jobs() {
        let tally = complete::<Ticket>(users(33, Carried::ByCores));
        assert!((tally.jobs() - 99.0).abs() < 1e-9, "{tally:?}");
        assert!(tally.jobs_per_minute() > 0.0 && tally.cpu_ns > 0, "{tally:?}");
    }

    /// Acquisitions per job. Page list: eight faults and the exit. Free list: eight faults, the exit and the first
    /// pages.
    #[test]
    fn every_caller_of_a_job_is_counted() {
        let tally = complete::<Std>(users(1, Carried::ByThreads));
        let per_job = tally.waits.map(|waits| waits.acquired / 3);
        assert_eq!(per_job, [9, 10, 6, 8, 6]);
    }

    #[test]
    fn jobs_that_take_too_long_are_a_rate_by_the_deadline() {
        let users = Users { jobs: u64::MAX >> 32, deadline_s: 0.05, ..users(4, Carried::ByThreads) };
        let tally = run::<Std>(users, &Stop::default()).unwrap();
        assert!(!tally.is_complete && tally.steps > 0 && tally.seconds >= 0.05, "{tally:?}");
    }

    #[test]
    fn user_who_wants_the_end_gets_it() {
        let stop = Stop::default();
        stop.ask();
        let users = Users { jobs: u64::MAX >> 32, ..users(4, Carried::ByThreads) };
        assert!(matches!(run::<Std>(users, &stop), Err(SampleError::Interrupted)));
    }
}
