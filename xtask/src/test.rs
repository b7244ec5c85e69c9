//! `cargo xtask test`: runs what CI runs, step by step, from one table.
//!
//! - Quick checks come first. The workspace's tests come last, so that their closing lines stay in view.
//! - Steps that mostly use one processor run at the same time as the others (`beside.rs`).
//! - `--long` takes each step's long variant and keeps the result in `bench_results/<date>-long/`.
//! - A test that skips itself for a reason that the machine does not explain fails the run (`skips.rs`, `machine.rs`).
//! - `--only` and names of crates choose a part (`plan.rs`).

mod beside;
mod counts;
mod lanes;
mod machine;
mod plan;
mod programs;
mod record;
mod skips;
mod step;
mod times;
mod wants;

use std::process::ExitCode;
use std::thread;
use std::time::Instant;

use anyhow::Result;

use crate::setup;
use beside::{Beside, Stop};
use counts::Tests;
use plan::Plan;
use skips::{Judged, Skips};
use step::{Finished, Outcome, Run, Step};
use wants::Wants;
use xtask::sizes;

/// The steps, in the order in which they run.
const STEPS: &[Step] = &[
    Step::new("format", &["cargo", "fmt", "--all", "--check"]).takes_crates().quick(),
    Step::new("layers", &["xtask", "layers"]).quick(),
    Step::new("tidy", &["xtask", "tidy"]).quick(),
    // Two models at a time in one process are slower: each execution maps and unmaps its threads' stacks.
    Step::new("loom", sizes::LOOM).env("RUST_TEST_THREADS", "1").beside(),
    Step::new("miri", sizes::MIRI.smoke).long(sizes::MIRI.full).wants(Wants::Miri).beside(),
    Step::new("lock", sizes::MIRI_LOCK.smoke).long(sizes::MIRI_LOCK.full).wants(Wants::Miri).beside(),
    Step::new("mutants", sizes::MUTANTS).wants(Wants::Miri).beside(),
    Step::new(
        "clippy",
        &["cargo", "clippy", "--workspace", "--all-targets", "--all-features", "--", "-D", "warnings"],
    )
    .takes_crates(),
    Step::new("no-std", &["cargo", "check", "-p", "qspinlock", "--no-default-features"]),
    Step::new("doc", &["cargo", "doc", "--workspace", "--all-features", "--no-deps"])
        .env("RUSTDOCFLAGS", "-D warnings")
        .takes_crates(),
    Step::new("aarch64", &["cargo", "check", "--workspace", "--target", AARCH64])
        .wants(Wants::Target(AARCH64)),
    Step::new("msrv", &["rustup", "run", MSRV, "cargo", "check", "--workspace"])
        .wants(Wants::Toolchain(MSRV)),
    Step::new("fuzz", sizes::FUZZ.smoke).long(sizes::FUZZ.full),
    Step::new("benches", sizes::BENCHES).wants(Wants::BenchTargets),
    Step::new("ratchet", &["xtask", "bench", "--ratchet"]).uses_packages(),
    Step::new("tests", &["cargo", "test", "--workspace", "--all-features"]).takes_crates().runs_programs(),
];

const AARCH64: &str = "aarch64-unknown-linux-gnu";

/// The oldest version of Rust that is guaranteed to build the project.
const MSRV: &str = env!("CARGO_PKG_RUST_VERSION");

/// Options of `cargo xtask test`.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = step_list())]
pub(crate) struct Args {
    /// Check only these crates: format, clippy and tests, or what --only names
    #[arg(value_name = "CRATE")]
    crates: Vec<String>,
    /// Run only these steps, in the order of the list below
    #[arg(long, value_name = "STEP", value_delimiter = ',')]
    only: Vec<String>,
    /// Run the checks in full size instead of as smoke tests, and keep the result in bench_results/
    #[arg(long)]
    long: bool,
    /// Run the remaining steps even after a step has failed
    #[arg(long)]
    keep_going: bool,
    /// Run this many test programs at the same time
    #[arg(long, value_name = "COUNT", default_value_t = programs::AT_ONCE)]
    at_once: usize,
    #[command(flatten)]
    setup: setup::Args,
}

fn step_list() -> String {
    let lines = STEPS.iter().map(|step| format!("  {:<8} {}", step.name, step.smoke.join(" ")));
    format!("Steps:\n{}", lines.collect::<Vec<_>>().join("\n"))
}

/// The last line of output is the count of tests, even if a step has failed.
pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let Plan { steps, crates } = prepared(args)?;
    let (tests, skips, programs) = (Tests::default(), Skips::new()?, Vec::new());
    let mut run = Run { is_long: args.long, crates, at_once: args.at_once, tests, skips, programs };
    let started = Instant::now();
    let finished = run_steps(&steps, args.keep_going, &mut run)?;
    let skipped = run.skips.judged(|reason| machine::explains(reason, args.long));
    print!("\n{}", skips::table(&skipped, &left_out(&finished)));
    print!("\n{}", times::programs(&run.programs, args.at_once));
    print!("\n{}", times::steps(&finished, started.elapsed()));
    print!("{}", times::failed(&run.programs));
    let failed = has_failed(&finished, &skipped);
    if args.long {
        println!("kept in {}", record::keep(&finished, &run.programs, run.tests, skipped)?.display());
    }
    println!("\n{}", run.tests);
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Makes the plan, and installs the packages that its steps need.
fn prepared(args: &Args) -> Result<Plan> {
    let plan = Plan::new(STEPS, &args.only, &args.crates)?;
    setup::ensure(args.setup, &[&plan.packages(args.long)])?;
    Ok(plan)
}

fn has_failed(finished: &[Finished], skipped: &[Judged]) -> bool {
    let unexplained = skipped.iter().any(|skip| !skip.explained);
    unexplained || finished.iter().any(|step| step.outcome == Outcome::Failed)
}

/// Steps that did not run, and why.
fn left_out(finished: &[Finished]) -> Vec<(&str, &str)> {
    finished.iter().filter_map(|step| Some((step.name, step.outcome.skipped_because()?))).collect()
}

/// Runs the steps that may run beside others on a second thread, unless there are no others.
fn run_steps(steps: &[&'static Step], keep_going: bool, run: &mut Run) -> Result<Vec<Finished>> {
    let (beside, others): (Vec<&Step>, Vec<&Step>) = steps.iter().partition(|step| step.is_beside);
    if others.is_empty() {
        return run_in_turn(&beside, run, &Stop::new(keep_going));
    }
    let (quick, others) = others.split_at(others.iter().take_while(|step| step.is_quick).count());
    let stop = Stop::new(keep_going);
    let mut finished = run_in_turn(quick, run, &stop)?;
    let beside = Beside { steps: beside, is_long: run.is_long, skips: run.skips.path().to_owned() };
    let (others, beside) = thread::scope(|scope| {
        let second = scope.spawn(|| beside.run(&stop));
        let others = run_in_turn(others, run, &stop);
        (others, second.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    });
    let (others, (beside, tests)) = (others?, beside?);
    finished.extend(beside);
    finished.extend(others);
    run.tests.add(tests);
    run.tests.skip(run.skips.read()?);
    Ok(finished)
}

fn run_in_turn(steps: &[&Step], run: &mut Run, stop: &Stop) -> Result<Vec<Finished>> {
    let mut finished: Vec<Finished> = Vec::new();
    for step in steps {
        let started = Instant::now();
        let outcome = match stop.outcome() {
            Some(outcome) => outcome,
            None => {
                println!("\n=== {} ===", step.name);
                step.run(run)?
            }
        };
        stop.note(&outcome);
        finished.push(Finished { name: step.name, outcome, took: started.elapsed() });
    }
    Ok(finished)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use xtask::skip::{Extent, Reason, Skip};

    use super::*;

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
