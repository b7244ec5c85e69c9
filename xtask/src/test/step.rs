//! One step of `cargo xtask test`: its command in two sizes, its requirements, its outcome.

use std::fmt;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use xtask::sizes::LONG_ENV;
use xtask::skip::FILE_ENV;
use xtask::{command, workspace};

use super::counts::Tests;
use super::lanes::Done;
use super::programs;
use super::skips::Skips;
use super::wants::Wants;

/// A row of the table of steps.
#[derive(Debug, Clone, Copy)]
pub(super) struct Step {
    pub(super) name: &'static str,
    /// `xtask` as the first word means this program.
    pub(super) smoke: &'static [&'static str],
    long: Option<&'static [&'static str]>,
    env: Option<(&'static str, &'static str)>,
    wants: Option<Wants>,
    /// Whether the step can be limited to some crates: `-p` and their names replace `--workspace` or `--all`.
    pub(super) takes_crates: bool,
    /// Whether the step runs programs of Debian packages.
    pub(super) uses_packages: bool,
    runs_programs: bool,
    /// Whether the step ends within seconds, and runs before all others.
    pub(super) is_quick: bool,
    /// Whether the step runs at the same time as the others (`beside.rs`).
    pub(super) is_beside: bool,
}

/// The state of a run.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) is_long: bool,
    /// The crates to test; empty for the whole workspace.
    pub(super) crates: Vec<String>,
    pub(super) at_once: usize,
    pub(super) tests: Tests,
    pub(super) skips: Skips,
    /// The test programs that have run.
    pub(super) programs: Vec<Done>,
}

/// The outcome of a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Outcome {
    Passed,
    Failed,
    Skipped(String),
}

/// A step, with its outcome or the reason why it did not run.
#[derive(Debug)]
pub(super) struct Finished {
    pub(super) name: &'static str,
    pub(super) outcome: Outcome,
    pub(super) took: Duration,
}

impl Outcome {
    pub(super) fn skipped_because(&self) -> Option<&str> {
        match self {
            Self::Skipped(why) => Some(why),
            Self::Passed | Self::Failed => None,
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Passed => f.write_str("passed"),
            Self::Failed => f.write_str("FAILED"),
            Self::Skipped(why) => write!(f, "skipped: {why}"),
        }
    }
}

impl Step {
    pub(super) const fn new(name: &'static str, smoke: &'static [&'static str]) -> Self {
        Self {
            name,
            smoke,
            long: None,
            env: None,
            wants: None,
            takes_crates: false,
            uses_packages: false,
            runs_programs: false,
            is_quick: false,
            is_beside: false,
        }
    }

    pub(super) const fn long(mut self, long: &'static [&'static str]) -> Self {
        self.long = Some(long);
        self
    }

    pub(super) const fn env(mut self, name: &'static str, value: &'static str) -> Self {
        self.env = Some((name, value));
        self
    }

    pub(super) const fn wants(mut self, wants: Wants) -> Self {
        self.wants = Some(wants);
        self
    }

    pub(super) const fn takes_crates(mut self) -> Self {
        self.takes_crates = true;
        self
    }

    pub(super) const fn uses_packages(mut self) -> Self {
        self.uses_packages = true;
        self
    }

    /// Says that the step ends within seconds.
    pub(super) const fn quick(mut self) -> Self {
        self.is_quick = true;
        self
    }

    /// Runs the step beside the others, because it spends most of its time in one thread.
    pub(super) const fn beside(mut self) -> Self {
        self.is_beside = true;
        self
    }

    /// The step's words are those of `cargo test`; `programs.rs` runs the programs.
    pub(super) const fn runs_programs(mut self) -> Self {
        (self.runs_programs, self.uses_packages) = (true, true);
        self
    }

    /// Runs the step. Adds its tests and its skips to `run`.
    pub(super) fn run(&self, run: &mut Run) -> Result<Outcome> {
        if let Some(why) = self.missing()? {
            println!("{}", Outcome::Skipped(why.clone()));
            return Ok(Outcome::Skipped(why));
        }
        println!("$ {}", self.words(run.is_long, &run.crates).join(" "));
        let passed = if self.runs_programs { self.run_programs(run)? } else { self.run_command(run)? };
        run.tests.skip(run.skips.read()?);
        Ok(if passed { Outcome::Passed } else { Outcome::Failed })
    }

    /// The reason why the step cannot run on this machine; `None` if it can.
    pub(super) fn missing(&self) -> Result<Option<String>> {
        Ok(self.wants.map(Wants::missing).transpose()?.flatten())
    }

    fn run_command(&self, run: &mut Run) -> Result<bool> {
        let mut command = self.command(run.is_long, &run.crates)?;
        stream(command.env(FILE_ENV, run.skips.path()), &mut run.tests)
    }

    fn run_programs(&self, run: &mut Run) -> Result<bool> {
        let words = self.words(run.is_long, &run.crates);
        let prepare = |command: &mut Command| {
            set_size(command.env(FILE_ENV, run.skips.path()), run.is_long);
        };
        let Some(programs) = programs::run(&words[2..], run.at_once, prepare)? else { return Ok(false) };
        programs.iter().for_each(|program| run.tests.add(program.tests));
        let passed = programs.iter().all(|program| program.passed);
        run.programs.extend(programs);
        Ok(passed)
    }

    fn words(&self, is_long: bool, crates: &[String]) -> Vec<String> {
        let words = self.long.filter(|_| is_long).unwrap_or(self.smoke).iter().map(|word| (*word).to_owned());
        let names = || crates.iter().flat_map(|name| ["-p".to_owned(), name.clone()]);
        let limited = |word: String| match word.as_str() {
            "--workspace" | "--all" if self.takes_crates && !crates.is_empty() => names().collect(),
            _ => vec![word],
        };
        words.flat_map(limited).collect()
    }

    /// The step's command in one of its two sizes, for all crates or some.
    pub(super) fn command(&self, is_long: bool, crates: &[String]) -> Result<Command> {
        let words = self.words(is_long, crates);
        let mut command = match words[0].as_str() {
            "cargo" => Command::new(workspace::cargo()),
            // This path refers to the running program, even if a build has replaced its file meanwhile.
            "xtask" => Command::new("/proc/self/exe"),
            other => Command::new(other),
        };
        command.args(&words[1..]).current_dir(workspace::root()).envs(self.env);
        set_size(&mut command, is_long);
        Ok(command)
    }
}

fn set_size(command: &mut Command, is_long: bool) {
    if is_long {
        command.env(LONG_ENV, "1");
    }
}

/// Runs the command, shows its output and counts its tests. Returns true if it succeeded.
fn stream(command: &mut Command, tests: &mut Tests) -> Result<bool> {
    let name = command::describe(command);
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start `{name}`"))?;
    let stdout = child.stdout.take().context("the child process has no standard output")?;
    for line in BufReader::new(stdout).split(b'\n') {
        let line = String::from_utf8_lossy(&line?).into_owned();
        println!("{line}");
        tests.add_line(&line);
    }
    Ok(child.wait()?.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_variant_is_taken_only_for_a_long_run() {
        let step = Step::new("a", &["true", "short"]).long(&["true", "long"]);
        assert_eq!(command::describe(&step.command(false, &[]).unwrap()), "true short");
        let long = step.command(true, &[]).unwrap();
        assert_eq!(command::describe(&long), "true long");
        assert!(long.get_envs().any(|(name, _)| name == LONG_ENV));
    }

    #[test]
    fn step_that_fails_is_failed_and_one_that_succeeds_is_passed() {
        let skips = Skips::new().unwrap();
        let (is_long, crates, tests, programs) = (false, Vec::new(), Tests::default(), Vec::new());
        let mut run = Run { is_long, crates, at_once: 1, tests, skips, programs };
        assert_eq!(Step::new("a", &["false"]).run(&mut run).unwrap(), Outcome::Failed);
        assert_eq!(Step::new("a", &["true"]).run(&mut run).unwrap(), Outcome::Passed);
    }

    #[test]
    fn step_for_some_crates_names_them_in_place_of_the_workspace() {
        let crates = ["one".to_owned(), "two".to_owned()];
        let step = Step::new("a", &["cargo", "test", "--workspace", "--all-features"]);
        let words = |step: Step, crates| step.words(false, crates).join(" ");
        assert_eq!(words(step.takes_crates(), &crates), "cargo test -p one -p two --all-features");
        assert_eq!(words(step.takes_crates(), &[]), "cargo test --workspace --all-features");
        assert_eq!(words(step, &crates), "cargo test --workspace --all-features");
    }
}
