//! `limits`: measures how exactly a disk or a group gets its limit, from the client's side.
//!
//! `sample → new bareblk serve with limits → guests connect → warm-up → counted time, with moves, a live upgrade or a
//! change of the limit → Course → Figures`

mod declaration;

use std::path::Path;
use std::time::{Duration, Instant};

use self::declaration as declared;
use self::declaration::{Condition, FAST, SLOW, Scenario};
use crate::error::LabError;
use crate::experiment::{Bench, Cell, Experiment, Reading, SampleError, Setup};
use crate::load::Figures;
use crate::load::disk::test_file::TestFile;
use crate::load::disk::test_files::{Place, TMPFS, TestFiles};
use crate::load::limited::guest::{Counted, Guest, Span};
use crate::load::limited::server::{LimitedServer, WORKERS, attach, limit_iops};
use crate::load::limited::windows::Course;
use crate::machine::StoragePlace;

/// Time before the counted part, in which the guests use up the credit of a disk that was idle.
const WARM_UP: Duration = Duration::from_millis(400);
/// Time between two moves of queues.
const MOVE_EVERY: Duration = Duration::from_millis(100);
/// Longest time for which the requests after a change of the limit are counted, in milliseconds.
const CHANGE_MS: usize = 200;

pub(crate) fn experiment() -> Experiment {
    Experiment { declaration: declared::declaration(), make: |setup| Box::new(Limits::new(setup)) }
}

struct Limits {
    setup: Setup,
    scenarios: Vec<Scenario>,
    conditions: Vec<Condition>,
    columns: Vec<String>,
    files: TestFiles,
}

impl Limits {
    fn new(setup: &Setup) -> Self {
        Self {
            setup: setup.clone(),
            scenarios: declared::scenarios().into_iter().map(|(_, scenario)| scenario).collect(),
            conditions: declared::conditions().into_iter().map(|(_, condition)| condition).collect(),
            columns: declared::columns().into_iter().map(|column| column.id).collect(),
            files: TestFiles::default(),
        }
    }

    /// Runs the guests of all disks, and `meanwhile` beside them. Returns the courses of each disk's queues.
    fn run<T>(
        &self,
        guests: Vec<Guest>,
        span: Span,
        meanwhile: impl FnOnce() -> Result<T, SampleError>,
    ) -> Result<(Vec<Vec<Course>>, T), SampleError> {
        let stop = &self.setup.stop;
        let broken = |error| SampleError::because("the load ended", &error);
        std::thread::scope(|scope| {
            let seeded = |disk: usize| Span { seed: span.seed + 1000 * disk as u64, ..span };
            let runs: Vec<_> = guests
                .into_iter()
                .enumerate()
                .map(|(disk, guest)| scope.spawn(move || guest.run(seeded(disk), stop)))
                .collect();
            let beside = meanwhile();
            let panicked = |_| Err(std::io::Error::other("a guest's thread panicked"));
            let courses: Vec<_> = runs
                .into_iter()
                .map(|run| run.join().unwrap_or_else(panicked))
                .collect::<Result<_, _>>()
                .map_err(broken)?;
            if stop.is_asked() { Err(SampleError::Interrupted) } else { Ok((courses, beside?)) }
        })
    }

    /// Applies the condition until the span ends.
    fn apply(
        &self,
        condition: Condition,
        server: &mut LimitedServer,
        queues: u16,
        span: Span,
    ) -> Result<(), SampleError> {
        let broken = |error| SampleError::because("a move of a queue", &error);
        let end = span.began + Duration::from_millis(span.milliseconds as u64);
        match condition {
            Condition::Quiet => Ok(()),
            Condition::Moved => {
                let mut control = server.control()?;
                for turn in 0_u32.. {
                    if Instant::now() + MOVE_EVERY > end || self.setup.stop.is_asked() {
                        break;
                    }
                    let queue = u16::try_from(turn % u32::from(queues)).unwrap_or_default();
                    let round = turn / u32::from(queues);
                    attach(&mut control, queue, (round + turn) % WORKERS).map_err(broken)?;
                    std::thread::sleep(MOVE_EVERY);
                }
                Ok(())
            }
            Condition::Upgraded => {
                std::thread::sleep((end - WARM_UP).saturating_duration_since(Instant::now()) / 2);
                server.take_over(self.setup.program.as_deref(), &self.setup.stop)
            }
        }
    }

    /// Raises and lowers the limit, and measures when each change takes effect.
    fn change(&self, guests: Vec<Guest>, server: &LimitedServer, span: Span) -> Result<Figures, SampleError> {
        let failed = |error| SampleError::because("a change of the limit", &error);
        let mut control = server.control()?;
        let (courses, (raised, lowered)) = self.run(guests, span, || {
            let mut change = |at: u32, iops| {
                let third = Duration::from_millis(span.milliseconds as u64) / 3;
                std::thread::sleep((span.began + third * at).saturating_duration_since(Instant::now()));
                let asked = Instant::now();
                limit_iops(&mut control, iops).map(|()| asked).map_err(failed)
            };
            Ok((change(1, FAST)?, change(2, SLOW)?))
        })?;
        let course = sum(courses.iter().flatten(), span);
        Ok(effect(&course, (raised, lowered), CHANGE_MS.min(span.milliseconds / 3)))
    }

    fn measure(&self, scenario: &Scenario, condition: Condition, cell: Cell) -> Result<Figures, SampleError> {
        let files = self.files.all(Place::Tmpfs)?;
        let files: Vec<_> = files.iter().take(scenario.limits.len()).map(TestFile::path).collect();
        let (program, stop) = (self.setup.program.as_deref(), &self.setup.stop);
        let mut server = LimitedServer::start(program, &files, (&scenario.limits, scenario.group), stop)?;
        let connect = |(socket, loads): (&std::path::PathBuf, &Vec<_>)| Guest::connect(socket, loads);
        let guests: Result<Vec<_>, _> = server.sockets().iter().zip(&scenario.loads).map(connect).collect();
        let guests = guests.map_err(|error| SampleError::because("the guest", &error))?;
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // seconds of a sample
        let milliseconds = (cell.seconds * 1000.0) as usize;
        let span = Span {
            began: Instant::now() + WARM_UP,
            milliseconds,
            counted: scenario.counted,
            file_bytes: self.setup.effort.file_bytes,
            seed: cell.seed,
        };
        if scenario.changes {
            return self.change(guests, &server, span);
        }
        let queues = u16::try_from(scenario.loads[0].len()).unwrap_or(u16::MAX);
        let (courses, ()) = self.run(guests, span, || self.apply(condition, &mut server, queues, span))?;
        Ok(figures(scenario, &courses, span))
    }
}

fn sum<'a>(courses: impl Iterator<Item = &'a Course>, span: Span) -> Course {
    let mut sum = Course::new(span.began, span.milliseconds);
    courses.for_each(|course| sum.merge(course));
    sum
}

/// How late a change took effect: the time that the missing or surplus requests take at the higher rate, in
/// milliseconds.
#[allow(clippy::cast_precision_loss)] // counts of one sample
fn effect(course: &Course, (raised, lowered): (Instant, Instant), length_ms: usize) -> Figures {
    let (slow, fast) = (SLOW as f64 / 1000.0, FAST as f64 / 1000.0);
    let length = length_ms as f64;
    let missing = fast * length - course.from(raised, length_ms) as f64;
    let surplus = course.from(lowered, length_ms) as f64 - slow * length;
    Figures::from([("raise", missing / (fast - slow)), ("lower", surplus / (fast - slow))])
}

#[allow(clippy::cast_precision_loss)] // counts of one sample
fn figures(scenario: &Scenario, courses: &[Vec<Course>], span: Span) -> Figures {
    let all = sum(courses.iter().flatten(), span);
    let rate = all.sum() as f64 / (span.milliseconds as f64 / 1000.0);
    let mut figures = Figures::from([("kept", 100.0 * rate / scenario.per_second)]);
    match scenario.counted {
        Counted::Requests => figures.insert("iops", rate),
        Counted::Bytes => figures.insert("bandwidth", rate / f64::from(1 << 20)),
    };
    let per_second = scenario.per_second;
    figures.extend(all.worst_percent(1000, per_second).map(|worst| ("worst-1s", worst)));
    let short = if scenario.counted == Counted::Bytes { "worst-100ms-bytes" } else { "worst-100ms" };
    figures.extend(all.worst_percent(100, per_second).map(|worst| (short, worst)));
    let parts: Vec<_> = match courses {
        [queues] => queues.iter().map(Course::sum).collect(),
        disks => disks.iter().map(|queues| queues.iter().map(Course::sum).sum()).collect(),
    };
    let total = all.sum().max(1) as f64;
    let unfair = |(fair, part): (&f64, u64)| 100.0 * (part as f64 / total / fair - 1.0).abs();
    let share = scenario.shares.iter().zip(parts).map(unfair).max_by(f64::total_cmp);
    figures.extend(share.map(|share| ("share", share)));
    figures
}

impl Bench for Limits {
    fn prepare(&mut self, tell: &mut dyn FnMut(&str, f64)) -> Result<(), LabError> {
        let disks = self.scenarios.iter().map(|scenario| scenario.limits.len()).max().unwrap_or(1);
        self.files = TestFiles::fill(&self.setup, (&[Place::Tmpfs], disks), tell)?;
        Ok(())
    }

    fn sample(&mut self, cell: Cell) -> Result<Reading, SampleError> {
        let (scenario, condition) = (&self.scenarios[cell.variant], self.conditions[cell.workload]);
        let figures = self.measure(scenario, condition, cell)?;
        Ok(self.columns.iter().map(|column| figures.get(column.as_str()).copied()).collect())
    }

    fn storages(&self) -> Vec<StoragePlace> {
        vec![StoragePlace::of("RAM disk", Path::new(TMPFS))]
    }

    fn notes(&self) -> Vec<String> {
        vec![format!(
            "{WORKERS} workers; guests are threads of this program, one per queue, which sleep while they wait. Windows \
             overlap: one starts every 10 ms. The counted time begins {} ms after the first request.",
            WARM_UP.as_millis()
        )]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn change_that_takes_effect_five_milliseconds_late_is_seen_as_five_milliseconds() {
        let began = Instant::now();
        let at = |ms| began + Duration::from_millis(ms);
        let mut course = Course::new(began, 900);
        let fast = FAST / 1000;
        (305..605).for_each(|ms| course.add(at(ms), fast));
        let figures = effect(&course, (at(300), at(600)), CHANGE_MS);
        // The course has no requests at the slow rate, so each figure differs by their share of the counted time.
        let share = SLOW as f64 / FAST as f64;
        assert!((figures["raise"] - 5.0 / (1.0 - share)).abs() < 0.1, "{figures:?}");
        assert!((figures["lower"] - 5.0).abs() < 2.0 + 200.0 * share, "{figures:?}");
    }
}
