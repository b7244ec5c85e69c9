//! `qspinlock-plane`: one lock, by hold time, time outside, number of threads, pinning, and busy neighbours.
//!
//! `sample → (busy neighbours) → contest with the point's load → Reading`
//!
//! - All compared locks put their waiters to sleep, so none of them needs a limit of threads.

use super::columns::reading;
use super::overcommit::{Contest, SHORT_PER_CORE, SHORT_S};
use super::plane_declaration::{LOCKS, Point, declaration, points};
use crate::error::LabError;
use crate::experiment::{Bench, Cell, Experiment, Reading, SampleError, Setup};
use crate::load::cores;
use crate::load::locks::turn::Load;
use crate::load::neighbours::Neighbours;
use crate::machine::StoragePlace;

pub(crate) fn experiment() -> Experiment {
    Experiment {
        declaration: declaration(cores::all().len()),
        make: |setup| Box::new(Plane { setup: setup.clone(), points: points(cores::all().len()) }),
    }
}

struct Plane {
    setup: Setup,
    points: Vec<Point>,
}

impl Plane {
    fn is_short(&self) -> bool {
        self.setup.effort.seconds < SHORT_S
    }

    fn load(&self, point: &Point) -> Load {
        let most = if self.is_short() { SHORT_PER_CORE * cores::all().len() } else { usize::MAX };
        Load { threads: point.load.threads.min(most), ..point.load }
    }
}

impl Bench for Plane {
    fn prepare(&mut self, _: &mut dyn FnMut(&str, f64)) -> Result<(), LabError> {
        Ok(())
    }

    fn sample(&mut self, cell: Cell) -> Result<Reading, SampleError> {
        let (lock, point) = (LOCKS[cell.variant], &self.points[cell.workload]);
        let neighbours = point.is_beside_others.then(|| Neighbours::start(1)).transpose()?;
        let contest = Contest { load: self.load(point), seconds: cell.seconds, stop: &self.setup.stop };
        let found = lock.with(contest)?;
        drop(neighbours);
        Ok(reading(&found, lock.is_counted()))
    }

    fn storages(&self) -> Vec<StoragePlace> {
        Vec::new()
    }

    fn notes(&self) -> Vec<String> {
        let mut notes = vec![format!(
            "{} cores; the scheduler places the threads, except where the name of a workload says 'pinned'.",
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
