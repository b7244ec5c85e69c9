//! Runs an experiment: makes the rounds, decides their order, and collects the samples.
//!
//! `prepare → for each round: for each workload (rotated): each variant once (shuffled) → RunResult`
//!
//! - Within a round, the variants of one workload run immediately after one another, so that compared samples are close
//!   in time.
//! - A variant that cannot run under a workload is not tried again under that workload; the others continue.

use crate::error::LabError;
use crate::experiment::{Bench, Cell, Declaration, Experiment, SampleError, Setup};
use crate::machine::Machine;
use crate::result::{Collected, FORMAT, RunResult, cells};
use crate::verdict::judge;
use workload::date::now;

/// Receives a run's progress.
pub trait Progress {
    /// Called before the rounds with the current preparation step and its completed share.
    fn preparing(&mut self, what: &str, share: f64);

    /// Called before each sample: `done` of `total` samples are complete, and `what` is measured next.
    fn measuring(&mut self, done: usize, total: usize, what: &str);
}

/// Ignores progress.
#[derive(Clone, Copy, Debug, Default)]
pub struct Quiet;

impl Progress for Quiet {
    fn preparing(&mut self, _: &str, _: f64) {}

    fn measuring(&mut self, _: usize, _: usize, _: &str) {}
}

/// A constant, so that every run has the same order and the same addresses.
const SEED: u64 = 0x9e37_79b9_7f4a_7c15;

/// Runs `experiment` to the end. `command` is the command that repeats the run.
///
/// # Errors
/// [`LabError`]; there is no partial result.
pub fn run(
    experiment: &Experiment,
    setup: &Setup,
    command: &str,
    quick: bool,
    progress: &mut dyn Progress,
) -> Result<RunResult, LabError> {
    let declaration = &experiment.declaration;
    let date = now();
    let mut bench = (experiment.make)(setup);
    bench.prepare(&mut |what, share| progress.preparing(what, share))?;
    let collected = rounds(declaration, bench.as_mut(), setup, progress)?;
    let cells = cells(declaration, &collected);
    something_was_measured(&collected)?;
    Ok(RunResult {
        format: FORMAT,
        verdicts: judge(declaration, &cells),
        experiment: declaration.clone(),
        program: format!("bareblk {} ({})", env!("CARGO_PKG_VERSION"), env!("LAB_REVISION")),
        command: command.to_owned(),
        date,
        effort: setup.effort,
        quick,
        seed: SEED,
        machine: Machine::here(bench.storages()),
        notes: bench.notes().into_iter().chain(debug_build()).collect(),
        cells,
    })
}

/// The note in the results of debug builds, whose figures include the cost of the compiler's checks.
fn debug_build() -> Option<String> {
    cfg!(debug_assertions).then(|| {
        "This is a debug build, so its figures mean nothing. Build with cargo build --release.".to_owned()
    })
}

type Collection = Vec<Vec<Option<Collected>>>;

fn rounds(
    declaration: &Declaration,
    bench: &mut dyn Bench,
    setup: &Setup,
    progress: &mut dyn Progress,
) -> Result<Collection, LabError> {
    let mut collected = nothing_yet(declaration);
    let per_round = collected.iter().flatten().flatten().count();
    let (total, mut done) = (per_round * setup.effort.rounds, 0);
    for round in 0..setup.effort.rounds {
        for (workload, variant) in order(declaration, round) {
            let Some(cell) = collected[workload][variant].as_mut() else { continue };
            if setup.stop.is_asked() {
                return Err(LabError::Interrupted);
            }
            let names = (&declaration.variants[variant].label, &declaration.workloads[workload].label);
            progress.measuring(done, total, &format!("{}, {}", names.1, names.0));
            let seed = SEED ^ (round as u64 + 1).wrapping_mul(SEED);
            sample(bench, cell, Cell { variant, workload, seed, seconds: setup.effort.seconds })?;
            done += 1;
        }
    }
    progress.measuring(total, total, "done");
    Ok(collected)
}

fn nothing_yet(declaration: &Declaration) -> Collection {
    let row = |workload| {
        let cell =
            |variant: &crate::experiment::Variant| variant.takes_part(workload).then(Collected::default);
        declaration.variants.iter().map(cell).collect()
    };
    declaration.workloads.iter().map(row).collect()
}

fn sample(bench: &mut dyn Bench, into: &mut Collected, cell: Cell) -> Result<(), LabError> {
    if into.unavailable.is_some() {
        into.readings.push(None);
        return Ok(());
    }
    match bench.sample(cell) {
        Ok(reading) => into.readings.push(Some(reading)),
        Err(SampleError::Interrupted) => return Err(LabError::Interrupted),
        Err(SampleError::Unavailable(why)) => {
            into.readings.push(None);
            into.unavailable = Some(why);
        }
    }
    Ok(())
}

fn something_was_measured(collected: &Collection) -> Result<(), LabError> {
    let mut cells = collected.iter().flatten().flatten();
    if cells.any(|cell| cell.readings.iter().any(Option::is_some)) {
        return Ok(());
    }
    let mut reasons = collected.iter().flatten().flatten().filter_map(|cell| cell.unavailable.clone());
    Err(LabError::Nothing { reason: reasons.next().unwrap_or_else(|| "the run has no rounds".into()) })
}

/// Indices of workload and variant, in the order of one round.
fn order(declaration: &Declaration, round: usize) -> Vec<(usize, usize)> {
    let workloads = declaration.workloads.len();
    let rotated = (0..workloads).map(|place| (place + round) % workloads);
    rotated
        .flat_map(|workload| {
            let variants = shuffled(declaration.variants.len(), (round * workloads + workload) as u64);
            variants.into_iter().map(move |variant| (workload, variant))
        })
        .collect()
}

/// Returns `0..count` in an order determined by `seed`.
#[must_use]
pub fn shuffled(count: usize, seed: u64) -> Vec<usize> {
    let mut random = Xorshift::new(SEED ^ seed);
    let mut places: Vec<usize> = (0..count).collect();
    // Fisher–Yates shuffle.
    for last in (1..count).rev() {
        #[allow(clippy::cast_possible_truncation)] // smaller than `count`
        let other = random.below(last as u64 + 1) as usize;
        places.swap(last, other);
    }
    places
}

/// A random generator whose quality suffices for orders and addresses, and which gives the same numbers in every run
/// (Marsaglia 2003, xorshift64).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Xorshift(u64);

impl Xorshift {
    pub(crate) fn new(seed: u64) -> Self {
        // The state must not be zero: the generator would never leave it. The seed is mixed, because similar seeds
        // would start alike.
        let mut random = Self((seed ^ (seed >> 31)).wrapping_mul(0xbf58_476d_1ce4_e5b9) | 1);
        (0..4).for_each(|_| _ = random.next());
        random
    }

    #[inline]
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// A random number below `end`, made from the upper bits.
    #[inline]
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        ((self.next() >> 32) * end) >> 32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiments;

    #[test]
    fn every_round_has_every_variant_of_every_workload_once() {
        let declaration = experiments::find("aio").unwrap().declaration;
        let mut found = order(&declaration, 3);
        found.sort_unstable();
        let (workloads, variants) = (declaration.workloads.len(), declaration.variants.len());
        let all: Vec<_> = (0..workloads).flat_map(|w| (0..variants).map(move |v| (w, v))).collect();
        assert_eq!(found, all);
    }

    #[test]
    fn variants_of_a_workload_run_right_after_each_other() {
        let declaration = experiments::find("aio").unwrap().declaration;
        let workloads: Vec<_> = order(&declaration, 1).into_iter().map(|(workload, _)| workload).collect();
        let changes = workloads.windows(2).filter(|pair| pair[0] != pair[1]).count();
        assert_eq!(changes, declaration.workloads.len() - 1);
        assert_eq!(workloads[0], 1);
    }

    #[test]
    fn order_differs_from_round_to_round_and_is_the_same_in_every_run() {
        let declaration = experiments::find("aio").unwrap().declaration;
        let of_first = |round| {
            let order = order(&declaration, round).into_iter();
            order.filter(|(workload, _)| *workload == 0).map(|(_, variant)| variant).collect::<Vec<_>>()
        };
        assert_ne!(of_first(0), of_first(1));
        assert_eq!(of_first(2), of_first(2));
    }

    #[test]
    fn every_variant_comes_first_now_and_then() {
        let firsts: std::collections::BTreeSet<_> = (0..100).map(|seed| shuffled(5, seed)[0]).collect();
        assert_eq!(firsts.len(), 5);
    }

    #[test]
    fn random_numbers_stay_below_their_end_and_reach_all_of_it() {
        let mut random = Xorshift::new(0);
        let found: std::collections::BTreeSet<_> = (0..1000).map(|_| random.below(7)).collect();
        assert_eq!(found, (0..7).collect());
    }
}
