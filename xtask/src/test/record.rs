//! What is kept of a long run: how each step went and how long it took.
//!
//! Not here: running one step (`step.rs`), commit and machine (`origin.rs`).

use std::path::PathBuf;

use anyhow::Result;
use serde::Serialize;

use super::Finished;
use super::skips::Judged;
use super::step::Tests;
use crate::origin::{self, Origin};

#[derive(Debug, Serialize)]
struct Summary {
    #[serde(flatten)]
    origin: Origin,
    steps: Vec<StepResult>,
    tests: Tests,
    skipped: Vec<Judged>,
}

#[derive(Debug, Serialize)]
struct StepResult {
    name: &'static str,
    outcome: String,
    seconds: f64,
}

/// Writes `bench_results/<date>-long/summary.json`.
pub(super) fn keep(finished: &[Finished], tests: Tests, skipped: Vec<Judged>) -> Result<PathBuf> {
    let summary = summary(finished, tests, skipped)?;
    origin::keep(&summary.origin, "long", "summary.json", &summary)
}

fn summary(finished: &[Finished], tests: Tests, skipped: Vec<Judged>) -> Result<Summary> {
    let steps = finished.iter().map(step_result).collect();
    Ok(Summary { origin: Origin::now()?, steps, tests, skipped })
}

fn step_result(step: &Finished) -> StepResult {
    let seconds = (step.took.as_secs_f64() * 10.0).round() / 10.0;
    StepResult { name: step.name, outcome: step.outcome.to_string(), seconds }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

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
        let tests = Tests { passed: 3, failed: 0, skipped: 1 };
        let summary = summary(&finished, tests, vec![Judged { skip, explained: true }]).unwrap();
        let value = serde_json::to_value(summary).unwrap();
        assert_eq!(value["commit"].as_str().map(str::len), Some(40));
        assert_eq!(
            value["steps"][0],
            serde_json::json!({"name": "doc", "outcome": "passed", "seconds": 1.2})
        );
        assert_eq!(value["tests"]["passed"], 3);
        assert_eq!(
            value["skipped"][0],
            serde_json::json!({"reason": {"kernel-before": [6, 12]}, "test": "a/b::c", "extent": "whole", "why": "", "explained": true})
        );
    }
}
