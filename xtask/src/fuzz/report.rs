//! Parses libFuzzer's output line by line, and reports a run as a table and as JSON.
//!
//! Relevant lines: `#1234\tDONE   cov: 12 ft: 34 corp: 5/67b lim: 8 exec/s: 90 rss: 30Mb`,
//! `stat::number_of_executed_units: 1234`, `… Test unit written to PATH`.

use std::fmt::Write as _;

use serde::Serialize;

use crate::origin::Origin;

/// One target's run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub(super) struct Outcome {
    pub target: String,
    /// The option of its mode; empty if the target runs on one thread.
    pub option: &'static str,
    pub seconds: u64,
    pub executions: u64,
    /// Code edges reached (libFuzzer's `cov`).
    pub coverage: u64,
    /// Features (libFuzzer's `ft`): edges, how often they were taken, and comparisons.
    pub features: u64,
    /// Inputs in the corpus, each of which reaches something that no other input reaches.
    pub corpus: u64,
    /// The file of an input that failed.
    pub failed: Option<String>,
}

#[derive(Debug, Serialize)]
pub(super) struct Kept<'o> {
    #[serde(flatten)]
    pub origin: Origin,
    pub targets: &'o [Outcome],
}

impl Outcome {
    pub fn new(target: &str, option: &'static str, seconds: u64) -> Self {
        Self { target: target.to_owned(), option, seconds, ..Self::default() }
    }

    /// Returns whether to show the line. A line about a single new input is not shown.
    pub fn add_line(&mut self, line: &str) -> bool {
        let words: Vec<_> = line.split_whitespace().collect();
        let after = |key: &str| {
            let at = words.iter().position(|word| *word == key)?;
            words.get(at + 1)?.split('/').next()?.parse().ok()
        };
        if line.starts_with('#') {
            self.coverage = after("cov:").unwrap_or(self.coverage);
            self.features = after("ft:").unwrap_or(self.features);
            self.corpus = after("corp:").unwrap_or(self.corpus);
        }
        self.executions = after("stat::number_of_executed_units:").unwrap_or(self.executions);
        if let Some((_, path)) = line.split_once("Test unit written to ") {
            self.failed = Some(path.trim().to_owned());
        }
        let of_each_input = ["NEW", "REDUCE", "RELOAD"].iter().any(|kind| words.get(1) == Some(kind));
        let is_detail = ["stat::", "\"", "######"].iter().any(|start| line.starts_with(start));
        let is_noise = is_detail || line.contains("NEW_FUNC") || line.starts_with('#') && of_each_input;
        !is_noise
    }
}

/// The table in Markdown, in the form used in docs/internals/fuzzing.md and docs/internals/reliability.md.
pub(super) fn table(outcomes: &[Outcome]) -> String {
    let mut text =
        "| target | seconds | executions | 1/s | edges | features | corpus | outcome |\n".to_owned();
    text.push_str("|---|---|---|---|---|---|---|---|\n");
    for outcome in outcomes {
        let Outcome { target, option, seconds, executions, coverage, features, corpus, failed } = outcome;
        let rate = executions / (*seconds).max(1);
        let said = failed.as_ref().map_or("no failure".to_owned(), |path| format!("FAILED: {path}"));
        let [executions, rate, coverage, features] =
            [*executions, rate, *coverage, *features].map(with_thousands);
        let _ = writeln!(
            text,
            "| `{target}{option}` | {seconds} | {executions} | {rate} | {coverage} | {features} | {corpus} | {said} |"
        );
    }
    text
}

fn with_thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(lines: &[&str]) -> Outcome {
        let mut outcome = Outcome::new("chains", "", 2);
        lines.iter().for_each(|line| _ = outcome.add_line(line));
        outcome
    }

    #[test]
    fn last_line_of_a_run_counts() {
        let outcome = of(&[
            "#2\tINITED cov: 100 ft: 101 corp: 1/1b exec/s: 0 rss: 30Mb",
            "#4096\tDONE   cov: 345 ft: 1234 corp: 88/3456b lim: 256 exec/s: 2048 rss: 44Mb",
            "stat::number_of_executed_units: 4097",
        ]);
        let found = (outcome.executions, outcome.coverage, outcome.features, outcome.corpus, outcome.failed);
        assert_eq!(found, (4097, 345, 1234, 88, None));
    }

    #[test]
    fn input_that_failed_is_named() {
        let outcome = of(&["artifact_prefix='a/'; Test unit written to a/crash-0123"]);
        assert_eq!(outcome.failed.as_deref(), Some("a/crash-0123"));
        assert!(table(&[outcome]).ends_with("| FAILED: a/crash-0123 |\n"));
    }

    #[test]
    fn row_has_command_rate_and_thousands() {
        let mut outcome = Outcome::new("logs", " --second-thread", 10);
        (outcome.executions, outcome.coverage) = (1_234_567, 999);
        let wanted = "\n| `logs --second-thread` | 10 | 1,234,567 | 123,456 | 999 | 0 | 0 | no failure |\n";
        assert!(table(&[outcome]).ends_with(wanted));
    }

    #[test]
    fn new_inputs_are_not_shown_one_by_one() {
        let mut outcome = Outcome::default();
        assert!(!outcome.add_line("#7\tNEW    cov: 5 ft: 6 corp: 2/3b lim: 4 exec/s: 0 rss: 1Mb"));
        assert!(outcome.add_line("#8\tpulse  cov: 5 ft: 6 corp: 2/3b lim: 4 exec/s: 0 rss: 1Mb"));
        assert!(outcome.add_line("thread '<unnamed>' panicked at chains.rs"));
    }
}
