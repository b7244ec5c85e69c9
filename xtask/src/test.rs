//! `cargo xtask test`: what CI runs, step by step, from one table.
//!
//! Order: quick checks first, the workspace's tests last, so that their closing lines stay in view.
//! `--long` takes each step's long variant and keeps the result in `bench_results/<date>-long/`.
//! A test that skips itself for a reason that the machine does not explain fails the run (`skips.rs`, `machine.rs`).
//! Not here: running one step (`step.rs`), what a kept result holds (`record.rs`).

mod machine;
mod record;
mod skips;
mod step;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::setup;
use skips::{Judged, Skips};
use step::{Outcome, Step, Tests, Wants};
use xtask::sizes;

/// Steps in the order they run.
const STEPS: &[Step] = &[
    Step::new("format", &["cargo", "fmt", "--all", "--check"]),
    Step::new("layers", &["xtask", "layers"]),
    Step::new("tidy", &["xtask", "tidy"]),
    Step::new(
        "clippy",
        &["cargo", "clippy", "--workspace", "--all-targets", "--all-features", "--", "-D", "warnings"],
    ),
    Step::new("no-std", &["cargo", "check", "-p", "qspinlock", "--no-default-features"]),
    Step::new("doc", &["cargo", "doc", "--workspace", "--all-features", "--no-deps"])
        .env("RUSTDOCFLAGS", "-D warnings"),
    Step::new("aarch64", &["cargo", "check", "--workspace", "--target", AARCH64])
        .wants(Wants::Target(AARCH64)),
    Step::new("msrv", &["rustup", "run", MSRV, "cargo", "check", "--workspace"])
        .wants(Wants::Toolchain(MSRV)),
    Step::new("loom", sizes::LOOM).env("RUSTFLAGS", "--cfg loom"),
    Step::new("miri", sizes::MIRI.smoke).long(sizes::MIRI.full).wants(Wants::Miri),
    Step::new("lock", sizes::MIRI_LOCK.smoke).long(sizes::MIRI_LOCK.full).wants(Wants::Miri),
    Step::new("mutants", sizes::MUTANTS.smoke).long(sizes::MUTANTS.full).wants(Wants::Miri),
    Step::new("fuzz", sizes::FUZZ.smoke).long(sizes::FUZZ.full),
    Step::new("benches", sizes::BENCHES.smoke).long(sizes::BENCHES.full).wants(Wants::BenchTargets),
    Step::new("tests", &["cargo", "test", "--workspace", "--all-features", "--no-fail-fast"]),
];

const AARCH64: &str = "aarch64-unknown-linux-gnu";

/// The oldest Rust that we promise to build with.
const MSRV: &str = env!("CARGO_PKG_RUST_VERSION");

/// What to run.
#[derive(Debug, Clone, Copy, clap::Args)]
#[command(after_help = step_list())]
pub(crate) struct Args {
    /// Run the checks in full size instead of as smoke tests, and keep the result in bench_results/
    #[arg(long)]
    long: bool,
    /// Run the remaining steps after one has failed
    #[arg(long)]
    keep_going: bool,
    #[command(flatten)]
    setup: setup::Args,
}

fn step_list() -> String {
    let lines = STEPS.iter().map(|step| format!("  {:<8} {}", step.name, step.smoke.join(" ")));
    format!("Steps:\n{}", lines.collect::<Vec<_>>().join("\n"))
}

/// A step that has run, or why it did not.
#[derive(Debug)]
pub(crate) struct Finished {
    name: &'static str,
    outcome: Outcome,
    took: Duration,
}

/// The last line of output is the count of tests, whatever happened.
pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    setup::ensure(args.setup, if args.long { setup::LONG } else { setup::USUAL })?;
    let (mut tests, mut skips) = (Tests::default(), Skips::new()?);
    let finished = run_steps(*args, &mut tests, &mut skips)?;
    let skipped = skips.judged(|reason| machine::explains(reason, args.long));
    print!("\n{}", skips::table(&skipped, &left_out(&finished)));
    print!("\n{}", summary(&finished));
    let failed = has_failed(&finished, &skipped);
    if args.long {
        println!("kept in {}", record::keep(&finished, tests, skipped)?.display());
    }
    println!("\n{tests}");
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn has_failed(finished: &[Finished], skipped: &[Judged]) -> bool {
    let unexplained = skipped.iter().any(|skip| !skip.explained);
    unexplained || finished.iter().any(|step| step.outcome == Outcome::Failed)
}

/// Steps that did not run, and why.
fn left_out(finished: &[Finished]) -> Vec<(&str, &str)> {
    finished.iter().filter_map(|step| Some((step.name, step.outcome.skipped_because()?))).collect()
}

fn run_steps(args: Args, tests: &mut Tests, skips: &mut Skips) -> Result<Vec<Finished>> {
    let mut finished: Vec<Finished> = Vec::new();
    for step in STEPS {
        let stopped = !args.keep_going && finished.iter().any(|step| step.outcome == Outcome::Failed);
        let started = Instant::now();
        let outcome = if stopped {
            Outcome::Skipped("an earlier step failed".to_owned())
        } else {
            println!("\n=== {} ===", step.name);
            step.run(args.long, tests, skips)?
        };
        finished.push(Finished { name: step.name, outcome, took: started.elapsed() });
    }
    Ok(finished)
}

fn summary(finished: &[Finished]) -> String {
    let line =
        |step: &Finished| format!("{:<8} {:>8.1} s  {}\n", step.name, step.took.as_secs_f64(), step.outcome);
    let total: Duration = finished.iter().map(|step| step.took).sum();
    let lines: String = finished.iter().map(line).collect();
    format!("{:<8} {:>10}  outcome\n{lines}{:<8} {:>8.1} s\n", "step", "time", "all", total.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use xtask::skip::{Extent, Reason, Skip};

    use super::*;

    #[test]
    fn summary_has_a_line_per_step_with_its_outcome() {
        let took = Duration::from_millis(1500);
        let finished = [
            Finished { name: "format", outcome: Outcome::Passed, took },
            Finished { name: "aarch64", outcome: Outcome::Skipped("no target".to_owned()), took },
        ];
        let text = summary(&finished);
        assert!(text.contains("format        1.5 s  passed\n"), "{text}");
        assert!(text.contains("aarch64       1.5 s  skipped: no target\n"), "{text}");
        assert!(text.ends_with("all           3.0 s\n"), "{text}");
    }

    #[test]
    fn skip_that_the_machine_does_not_explain_fails_the_run() {
        let took = Duration::ZERO;
        let finished = [
            Finished { name: "tests", outcome: Outcome::Passed, took },
            Finished { name: "miri", outcome: Outcome::Skipped("not installed".to_owned()), took },
        ];
        let skip = |reason| Skip { reason, test: "a/b::c".into(), extent: Extent::Whole, why: String::new() };
        let judged = |reason: Reason| {
            let explained = machine::explains(&reason, false);
            [Judged { skip: skip(reason), explained }]
        };
        assert!(!has_failed(&finished, &judged(Reason::NotLong)));
        assert!(has_failed(&finished, &judged(Reason::NoProgram("sh".into()))));
        assert_eq!(left_out(&finished), [("miri", "not installed")]);
    }

    #[test]
    fn help_names_every_step() {
        assert_eq!(step_list().lines().count(), 1 + STEPS.len());
    }
}
