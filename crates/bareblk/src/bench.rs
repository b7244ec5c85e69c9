//! `bareblk bench`: runs the jobs that were asked for, shows how far they are, prints what they measured.
//!
//! `arguments → jobs (command line or file) → workload::run | compare (progress bar) → text or JSON → exit code`
//!
//! - SIGINT and SIGTERM end it in order, with the result so far; a second one ends at once.
//! - What failed is one line on standard error, behind the result of what was done until then.
//!
//! Not here: loads and figures (`workload`), the definition of the arguments (`bench_args.rs`).

use std::io;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Error, Result, anyhow, bail};
use indicatif::{ProgressBar, ProgressStyle};
use signal_hook::consts::{SIGINT, SIGTERM};
use workload::stop::Stop;
use workload::{
    Client, CompareError, ConnectError, Job, Outcome, Progress, RunError, Target, Watch, compare, parse_jobs,
    report, run, text,
};

use crate::bench_args::BenchArgs;
use crate::usage::Wrong;

/// Steps of the progress bar.
const RESOLUTION: u64 = 1000;

/// Does what was asked for.
pub fn obey(args: &BenchArgs) -> Result<ExitCode> {
    let jobs = jobs(args)?;
    let signals = Signals::catch().context("cannot catch signals")?;
    if let Some([a, b]) = args.compare.as_deref() {
        return compare_two(args, &jobs, [a, b], &signals);
    }
    let targets: Result<Vec<_>> = jobs.iter().map(|job| target(args, job)).collect();
    let (targets, client) = (targets?, args.client.client());
    if targets.iter().any(|target| matches!(target, Target::File(..))) {
        args.client.check_for_files()?;
    }
    say_what_has_no_effect(&jobs);
    let mut outcomes = Vec::new();
    for (job, target) in jobs.iter().zip(&targets) {
        let outcome = run_one(job, target, &client, &signals.stop)?;
        let is_over = outcome.failure.is_some() || outcome.interrupted;
        if args.json.as_deref() != Some(Path::new("-")) {
            crate::print(&text(&outcome))?;
        }
        outcomes.push(outcome);
        if is_over {
            break;
        }
    }
    write_json(args, &outcomes)?;
    match outcomes.into_iter().find_map(|outcome| outcome.failure) {
        Some(failure) => Err(failure.into()),
        None => Ok(signals.exit_code()),
    }
}

fn jobs(args: &BenchArgs) -> Result<Vec<Job>> {
    let wrong = |error: &dyn std::fmt::Display| anyhow!(Wrong(error.to_string()));
    let Some(path) = &args.job_file else {
        let job = args.load.job()?;
        job.check().map_err(|error| wrong(&error))?;
        return Ok(vec![job]);
    };
    let named = || format!("job file {}", path.display());
    let text = std::fs::read_to_string(path).with_context(named)?;
    parse_jobs(&text, &args.load.given()).map_err(|error| wrong(&format!("{}: {error}", named())))
}

/// The command line's, or the job's own.
fn target(args: &BenchArgs, job: &Job) -> Result<Target> {
    match (&args.socket, &args.file, &job.filename) {
        (Some(socket), ..) => Ok(Target::Socket(socket.clone())),
        (_, Some(file), _) => Ok(Target::File(file.clone(), None)),
        (_, _, Some(name)) => Ok(Target::parse(name).map_err(|error| Wrong(format!("filename={error}")))?),
        _ => bail!(Wrong("nothing to work on: give --socket PATH, --file PATH or --compare A B".to_owned())),
    }
}

fn say_what_has_no_effect(jobs: &[Job]) {
    if let Some(scheduler) = jobs.iter().find_map(|job| job.io_scheduler.as_ref()) {
        eprintln_or_not(&format!(
            "bareblk: note: ioscheduler={scheduler} is not set: the host's scheduler stays as it is"
        ));
    }
}

/// Not `eprintln!`, which panics when nobody reads any more.
fn eprintln_or_not(line: &str) {
    use io::Write;
    let _ = writeln!(io::stderr(), "{line}");
}

fn run_one(job: &Job, target: &Target, client: &Client, stop: &Stop) -> Result<Outcome> {
    let mut bar = Bar::new();
    let outcome = run(job, target, client, stop, &mut bar);
    bar.bar.finish_and_clear();
    outcome.map_err(explain)
}

/// Options that do not fit the target are wrong usage.
fn explain(error: RunError) -> Error {
    match error {
        RunError::Connect { source: ConnectError::Queues { wanted, available }, .. } => {
            Wrong(format!("--queues {wanted}: the device has {available}, give no more than that")).into()
        }
        RunError::Connect { source: source @ ConnectError::QueueSize { .. }, .. } => {
            Wrong(format!("--queue-size: {source}")).into()
        }
        RunError::Job(_)
        | RunError::Depth { .. }
        | RunError::IdleQueues { .. }
        | RunError::NotASocket { .. }
        | RunError::NoDirect { .. } => Wrong(error.to_string()).into(),
        other => other.into(),
    }
}

fn compare_two(args: &BenchArgs, jobs: &[Job], names: [&String; 2], signals: &Signals) -> Result<ExitCode> {
    let [job] = jobs else {
        bail!(Wrong("--compare takes one job: a job file with one section".to_owned()));
    };
    let parse = |name: &String| Target::parse(name).map_err(|error| Wrong(format!("--compare: {error}")));
    let targets = [parse(names[0])?, parse(names[1])?];
    if targets.iter().all(|target| matches!(target, Target::File(..))) {
        args.client.check_for_files()?;
    }
    let mut bar = Bar::new();
    let found = compare(job, targets, &args.client.client(), args.rounds, &signals.stop, &mut bar);
    bar.bar.finish_and_clear();
    match found {
        Ok(found) => crate::print(&found.text())?,
        Err(CompareError::Run { target, source }) => {
            return Err(explain(source)).with_context(|| target);
        }
        Err(other) => return Err(other.into()),
    }
    Ok(signals.exit_code())
}

fn write_json(args: &BenchArgs, outcomes: &[Outcome]) -> Result<()> {
    let Some(path) = &args.json else { return Ok(()) };
    let version = concat!("bareblk-", env!("CARGO_PKG_VERSION"));
    let report = report(version, SystemTime::now(), outcomes);
    let text = serde_json::to_string_pretty(&report)? + "\n";
    if path == Path::new("-") {
        return crate::print(&text);
    }
    std::fs::write(path, text).with_context(|| format!("--json {}", path.display()))
}

/// The first signal asks for an end in order; the second has its usual effect.
struct Signals {
    stop: Stop,
    number: Arc<AtomicUsize>,
}

impl Signals {
    fn catch() -> io::Result<Self> {
        let (flag, number) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        for signal in [SIGINT, SIGTERM] {
            signal_hook::flag::register_conditional_default(signal, Arc::clone(&flag))?;
            signal_hook::flag::register_usize(
                signal,
                Arc::clone(&number),
                usize::try_from(signal).unwrap_or(0),
            )?;
            signal_hook::flag::register(signal, Arc::clone(&flag))?;
        }
        Ok(Self { stop: Stop::new(flag), number })
    }

    /// As a shell reports a program that a signal ended.
    fn exit_code(&self) -> ExitCode {
        // Relaxed: the flag was seen before; whichever signal it was will do.
        match self.number.load(Relaxed) {
            0 => ExitCode::SUCCESS,
            signal => ExitCode::from(128_u8.saturating_add(u8::try_from(signal).unwrap_or(0))),
        }
    }
}

/// On standard error, if that is a terminal.
struct Bar {
    bar: ProgressBar,
    last: Progress,
    rates: String,
}

/// Between two figures of the rate.
const RATE: Duration = Duration::from_secs(1);

impl Bar {
    fn new() -> Self {
        let bar = ProgressBar::new(RESOLUTION);
        let style = ProgressStyle::with_template("{bar:30} {percent:>3} %  {wide_msg}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        Self { bar, last: Progress::default(), rates: String::new() }
    }

    /// Since the last figure: IOPS and MiB/s.
    fn take_rates(&mut self, progress: &Progress) {
        let time = progress.elapsed.saturating_sub(self.last.elapsed);
        if progress.elapsed < self.last.elapsed
            || progress.ios.iter().sum::<u64>() < self.last.ios.iter().sum()
        {
            // The next one of several runs.
            self.last = Progress::default();
            return;
        }
        if time < RATE {
            return;
        }
        let per_s = |now: [u64; 2], before: [u64; 2]| {
            let count = now.iter().sum::<u64>().saturating_sub(before.iter().sum());
            #[allow(clippy::cast_precision_loss)] // for people
            let count = count as f64;
            count / time.as_secs_f64()
        };
        let (iops, bytes) = (per_s(progress.ios, self.last.ios), per_s(progress.bytes, self.last.bytes));
        self.rates = format!("{:.1}k IOPS, {:.0} MiB/s", iops / 1000.0, bytes / f64::from(1 << 20));
        self.last = *progress;
    }
}

impl Watch for Bar {
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)] // a share
    fn tick(&mut self, progress: &Progress) {
        self.take_rates(progress);
        self.bar.set_position((progress.share.clamp(0.0, 1.0) * RESOLUTION as f64) as u64);
        self.bar.set_message(self.rates.clone());
    }

    fn event(&mut self, text: &str) {
        self.bar.suspend(|| eprintln_or_not(&format!("bareblk: {text}")));
    }
}
