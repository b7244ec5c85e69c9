//! One step of `cargo xtask test`: its command in two sizes, what it wants of the machine, how it went.

use std::fmt;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result};
use xtask::sizes::LONG_ENV;
use xtask::skip::FILE_ENV;
use xtask::{command, workspace};

use super::skips::Skips;
use crate::setup;

/// A row of the table of steps.
#[derive(Debug, Clone, Copy)]
pub(super) struct Step {
    pub(super) name: &'static str,
    /// `xtask` as the first word means this program.
    pub(super) smoke: &'static [&'static str],
    long: Option<&'static [&'static str]>,
    env: Option<(&'static str, &'static str)>,
    wants: Option<Wants>,
}

/// What must be there for a step to make sense.
#[derive(Debug, Clone, Copy)]
pub(super) enum Wants {
    /// At least one benchmark in the workspace.
    BenchTargets,
    /// The standard library for another machine.
    Target(&'static str),
    /// Another version of Rust; when it is the one in use, the other steps have shown what this one would.
    Toolchain(&'static str),
    /// The interpreter that finds undefined behaviour; only nightly versions of Rust have it.
    Miri,
}

/// How a step went.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Outcome {
    Passed,
    Failed,
    Skipped(String),
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
        Self { name, smoke, long: None, env: None, wants: None }
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

    /// Runs the step; its tests are added to `tests`, and to `skips` those that did not run.
    pub(super) fn run(&self, is_long: bool, tests: &mut Tests, skips: &mut Skips) -> Result<Outcome> {
        if let Some(why) = self.wants.map(Wants::missing).transpose()?.flatten() {
            println!("{}", Outcome::Skipped(why.clone()));
            return Ok(Outcome::Skipped(why));
        }
        println!("$ {}", self.words(is_long).join(" "));
        let mut command = self.command(is_long)?;
        let passed = stream(command.env(FILE_ENV, skips.path()), tests)?;
        tests.skip(skips.read()?);
        Ok(if passed { Outcome::Passed } else { Outcome::Failed })
    }

    fn words(&self, is_long: bool) -> &'static [&'static str] {
        self.long.filter(|_| is_long).unwrap_or(self.smoke)
    }

    fn command(&self, is_long: bool) -> Result<Command> {
        let words = self.words(is_long);
        let mut command = match words[0] {
            "cargo" => Command::new(workspace::cargo()),
            "xtask" => Command::new(std::env::current_exe()?),
            other => Command::new(other),
        };
        command.args(&words[1..]).current_dir(workspace::root()).envs(self.env);
        if is_long {
            command.env(LONG_ENV, "1");
        }
        Ok(command)
    }
}

impl Wants {
    /// Why the step cannot run, if so.
    fn missing(self) -> Result<Option<String>> {
        match self {
            Self::BenchTargets => {
                let found = has_bench_targets(&workspace::metadata()?);
                Ok((!found).then(|| "the workspace has no benchmarks".to_owned()))
            }
            Self::Target(target) => {
                let found = has_target(target)? || (setup::in_ci() && add_target(target));
                Ok((!found).then(|| format!("not installed: `rustup target add {target}`")))
            }
            Self::Toolchain(version) if is_in_use(version) => {
                Ok(Some(format!("Rust {version} is the one that the other steps use")))
            }
            Self::Toolchain(version) => {
                let found = has_toolchain(version) || (setup::in_ci() && add_toolchain(version));
                let add = format!("rustup toolchain install --profile minimal {version}");
                Ok((!found).then(|| format!("not installed: `{add}`")))
            }
            Self::Miri => {
                let found = has_miri() || (setup::in_ci() && command::output(&mut install_miri()).is_ok());
                let add = command::describe(&install_miri());
                Ok((!found).then(|| format!("not installed: `{add}`")))
            }
        }
    }
}

fn has_bench_targets(metadata: &serde_json::Value) -> bool {
    let packages = metadata["packages"].as_array().into_iter().flatten();
    let mut targets = packages.flat_map(|package| package["targets"].as_array().into_iter().flatten());
    targets
        .any(|target| target["kind"].as_array().is_some_and(|kinds| kinds.iter().any(|kind| kind == "bench")))
}

fn has_target(target: &str) -> Result<bool> {
    let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".to_owned());
    let sysroot = command::output(Command::new(rustc).args(["--print", "sysroot"]))?;
    Ok(Path::new(sysroot.trim()).join("lib/rustlib").join(target).join("lib").is_dir())
}

fn add_target(target: &str) -> bool {
    command::output(Command::new("rustup").args(["target", "add", target])).is_ok()
}

fn is_in_use(version: &str) -> bool {
    let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".to_owned());
    let says = command::output(Command::new(rustc).arg("--version"));
    says.is_ok_and(|says| is_version(&says, version))
}

/// `rustc 1.95.0 (59807616e 2026-04-14)`; a nightly or beta has a suffix, and is another version.
fn is_version(says: &str, version: &str) -> bool {
    says.split_whitespace().nth(1) == Some(version)
}

/// `rustup run` would install a version that is missing, or say no; a look at the list does neither.
fn has_toolchain(version: &str) -> bool {
    let list = command::output(Command::new("rustup").args(["toolchain", "list"]));
    list.is_ok_and(|list| lists_toolchain(&list, version))
}

/// A line is `1.88-x86_64-unknown-linux-gnu (default)`; rustup takes `1.88.0` for another toolchain.
fn lists_toolchain(list: &str, version: &str) -> bool {
    list.lines().any(|line| line.strip_prefix(version).is_some_and(|rest| rest.starts_with('-')))
}

fn add_toolchain(version: &str) -> bool {
    let install = ["toolchain", "install", "--profile", "minimal", version];
    command::output(Command::new("rustup").args(install)).is_ok()
}

fn has_miri() -> bool {
    let list = ["component", "list", "--toolchain", "nightly"];
    has_toolchain("nightly")
        && command::output(Command::new("rustup").args(list)).is_ok_and(|list| lists_miri(&list))
}

/// A line is `miri-x86_64-unknown-linux-gnu (installed)`, without the bracket if it is not.
fn lists_miri(components: &str) -> bool {
    components.lines().any(|line| line.starts_with("miri-") && line.ends_with("(installed)"))
}

fn install_miri() -> Command {
    let mut command = Command::new("rustup");
    command.args(["toolchain", "install", "--profile", "minimal", "--component", "miri,rust-src", "nightly"]);
    command
}

/// Tests counted over all test programs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub(super) struct Tests {
    pub(super) passed: u64,
    pub(super) failed: u64,
    /// They said so and returned; libtest counts them as passed, and here they are not.
    pub(super) skipped: u64,
}

impl Tests {
    /// So many of those that count as passed did not run.
    pub(super) fn skip(&mut self, count: u64) {
        self.passed = self.passed.saturating_sub(count);
        self.skipped += count;
    }

    /// Adds a line like `test result: ok. 22 passed; 0 failed; 0 ignored; …`; other lines change nothing.
    pub(super) fn add_line(&mut self, line: &str) {
        let Some(counts) = line.strip_prefix("test result: ") else { return };
        for count in counts.split(['.', ';']) {
            match count.trim().split_once(' ').map(|(number, what)| (number.parse::<u64>(), what)) {
                Some((Ok(number), "passed")) => self.passed += number,
                Some((Ok(number), "failed")) => self.failed += number,
                _ => {}
            }
        }
    }
}

impl fmt::Display for Tests {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

/// Runs with its output in view, counting tests; true if it succeeded.
fn stream(command: &mut Command, tests: &mut Tests) -> Result<bool> {
    let name = command::describe(command);
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start `{name}`"))?;
    let stdout = child.stdout.take().context("a child without standard output")?;
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
    fn result_lines_add_up_and_others_do_not_count() {
        let mut tests = Tests::default();
        tests.add_line(
            "test result: ok. 22 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s",
        );
        tests.add_line("test result: FAILED. 3 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out");
        tests.add_line("test some::name ... ok");
        tests.skip(3);
        assert_eq!(tests, Tests { passed: 22, failed: 2, skipped: 3 });
        assert_eq!(tests.to_string(), "22 passed, 2 failed, 3 skipped");
    }

    #[test]
    fn long_variant_is_taken_only_for_a_long_run() {
        let step = Step::new("a", &["true", "short"]).long(&["true", "long"]);
        assert_eq!(command::describe(&step.command(false).unwrap()), "true short");
        let long = step.command(true).unwrap();
        assert_eq!(command::describe(&long), "true long");
        assert!(long.get_envs().any(|(name, _)| name == LONG_ENV));
    }

    #[test]
    fn step_that_fails_is_failed_and_one_that_succeeds_is_passed() {
        let (mut tests, mut skips) = (Tests::default(), Skips::new().unwrap());
        assert_eq!(Step::new("a", &["false"]).run(false, &mut tests, &mut skips).unwrap(), Outcome::Failed);
        assert_eq!(Step::new("a", &["true"]).run(false, &mut tests, &mut skips).unwrap(), Outcome::Passed);
    }

    #[test]
    fn version_in_use_is_the_same_to_the_last_digit() {
        let says = "rustc 1.95.0 (59807616e 2026-04-14)\n";
        assert!(is_version(says, "1.95.0"));
        assert!(!is_version(says, "1.95"));
        assert!(!is_version("rustc 1.95.0-nightly (0000000 2026-01-01)", "1.95.0"));
        assert!(!is_version("", "1.95.0"));
    }

    #[test]
    fn target_that_is_not_installed_is_a_reason_to_skip() {
        assert!(!has_target("no-such-target").unwrap());
    }

    #[test]
    fn toolchain_is_found_by_its_whole_version() {
        let list = "stable-x86_64-unknown-linux-gnu (active, default)\n1.88-x86_64-unknown-linux-gnu\n";
        assert!(lists_toolchain(list, "1.88"));
        assert!(!lists_toolchain(list, "1.8") && !lists_toolchain("1.88.0-x86_64-unknown-linux-gnu", "1.88"));
    }

    #[test]
    fn miri_counts_when_it_is_installed() {
        assert!(lists_miri("cargo-x86_64 (installed)\nmiri-x86_64-unknown-linux-gnu (installed)\n"));
        assert!(!lists_miri("cargo-x86_64 (installed)\nmiri-x86_64-unknown-linux-gnu\n"));
    }

    #[test]
    fn bench_target_is_found_by_its_kind() {
        let with = |kind: &str| serde_json::json!({"packages": [{"targets": [{"kind": [kind]}]}]});
        assert!(has_bench_targets(&with("bench")));
        assert!(!has_bench_targets(&with("lib")));
    }
}
