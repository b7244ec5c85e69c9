//! Runs steps on a second thread, at the same time as the other steps.
//!
//! Models and Miri mostly use one processor, builds and guests use the others. The output of each step goes to a file;
//! a line with the result is printed when the step has ended, followed by the output if it failed.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Instant;

use anyhow::Result;
use xtask::skip::FILE_ENV;

use super::counts::Tests;
use super::lanes::{self, Job};
use super::programs;
use super::step::{Finished, Outcome, Step};

/// Whether the remaining steps are left out, because a step has failed.
#[derive(Debug)]
pub(super) struct Stop {
    keep_going: bool,
    failed: AtomicBool,
}

impl Stop {
    pub(super) fn new(keep_going: bool) -> Self {
        Self { keep_going, failed: AtomicBool::new(false) }
    }

    pub(super) fn note(&self, outcome: &Outcome) {
        self.failed.fetch_or(*outcome == Outcome::Failed, Relaxed);
    }

    /// The outcome of the next step, if it is left out.
    pub(super) fn outcome(&self) -> Option<Outcome> {
        let stops = !self.keep_going && self.failed.load(Relaxed);
        stops.then(|| Outcome::Skipped("another step failed".to_owned()))
    }
}

/// The steps of the second thread.
#[derive(Debug)]
pub(super) struct Beside {
    pub(super) steps: Vec<&'static Step>,
    pub(super) is_long: bool,
    /// The file to which tests that skip themselves append a line.
    pub(super) skips: PathBuf,
}

impl Beside {
    /// Runs the steps one after another. Returns their outcomes and the number of their tests.
    pub(super) fn run(&self, stop: &Stop) -> Result<(Vec<Finished>, Tests)> {
        let (mut finished, mut tests) = (Vec::new(), Tests::default());
        for step in &self.steps {
            let started = Instant::now();
            let outcome = match stop.outcome() {
                Some(outcome) => outcome,
                None => self.run_step(step, &mut tests)?,
            };
            stop.note(&outcome);
            finished.push(Finished { name: step.name, outcome, took: started.elapsed() });
        }
        Ok((finished, tests))
    }

    fn run_step(&self, step: &Step, tests: &mut Tests) -> Result<Outcome> {
        if let Some(why) = step.missing()? {
            println!("=== {}: {} ===", step.name, Outcome::Skipped(why.clone()));
            return Ok(Outcome::Skipped(why));
        }
        let mut command = step.command(self.is_long, &[])?;
        command.env(FILE_ENV, &self.skips);
        let output = programs::output_folder()?.join(format!("{}.log", step.name));
        println!("=== {}: started beside the other steps; output: {} ===", step.name, output.display());
        let done = lanes::run_one(Job { name: step.name.to_owned(), command, output, has_many: true })?;
        print!("=== {}", lanes::line(&done));
        tests.add(done.tests);
        Ok(if done.passed { Outcome::Passed } else { Outcome::Failed })
    }
}

#[cfg(test)]
mod tests {
    use super::super::skips::Skips;
    use super::*;

    const PASSES: Step =
        Step::new("beside-passes", &["sh", "-c", "echo 'test result: ok. 3 passed; 0 failed;'"]);
    const FAILS: Step = Step::new("beside-fails", &["false"]);

    fn outcomes(steps: &[&'static Step], keep_going: bool) -> (Vec<Outcome>, Tests) {
        let skips = Skips::new().unwrap();
        let beside = Beside { steps: steps.to_vec(), is_long: false, skips: skips.path().to_owned() };
        let (finished, tests) = beside.run(&Stop::new(keep_going)).unwrap();
        (finished.into_iter().map(|step| step.outcome).collect(), tests)
    }

    #[test]
    fn tests_of_a_step_are_counted_and_a_failure_leaves_out_the_next_step() {
        let (outcomes, tests) = outcomes(&[&PASSES, &FAILS, &PASSES], false);
        assert_eq!(outcomes[..2], [Outcome::Passed, Outcome::Failed]);
        assert!(outcomes[2].skipped_because().is_some());
        assert_eq!(tests.passed, 3);
    }

    #[test]
    fn run_that_keeps_going_runs_the_steps_after_a_failure() {
        let (outcomes, tests) = outcomes(&[&FAILS, &PASSES], true);
        assert_eq!(outcomes, [Outcome::Failed, Outcome::Passed]);
        assert_eq!(tests.passed, 3);
    }
}
