//! `cargo xtask fuzz [TARGET…]`: runs libFuzzer on input from a hostile guest, front-end, client or file.
//!
//! `build with coverage (fuzz/) → for each target: seeds and corpus → a number of seconds → table, JSON`
//!
//! - libFuzzer needs only flags that every compiler version has; only `--address-sanitizer` needs a nightly.
//! - New interesting inputs stay in `fuzz/corpus`, failing ones in `fuzz/artifacts`. git ignores both.
//!
//! How to read the results and add a seed: docs/internals/fuzzing.md.

mod report;

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use xtask::{command, workspace};

use crate::origin;
use report::Outcome;

/// Coverage for libFuzzer (LLVM's SanitizerCoverage): counters, and traced comparisons.
const COVERAGE: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares";
/// Has the same value as `fuzz_targets::MODE_VARIABLE`.
const MODE_VARIABLE: &str = "BAREBLK_FUZZ_MODE";
/// Time limit per input; a slower input counts as hanging.
const INPUT_TIMEOUT_S: u32 = 60;
const MEMORY_MIB: u32 = 2048;
const MOST_BYTES: u32 = 4096;

/// Options of `cargo xtask fuzz`.
#[derive(Debug, Clone, clap::Args)]
#[allow(clippy::struct_excessive_bools)] // options
pub(crate) struct Args {
    /// Names of the targets to run [default: all]
    targets: Vec<String>,
    /// Time to run each target, in seconds
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Run the target on this input once, and do nothing else
    #[arg(long, value_name = "FILE")]
    repeat: Option<PathBuf>,
    /// Run only targets with shared memory, while a second thread writes into that memory
    #[arg(long, conflicts_with = "real_server")]
    second_thread: bool,
    /// Run only targets with sessions, on a server with its own threads; slower
    #[arg(long)]
    real_server: bool,
    /// Also find accesses outside of allocations: several times slower, and needs a nightly version of Rust
    #[arg(long)]
    address_sanitizer: bool,
    /// Keep the result in bench_results/
    #[arg(long)]
    keep: bool,
    /// Only check that each target has its program and its seeds
    #[arg(long)]
    check: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let known = targets()?;
    if args.check {
        return check(&known);
    }
    let unknown = args.targets.iter().find(|name| !known.contains(*name));
    if let Some(name) = unknown {
        bail!("target `{name}` does not exist; the targets are {}", joined(&known));
    }
    let mode = args.mode();
    if let Some(name) = args.targets.iter().find(|name| !mode.has(name)) {
        bail!(
            "target `{name}` has no mode {}: name only targets that have this mode ({})",
            mode.name,
            mode.targets.join(", ")
        );
    }
    let is_wanted = |name: &str| args.targets.is_empty() || args.targets.iter().any(|wanted| wanted == name);
    let wanted: Vec<_> = known.iter().filter(|name| is_wanted(name) && mode.has(name)).collect();
    let programs = build(args.address_sanitizer)?;
    if let Some(input) = &args.repeat {
        let [target] = wanted[..] else { bail!("--repeat needs the name of exactly one target") };
        return command::run(mode.command(&programs, target).arg(input));
    }
    let outcomes = wanted.into_iter().map(|target| fuzz(&programs, target, mode, args.seconds));
    let outcomes = outcomes.collect::<Result<Vec<_>>>()?;
    println!("\n{}", report::table(&outcomes));
    println!("kept in {}", keep(&outcomes, args)?.display());
    match outcomes.iter().find(|outcome| outcome.failed.is_some()) {
        None => Ok(()),
        Some(Outcome { target, failed, .. }) => {
            let file = failed.clone().unwrap_or_default();
            let option = mode.option;
            bail!(
                "target {target} failed: to repeat the failure, run `cargo xtask fuzz {target}{option} \
                 --repeat {file}`"
            )
        }
    }
}

/// How a target runs (`fuzz_targets::Mode`).
#[derive(Debug, Clone, Copy)]
struct Mode {
    /// The variable's value for the program, and the suffix of the corpus's name.
    name: &'static str,
    /// The option on the command line.
    option: &'static str,
    /// The targets that have the mode; empty if all targets have it.
    targets: &'static [&'static str],
}

const ALONE: Mode = Mode { name: "", option: "", targets: &[] };
const SECOND_THREAD: Mode = Mode {
    name: "second-thread",
    option: " --second-thread",
    targets: &["chains", "logs", "requests", "vhost_user"],
};
const REAL_SERVER: Mode = Mode { name: "real-server", option: " --real-server", targets: &["vhost_user"] };

impl Args {
    fn mode(&self) -> Mode {
        match (self.second_thread, self.real_server) {
            (true, _) => SECOND_THREAD,
            (_, true) => REAL_SERVER,
            _ => ALONE,
        }
    }
}

impl Mode {
    fn has(self, target: &str) -> bool {
        self.targets.is_empty() || self.targets.contains(&target)
    }

    fn command(self, programs: &Path, target: &str) -> Command {
        let mut program = Command::new(programs.join(target));
        if self.name.is_empty() {
            program.env_remove(MODE_VARIABLE);
        } else {
            program.env(MODE_VARIABLE, self.name);
        }
        program
    }

    /// The name in the table and of the corpus's folder. Each mode has its own corpus, because inputs that a second
    /// thread found by chance do not help other runs.
    fn label(self, target: &str) -> String {
        if self.name.is_empty() { target.to_owned() } else { format!("{target}-{}", self.name) }
    }
}

fn folder() -> PathBuf {
    workspace::root().join("fuzz")
}

fn joined(names: &BTreeSet<String>) -> String {
    names.iter().cloned().collect::<Vec<_>>().join(", ")
}

/// The names of the files in a folder, without extension.
fn names(folder: &Path) -> Result<BTreeSet<String>> {
    let entries = fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let stem = |entry: std::io::Result<fs::DirEntry>| -> Result<Option<String>> {
        Ok(entry?.path().file_stem().map(|stem| stem.to_string_lossy().into_owned()))
    };
    entries.filter_map(|entry| stem(entry).transpose()).collect()
}

fn targets() -> Result<BTreeSet<String>> {
    names(&folder().join("targets"))
}

fn check(programs: &BTreeSet<String>) -> Result<()> {
    let seeds = names(&folder().join("seeds"))?;
    if *programs != seeds {
        bail!(
            "every target needs a program and seeds: there are programs for {}, and seeds for {}",
            joined(programs),
            joined(&seeds)
        );
    }
    for name in programs {
        if names(&folder().join("seeds").join(name))?.is_empty() {
            bail!("target {name} has no seeds: run cargo run -p fuzz_targets --bin fuzz_seeds");
        }
    }
    let manifest = folder().join("Cargo.toml");
    command::run(Command::new(workspace::cargo()).args(["fmt", "--check", "--manifest-path"]).arg(manifest))?;
    check_lock()?;
    println!("fuzz: {} have programs and seeds", joined(programs));
    Ok(())
}

/// The programs are a separate workspace: a new dependency of the crates does not update its lock file.
fn check_lock() -> Result<()> {
    let mut cargo = Command::new(workspace::cargo());
    cargo.args(["metadata", "--locked", "--format-version", "1", "--manifest-path"]);
    let read = command::output(cargo.arg(folder().join("Cargo.toml")));
    read.context(
        "is fuzz/Cargo.lock out of date? Run cargo update --workspace --manifest-path fuzz/Cargo.toml",
    )?;
    Ok(())
}

/// Returns the folder of the programs.
fn build(address_sanitizer: bool) -> Result<PathBuf> {
    let host = host()?;
    let target_dir = workspace::build_dir()?.join(if address_sanitizer { "fuzz-asan" } else { "fuzz" });
    let mut flags = COVERAGE.to_owned();
    let mut cargo = if address_sanitizer {
        flags.push_str(" -Zsanitizer=address");
        let mut cargo = Command::new("rustup");
        cargo.args(["run", "nightly", "cargo"]).env_remove("RUSTC").env_remove("RUSTUP_TOOLCHAIN");
        cargo
    } else {
        Command::new(workspace::cargo())
    };
    // With `--target`, cargo builds macros and build scripts without these flags.
    cargo.args(["build", "--locked", "--target", &host, "--manifest-path"]).arg(folder().join("Cargo.toml"));
    cargo.arg("--target-dir").arg(&target_dir).env("RUSTFLAGS", flags);
    command::run(&mut cargo)?;
    Ok(target_dir.join(host).join("debug"))
}

/// This machine's target triple.
fn host() -> Result<String> {
    let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".to_owned());
    let says = command::output(Command::new(rustc).arg("-vV"))?;
    let host = says.lines().find_map(|line| line.strip_prefix("host: ")).map(str::to_owned);
    host.context("rustc -vV names no host")
}

/// Runs one target, and shows libFuzzer's output as it is written.
fn fuzz(programs: &Path, target: &str, mode: Mode, seconds: u64) -> Result<Outcome> {
    let label = mode.label(target);
    println!("\n=== {label}, {seconds} s ===");
    let (corpus, artifacts) = (folder().join("corpus").join(&label), folder().join("artifacts").join(&label));
    fs::create_dir_all(&corpus)?;
    fs::create_dir_all(&artifacts)?;
    let mut program = mode.command(programs, target);
    program.arg(&corpus).arg(folder().join("seeds").join(target));
    let found_alone = folder().join("corpus").join(target);
    if !mode.name.is_empty() && found_alone.is_dir() {
        program.arg(found_alone);
    }
    program.args([
        format!("-max_total_time={seconds}"),
        format!("-timeout={INPUT_TIMEOUT_S}"),
        format!("-rss_limit_mb={MEMORY_MIB}"),
        format!("-max_len={MOST_BYTES}"),
        format!("-artifact_prefix={}/", artifacts.display()),
        "-print_final_stats=1".to_owned(),
    ]);
    let name = command::describe(&program);
    let child = program.stdin(Stdio::null()).stderr(Stdio::piped()).spawn();
    let mut child = child.with_context(|| format!("cannot start `{name}`"))?;
    let mut outcome = Outcome::new(target, mode.option, seconds);
    let stderr = child.stderr.take().context("the child process has no standard error")?;
    for line in BufReader::new(stderr).split(b'\n') {
        let line = String::from_utf8_lossy(&line?).into_owned();
        if outcome.add_line(&line) {
            eprintln!("{line}");
        }
    }
    // A kept result must not name a folder of this machine.
    let root = format!("{}/", workspace::root().display());
    outcome.failed = outcome.failed.map(|path| path.replace(&root, ""));
    if !child.wait()?.success() && outcome.failed.is_none() {
        outcome.failed = Some("(no input was written)".to_owned());
    }
    Ok(outcome)
}

fn keep(outcomes: &[Outcome], args: &Args) -> Result<PathBuf> {
    let result = report::Kept { origin: origin::Origin::now()?, targets: outcomes };
    if args.keep {
        return origin::keep(&result.origin, "fuzz", "summary.json", &result);
    }
    let path = workspace::build_dir()?.join("fuzz").join("summary.json");
    fs::create_dir_all(path.parent().unwrap_or(&path))?;
    fs::write(&path, serde_json::to_string_pretty(&result)? + "\n")?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_has_its_program_and_its_seeds() {
        check(&targets().unwrap()).unwrap();
    }
}
