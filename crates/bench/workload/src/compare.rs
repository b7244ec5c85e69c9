//! Runs the same job alternately on two targets, and decides whether their difference exceeds the noise.
//!
//! `round 1: A B · round 2: B A · round 3: A B …  →  ratio B ÷ A within each round  →  median, 95 % interval`
//!
//! - Drift affects both targets alike: the two runs of a round follow each other directly, and the targets take turns
//!   in running first.
//! - The job's runtime is divided: each round gets a share, half of it for each target.
//! - A failed round ends the comparison, because half a pair cannot be compared.

use std::fmt::Write;
use std::time::Duration;

use crate::error::RunError;
use crate::job::Job;
use crate::run::outcome::{Outcome, Progress, Watch};
use crate::run::run;
use crate::run::worker::Failure;
use crate::stats::{Summary, median};
use crate::stop::Stop;
use crate::target::{Client, Target};

/// Why the comparison failed.
#[derive(Debug, thiserror::Error)]
pub enum CompareError {
    /// The job could not run on a target.
    #[error("{target}")]
    Run {
        /** The target. */
        target: String,
        /** The reason. */
        source: RunError,
    },
    /// A target failed during a run.
    #[error("{target}")]
    Failed {
        /** The target. */
        target: String,
        /** The reason. */
        source: Failure,
    },
    /// The user interrupted the first round.
    #[error("interrupted in the first round: there is nothing to compare")]
    Interrupted,
}

/// The difference in one figure.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Difference {
    /// Median of A.
    pub a: f64,
    /// Median of B.
    pub b: f64,
    /// B ÷ A within the rounds.
    pub ratio: Summary,
}

impl Difference {
    fn of(pairs: &[[f64; 2]]) -> Option<Self> {
        let column = |place: usize| pairs.iter().map(|pair| pair[place]).collect::<Vec<_>>();
        let ratios: Vec<f64> = pairs.iter().filter(|[a, _]| *a > 0.0).map(|[a, b]| b / a).collect();
        Some(Self { a: median(&column(0))?, b: median(&column(1))?, ratio: Summary::of(&ratios)? })
    }

    /// Whether the difference exceeds what chance explains; `None` with too few rounds.
    #[must_use]
    pub fn stands_out(&self) -> Option<bool> {
        self.ratio.is_sure().then_some(self.ratio.low > 1.0 || self.ratio.high < 1.0)
    }
}

/// The result of a comparison.
#[derive(Clone, Debug)]
pub struct Comparison {
    /// The two targets.
    pub targets: [Target; 2],
    /// The requested setting of their in-flight logs.
    pub in_flight_logs: [Option<bool>; 2],
    /// Requests per second, one pair per round.
    pub iops: Vec<[f64; 2]>,
    /// Mean latencies, one pair per round, in ns.
    pub latency_ns: Vec<[f64; 2]>,
    /// The last round's outcomes, for details.
    pub last: Vec<Outcome>,
    /// Whether the user stopped the comparison before all rounds were complete.
    pub interrupted: bool,
}

/// Runs `job` on both targets in `rounds` rounds, on each with its own client.
///
/// # Errors
/// [`CompareError`].
pub fn compare(
    job: &Job,
    targets: [Target; 2],
    clients: [&Client; 2],
    rounds: u32,
    stop: &Stop,
    watch: &mut dyn Watch,
) -> Result<Comparison, CompareError> {
    let samples = rounds.saturating_mul(2).max(2);
    let job = Job {
        runtime: job.runtime.map(|runtime| (runtime / samples).max(Duration::from_millis(1))),
        ..job.clone()
    };
    let mut found = Comparison {
        targets,
        in_flight_logs: clients.map(|client| client.in_flight_log),
        iops: Vec::new(),
        latency_ns: Vec::new(),
        last: Vec::new(),
        interrupted: false,
    };
    for round in 0..rounds {
        let mut pair: [Option<Outcome>; 2] = [None, None];
        for turn in 0..2_u32 {
            let place = ((round + turn) % 2) as usize;
            let target = &found.targets[place];
            let mut watch = Share { inner: watch, done: round * 2 + turn, samples };
            let outcome = one(&job, target, clients[place], stop, &mut watch)?;
            pair[place] = Some(outcome);
        }
        let [Some(a), Some(b)] = pair else { break };
        if stop.is_asked() {
            found.interrupted = true;
            break;
        }
        found.iops.push([&a, &b].map(|outcome| outcome.group().iops()));
        found.latency_ns.push([&a, &b].map(|outcome| outcome.group().mean_lat_ns()));
        found.last = vec![a, b];
    }
    if found.iops.is_empty() { Err(CompareError::Interrupted) } else { Ok(found) }
}

fn one(
    job: &Job,
    target: &Target,
    client: &Client,
    stop: &Stop,
    watch: &mut dyn Watch,
) -> Result<Outcome, CompareError> {
    let name = || target.to_string();
    let outcome = run(job, target, client, stop, watch);
    let outcome = outcome.map_err(|source| CompareError::Run { target: name(), source })?;
    match outcome.failure {
        Some(source) => Err(CompareError::Failed { target: name(), source }),
        None => Ok(outcome),
    }
}

/// Reports one sample's progress as a share of all samples.
struct Share<'w> {
    inner: &'w mut dyn Watch,
    done: u32,
    samples: u32,
}

impl Watch for Share<'_> {
    fn tick(&mut self, progress: &Progress) {
        let share = (f64::from(self.done) + progress.share) / f64::from(self.samples);
        self.inner.tick(&Progress { share, ..*progress });
    }

    fn event(&mut self, text: &str) {
        self.inner.event(text);
    }
}

impl Comparison {
    /// The difference in requests per second.
    #[must_use]
    pub fn of_iops(&self) -> Option<Difference> {
        Difference::of(&self.iops)
    }

    /// The difference in mean latency, in ns.
    #[must_use]
    pub fn of_latency(&self) -> Option<Difference> {
        Difference::of(&self.latency_ns)
    }

    /// The target's name, plus what distinguishes it from the other.
    fn name(&self, place: usize) -> String {
        let (target, logs) = (&self.targets[place], &self.in_flight_logs);
        match logs[place] {
            Some(log) if logs[0] != logs[1] => {
                format!("{target} with{} an in-flight log", if log { "" } else { "out" })
            }
            _ => target.to_string(),
        }
    }

    /// Returns the result as text for people, ending with a line break.
    #[must_use]
    pub fn text(&self) -> String {
        let [a, b] = [0, 1].map(|place| self.name(place));
        let rounds = self.iops.len();
        let mut out =
            format!("A: {a}\nB: {b}\nrounds: {rounds}, A and B alternate; ratios are B ÷ A within a round\n");
        line(&mut out, "IOPS", self.of_iops(), 1.0, "");
        line(&mut out, "mean lat", self.of_latency(), 1e3, " usec");
        if self.interrupted {
            out.push_str("interrupted: these are the rounds so far\n");
        }
        out
    }
}

fn line(out: &mut String, name: &str, difference: Option<Difference>, scale: f64, unit: &str) {
    let Some(difference) = difference else { return };
    let Difference { a, b, ratio } = difference;
    let said = match difference.stands_out() {
        Some(true) => "the difference exceeds the noise",
        Some(false) => "no difference that exceeds the noise",
        None => "too few rounds for a 95 % interval: at least 6 are needed",
    };
    let covers = match difference.stands_out() {
        Some(_) => format!("the {:.1} % interval", 100.0 * ratio.coverage),
        // There are too few rounds for an interval.
        None => "smallest to largest".to_owned(),
    };
    let _ = writeln!(
        out,
        "{name:>8}: A={:.1}{unit}, B={:.1}{unit}, ratio {:.4} ({:.4} to {:.4}, {covers}): {said}",
        a / scale,
        b / scale,
        ratio.median,
        ratio.low,
        ratio.high
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn comparison(pairs: &[[f64; 2]]) -> Comparison {
        Comparison {
            targets: [Target::File("/a".into(), None), Target::Socket("/b".into())],
            in_flight_logs: [None; 2],
            iops: pairs.to_vec(),
            latency_ns: pairs.iter().map(|[a, b]| [1e9 / a, 1e9 / b]).collect(),
            last: Vec::new(),
            interrupted: false,
        }
    }

    #[test]
    fn difference_in_every_round_stands_out_however_the_rounds_drift() {
        let pairs: Vec<_> =
            (1..=8).map(|round| [1000.0 * f64::from(round), 1100.0 * f64::from(round)]).collect();
        let difference = comparison(&pairs).of_iops().unwrap();
        assert_eq!(difference.stands_out(), Some(true));
        assert!((difference.ratio.median - 1.1).abs() < 1e-9);
    }

    #[test]
    fn difference_that_changes_sides_is_noise() {
        let pairs: Vec<_> =
            (0..8).map(|round| [1000.0, if round % 2 == 0 { 950.0 } else { 1050.0 }]).collect();
        let found = comparison(&pairs);
        assert_eq!(found.of_iops().unwrap().stands_out(), Some(false));
        assert!(found.text().contains("no difference that exceeds"), "{}", found.text());
    }

    #[test]
    fn targets_that_differ_in_their_logs_alone_are_told_apart() {
        let found = Comparison {
            targets: [Target::Socket("/b".into()), Target::Socket("/b".into())],
            in_flight_logs: [Some(false), Some(true)],
            ..comparison(&[[1.0, 2.0]])
        };
        let text = found.text();
        assert!(text.contains("A: socket:/b without an in-flight log\nB: socket:/b with an in"), "{text}");
    }

    #[test]
    fn few_rounds_decide_nothing_and_say_so() {
        let found = comparison(&[[1.0, 2.0]; 3]);
        assert_eq!(found.of_iops().unwrap().stands_out(), None);
        let text = found.text();
        assert!(
            text.contains("A: file:/a") && text.contains("B: socket:/b") && text.contains("at least 6"),
            "{text}"
        );
    }
}
