//! Writes the record of a long run: the outcome and time of each step.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use serde::Serialize;

use super::counts::Tests;
use super::lanes::Done;
use super::skips::Judged;
use super::step::Finished;
use crate::origin::{self, Origin};

#[derive(Debug, Serialize)]
struct Summary {
    #[serde(flatten)]
    origin: Origin,
    steps: Vec<StepResult>,
    programs: Vec<ProgramResult>,
    tests: Tests,
    skipped: Vec<Judged>,
}

#[derive(Debug, Serialize)]
struct ProgramResult {
    name: String,
    passed: u64,
    failed: u64,
    seconds: f64,
}

#[derive(Debug, Serialize)]
struct StepResult {
    name: &'static str,
    outcome: String,
    seconds: f64,
}

/// Writes `bench_results/<date>-long/summary.json`.
pub(super) fn keep(
    finished: &[Finished],
    programs: &[Done],
    tests: Tests,
    skipped: Vec<Judged>,
) -> Result<PathBuf> {
    let summary = summary(finished, programs, tests, skipped)?;
    origin::keep(&summary.origin, "long", "summary.json", &summary)
}

fn summary(finished: &[Finished], programs: &[Done], tests: Tests, skipped: Vec<Judged>) -> Result<Summary> {
    let steps = finished.iter().map(step_result).collect();
    let programs = programs.iter().map(program_result).collect();
    Ok(Summary { origin: Origin::now()?, steps, programs, tests, skipped })
}

fn seconds(took: Duration) -> f64 {
    (took.as_secs_f64() * 10.0).round() / 10.0
}

fn program_result(program: &Done) -> ProgramResult {
    let Tests { passed, failed, .. } = program.tests;
    ProgramResult { name: program.name.clone(), passed, failed, seconds: seconds(program.took) }
}

fn step_result(step: &Finished) -> StepResult {
    StepResult { name: step.name, outcome: step.outcome.to_string(), seconds: seconds(step.took) }
}

#[cfg(test)]
mod tests {
    use xtask::skip::{Extent, Reason, Skip};

    use super::super::step::Outcome;
    use super::*;

    #[test]
    fn kept_text_has_commit_steps_and_tests() {
        let finished =
            [Finished { name: "doc", outcome: Outcome::Passed, took: Duration::from_millis(1234) }];
        let skip = Skip {
            reason: Reason::KernelBefore(6, 12),
            test: "a/b::c".into(),
            extent: Extent::Whole,
            why: String::new(),
        };
        let programs = [Done::step("(build)", Duration::from_millis(60))];
        let tests = Tests { passed: 3, failed: 0, skipped: 1 };
        let summary = summary(&finished, &programs, tests, vec![Judged { skip, explained: true }]).unwrap();
        let value = serde_json::to_value(summary).unwrap();
        assert_eq!(value["commit"].as_str().map(str::len), Some(40));
        assert_eq!(
            value["steps"][0],
            serde_json::json!({"name": "doc", "outcome": "passed", "seconds": 1.2})
        );
        assert_eq!(
            value["programs"][0],
            serde_json::json!({"name": "(build)", "passed": 0, "failed": 0, "seconds": 0.1})
        );
        assert_eq!(value["tests"]["passed"], 3);
        assert_eq!(
            value["skipped"][0],
            serde_json::json!({"reason": {"kernel-before": [6, 12]}, "test": "a/b::c", "extent": "whole", "why": "", "explained": true})
        );
    }
}
