//! `qspinlock-overcommit`: one lock, with half as many threads as cores up to 64 times as many.
//!
//! `sample → (busy neighbours) → contest → Reading`
//!
//! - Each sample makes a new lock and threads, and pins the threads round-robin.
//! - A lock that hands over to preempted spinning threads needs a time slice per acquisition, and another one for each
//!   thread to leave. Such locks are measured with up to 16 threads per core, and omitted where a run with fewer
//!   threads predicts that leaving would take longer than [`MOST_DRAIN_S`].

use std::collections::HashMap;

use super::columns::reading;
use super::locks::{COMPARED, Lock, WithLock};
use super::overcommit_declaration::{Load, declaration, loads};
use crate::error::LabError;
use crate::experiment::{Bench, Cell, Experiment, Reading, SampleError, Setup};
use crate::load::cores;
use crate::load::locks::contest;
use crate::load::locks::contest::Found;
use crate::load::locks::exclusive::Exclusive;
use crate::load::locks::turn;
use crate::load::neighbours::Neighbours;
use crate::machine::StoragePlace;
use crate::stop::Stop;

/// Limit of the predicted time that the threads need to leave. Beyond it, the run is not started.
const MOST_DRAIN_S: f64 = 5.0;
/// Shorter samples only test the code; they have fewer threads.
pub(super) const SHORT_S: f64 = 0.02;
/// Threads per core in a short sample.
pub(super) const SHORT_PER_CORE: usize = 2;

pub(crate) fn experiment() -> Experiment {
    let cores = cores::all().len();
    Experiment {
        declaration: declaration(cores),
        make: |setup| {
            let loads = loads(cores::all().len());
            Box::new(Overcommit { setup: setup.clone(), loads, drains: Drains::default() })
        },
    }
}

struct Overcommit {
    setup: Setup,
    loads: Vec<Load>,
    drains: Drains,
}

impl Overcommit {
    fn is_short(&self) -> bool {
        self.setup.effort.seconds < SHORT_S
    }

    fn threads(&self, load: &Load) -> usize {
        let most = if self.is_short() { SHORT_PER_CORE * cores::all().len() } else { usize::MAX };
        load.threads.min(most)
    }
}

/// For each lock: the number of threads, and the time to leave divided by the square of that number.
#[derive(Default)]
struct Drains(HashMap<Lock, (usize, f64)>);

#[allow(clippy::cast_precision_loss)] // numbers of threads
impl Drains {
    /// Each thread needs a time slice of every thread before it, so the time grows with the square.
    fn expected_s(&self, lock: Lock, threads: usize) -> Option<f64> {
        let (_, per_square_s) = self.0.get(&lock).filter(|(fewer, _)| *fewer < threads)?;
        Some(per_square_s * (threads * threads) as f64)
    }

    fn allow(&self, lock: Lock, threads: usize) -> Result<(), SampleError> {
        match self.expected_s(lock, threads) {
            Some(expected_s) if expected_s > MOST_DRAIN_S => Err(SampleError::Unavailable(format!(
                "skipped: the runs with fewer threads predict that ending the threads would take \
                 {expected_s:.1} s, more than {MOST_DRAIN_S} s"
            ))),
            _ => Ok(()),
        }
    }

    fn note(&mut self, lock: Lock, threads: usize, drain_s: f64) {
        let most = self.0.get(&lock).map_or(0, |(most, _)| *most);
        if threads >= most {
            self.0.insert(lock, (threads, drain_s / (threads * threads) as f64));
        }
    }
}

/// A contest over any lock.
pub(crate) struct Contest<'s> {
    pub load: turn::Load,
    pub seconds: f64,
    pub stop: &'s Stop,
}

impl WithLock for Contest<'_> {
    type Out = Result<Found, SampleError>;

    fn with<L: Exclusive>(self) -> Self::Out {
        contest::run(&L::new(), self.load, self.seconds, self.stop)
    }
}

impl Bench for Overcommit {
    fn prepare(&mut self, _: &mut dyn FnMut(&str, f64)) -> Result<(), LabError> {
        Ok(())
    }

    fn sample(&mut self, cell: Cell) -> Result<Reading, SampleError> {
        let (lock, load) = (COMPARED[cell.variant], &self.loads[cell.workload]);
        let threads = self.threads(load);
        if lock.spins_in_order() {
            self.drains.allow(lock, threads)?;
        }
        let neighbours = load.is_beside_others.then(|| Neighbours::start(1)).transpose()?;
        let contest =
            Contest { load: turn::Load::usual(threads), seconds: cell.seconds, stop: &self.setup.stop };
        let found = lock.with(contest)?;
        drop(neighbours);
        self.drains.note(lock, threads, found.drain.as_secs_f64());
        Ok(reading(&found, lock.is_counted()))
    }

    fn storages(&self) -> Vec<StoragePlace> {
        Vec::new()
    }

    fn notes(&self) -> Vec<String> {
        let mut notes = vec![format!(
            "{} cores; every thread is pinned to one, round robin. Locks that spin in order of arrival are measured up to \
             16 threads per core.",
            cores::all().len()
        )];
        if self.is_short() {
            notes.push(format!(
                "Short samples: at most {SHORT_PER_CORE} threads per core, even where the tables name more."
            ));
        }
        notes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leaving_is_expected_to_take_four_times_as_long_with_twice_the_threads() {
        let mut drains = Drains::default();
        assert_eq!(drains.expected_s(Lock::Ticket, 8), None);
        drains.note(Lock::Ticket, 8, 1.0);
        assert_eq!(drains.expected_s(Lock::Ticket, 16), Some(4.0));
        assert_eq!((drains.expected_s(Lock::Mcs, 16), drains.expected_s(Lock::Ticket, 8)), (None, None));
        assert!(drains.allow(Lock::Ticket, 16).is_ok());
        assert!(drains.allow(Lock::Ticket, 32).unwrap_err().to_string().starts_with("skipped: "));
    }
}
