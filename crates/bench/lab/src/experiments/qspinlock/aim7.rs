//! `qspinlock-aim7`: runs the users' jobs over one family of locks.
//!
//! `sample → users (threads, or run by one thread per core) → jobs until done or the deadline → Tally → Reading`
//!
//! - Each sample makes new locks, structures and threads.

use std::marker::PhantomData;

use qspinlock::{Api04, Fair, Hybrid, Native, Policy, PvQSpinLock, StdMutex, TicketLock};

use super::aim7_declaration::{FULL_S, JOBS_PER_USER, Kind, VARIANTS, WORKLOADS, declaration};
use crate::error::LabError;
use crate::experiment::{Bench, Cell, Experiment, Reading, SampleError, Setup};
use crate::load::users::locks::{Exclusive, Family, SpinUntilOver};
use crate::load::users::meter::Waits;
use crate::load::users::{Carried, Tally, Users, run};
use crate::machine::StoragePlace;

/// Shorter samples only test the code; they have a fraction of the users.
const SHORT_S: f64 = 0.1;
const SHORT_PART: usize = 20;

pub(crate) fn experiment() -> Experiment {
    Experiment { declaration: declaration(), make: |setup| Box::new(Aim7 { setup: setup.clone() }) }
}

struct Aim7 {
    setup: Setup,
}

/// A run with this lock uses the lock for the table as well, so readers exclude each other.
struct Ticket;

impl Family for Ticket {
    type Lock = TicketLock;
    type Table<T: Send + Sync> = Exclusive<TicketLock, T>;
}

/// A ticket lock for many threads on few cores that lets them leave at the deadline, unlike the one in `qspinlock`.
struct TicketOfMany;

impl Family for TicketOfMany {
    type Lock = Api04<spin::mutex::TicketMutex<(), SpinUntilOver>>;
    type Table<T: Send + Sync> = Exclusive<Self::Lock, T>;
}

/// The table's lock is fair for any `P`.
struct Queued<P>(PhantomData<P>);

impl<P: Policy> Family for Queued<P> {
    type Lock = PvQSpinLock<P>;
    type Table<T: Send + Sync> = qspinlock::RwLock<T>;
}

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

impl Aim7 {
    fn is_short(&self) -> bool {
        self.setup.effort.seconds < SHORT_S
    }

    /// A short sample has fewer users.
    fn users(&self, workload: usize) -> Users {
        let (count, carried) = WORKLOADS[workload];
        let count = if self.is_short() { count / SHORT_PART } else { count };
        Users { count, carried, jobs: self.jobs().into(), deadline_s: self.setup.effort.seconds }
    }

    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // from 1 to JOBS_PER_USER
    fn jobs(&self) -> u32 {
        let part = (self.setup.effort.seconds / FULL_S).clamp(0.0, 1.0);
        ((part * f64::from(JOBS_PER_USER)).round() as u32).max(1)
    }
}

impl Bench for Aim7 {
    fn prepare(&mut self, _: &mut dyn FnMut(&str, f64)) -> Result<(), LabError> {
        Ok(())
    }

    fn sample(&mut self, cell: Cell) -> Result<Reading, SampleError> {
        let (users, stop) = (self.users(cell.workload), &self.setup.stop);
        let tally = match VARIANTS[cell.variant].2 {
            Kind::Ticket if users.carried == Carried::ByThreads => run::<TicketOfMany>(users, stop),
            Kind::Ticket => run::<Ticket>(users, stop),
            Kind::Native => run::<Queued<Native>>(users, stop),
            Kind::Fair => run::<Queued<Fair>>(users, stop),
            Kind::Hybrid => run::<Queued<Hybrid>>(users, stop),
            Kind::Std => run::<Std>(users, stop),
            Kind::ParkingLot => run::<ParkingLot>(users, stop),
        }?;
        if !tally.is_sound {
            return Err(SampleError::Unavailable("pages or processes were left over after all jobs".into()));
        }
        Ok(reading(&tally, users))
    }

    fn storages(&self) -> Vec<StoragePlace> {
        Vec::new()
    }

    fn notes(&self) -> Vec<String> {
        let (jobs, seconds) = (self.jobs(), self.setup.effort.seconds);
        let mut notes = vec![format!("{jobs} jobs per user, at most {seconds} s.")];
        if self.is_short() {
            notes.push(format!("Short samples: one in {SHORT_PART} of the named number of users."));
        }
        notes
    }
}

/// Returns the figures in the order of the columns.
#[allow(clippy::cast_precision_loss)] // counts of one sample
fn reading(tally: &Tally, users: Users) -> Reading {
    let (rate, done) = (tally.jobs_per_minute(), tally.jobs());
    let wanted = users.count as f64 * users.jobs as f64;
    let all = tally.all_waits();
    let per_job = |total: f64| (done > 0.0).then(|| total / done);
    let mut reading = vec![
        Some(rate),
        (rate > 0.0).then(|| 60.0 * wanted / rate),
        Some(100.0 * done / wanted),
        Some(tally.contention_percent()),
        contended_percent(&all),
        (all.contended > 0).then(|| all.all_waited_ns() / all.contended as f64 / 1000.0),
        per_job(tally.usage.switches() as f64),
        per_job(tally.cpu_ns as f64 / 1000.0),
    ];
    reading.extend((0..tally.waits.len()).map(|caller| Some(tally.caller_percent(caller))));
    reading.extend(tally.waits.iter().map(contended_percent));
    reading
}

#[allow(clippy::cast_precision_loss)] // counts of one sample
fn contended_percent(waits: &Waits) -> Option<f64> {
    (waits.acquired > 0).then(|| 100.0 * waits.contended as f64 / waits.acquired as f64)
}
