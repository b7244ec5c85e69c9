//! What is kept of a long run: when, of which commit, on which machine, how long each step took.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};
use serde::Serialize;
use xtask::{command, workspace};

use super::Finished;
use super::step::Tests;

#[derive(Debug, Serialize)]
struct Summary<'a> {
    date: &'a str,
    commit: String,
    /// Changed files that no commit holds.
    uncommitted_changes: bool,
    machine: Machine,
    steps: Vec<StepResult>,
    tests: Tests,
}

#[derive(Debug, Serialize)]
struct Machine {
    kernel: String,
    cpu: String,
    cpus: usize,
    memory_mib: u64,
}

#[derive(Debug, Serialize)]
struct StepResult {
    name: &'static str,
    outcome: String,
    seconds: f64,
}

/// Writes `bench_results/<date>-long/summary.json`, replacing one of the same day.
pub(super) fn keep(finished: &[Finished], tests: Tests) -> Result<PathBuf> {
    let date = command::output(Command::new("date").args(["-u", "+%F"]))?;
    let date = date.trim();
    let dir = workspace::root().join("bench_results").join(format!("{date}-long"));
    fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let path = dir.join("summary.json");
    fs::write(&path, text(date, finished, tests)?)?;
    Ok(path)
}

fn text(date: &str, finished: &[Finished], tests: Tests) -> Result<String> {
    let summary = Summary {
        date,
        commit: git(&["rev-parse", "HEAD"])?.trim().to_owned(),
        uncommitted_changes: !git(&["status", "--porcelain"])?.is_empty(),
        machine: machine()?,
        steps: finished.iter().map(step_result).collect(),
        tests,
    };
    Ok(serde_json::to_string_pretty(&summary)? + "\n")
}

fn step_result(step: &Finished) -> StepResult {
    let seconds = (step.took.as_secs_f64() * 10.0).round() / 10.0;
    StepResult { name: step.name, outcome: step.outcome.to_string(), seconds }
}

fn git(args: &[&str]) -> Result<String> {
    command::output(Command::new("git").args(args).current_dir(workspace::root()))
}

fn machine() -> Result<Machine> {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo")?;
    let meminfo = fs::read_to_string("/proc/meminfo")?;
    let memory_kib = field(&meminfo, "MemTotal").and_then(|text| text.split(' ').next()?.parse::<u64>().ok());
    Ok(Machine {
        kernel: command::output(Command::new("uname").arg("-srm"))?.trim().to_owned(),
        cpu: field(&cpuinfo, "model name").unwrap_or("unknown").to_owned(),
        cpus: std::thread::available_parallelism()?.get(),
        memory_mib: memory_kib.unwrap_or(0) / 1024,
    })
}

/// The value of `name : value`.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let mut values = text.lines().filter_map(|line| line.strip_prefix(name)?.trim_start().strip_prefix(':'));
    values.next().map(str::trim)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::step::Outcome;
    use super::*;

    #[test]
    fn kept_text_has_commit_machine_steps_and_tests() {
        let finished =
            [Finished { name: "doc", outcome: Outcome::Passed, took: Duration::from_millis(1234) }];
        let text = text("2030-01-02", &finished, Tests { passed: 3, failed: 0 }).unwrap();
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value["commit"].as_str().map(str::len), Some(40));
        assert_eq!(
            value["steps"][0],
            serde_json::json!({"name": "doc", "outcome": "passed", "seconds": 1.2})
        );
        assert_eq!(value["tests"]["passed"], 3);
        assert!(value["machine"]["cpus"].as_u64() > Some(0));
    }

    #[test]
    fn field_is_what_follows_the_colon() {
        let text = "MemTotalX:  1 kB\nMemTotal:       24576 kB\nmodel name\t: Some CPU\n";
        assert_eq!(field(text, "MemTotal"), Some("24576 kB"));
        assert_eq!(field(text, "model name"), Some("Some CPU"));
        assert_eq!(field(text, "absent"), None);
    }
}
