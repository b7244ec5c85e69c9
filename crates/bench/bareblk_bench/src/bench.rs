//! `bareblk bench`: runs the requested jobs, shows their progress, prints the results.
//!
//! `arguments → jobs (command line or file) → workload::run | compare (progress bar) → text or JSON → exit code`
//!
//! - SIGINT and SIGTERM end the run cleanly, with the result so far; a second signal ends it at once (`ending.rs`).
//! - The file for `--json` is created before the run: an unwritable file must not waste the run.
//! - A failure is one line on standard error, after the result so far.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Error, Result, anyhow, bail};
use bareblk::command_line::{self, Wrong};
use indicatif::{ProgressBar, ProgressStyle};
use workload::stop::Stop;
use workload::{
    Client, CompareError, ConnectError, Job, Outcome, Progress, RunError, Target, Watch, compare, parse_jobs,
    report, run, text,
};

use crate::bench_args::BenchArgs;
use crate::ending::Ending;

/// Steps of the progress bar.
const RESOLUTION: u64 = 1000;

/// Maximum size of a job file: far above what people write, and far below what memory allows.
const MAX_JOB_FILE_BYTES: u64 = 1 << 20;

/// Runs `bareblk bench`.
pub fn execute(args: &BenchArgs) -> Result<ExitCode> {
    let jobs = jobs(args)?;
    let ending = Ending::catch().context("cannot catch SIGINT and SIGTERM")?;
    let stop = Stop::new(ending.flag());
    if let Some([a, b]) = args.compare.as_deref() {
        return compare_two(args, &jobs, [a, b], &stop, &ending);
    }
    let targets: Result<Vec<_>> = jobs.iter().map(|job| target(args, job)).collect();
    let (targets, client) = (targets?, args.client.client());
    check_options(args, &targets)?;
    args.client.check_for_one()?;
    let json = args.json.as_deref().map(Json::open).transpose()?;
    say_what_has_no_effect(&jobs);
    let mut outcomes = Vec::new();
    for (job, target) in jobs.iter().zip(&targets) {
        let outcome = run_one(job, target, &client, &stop)?;
        let is_over = outcome.failure.is_some() || outcome.interrupted;
        if !matches!(json, Some(Json::Stdout)) {
            command_line::print(&text(&outcome))?;
        }
        outcomes.push(outcome);
        if is_over {
            break;
        }
    }
    if let Some(json) = json {
        json.write(&outcomes)?;
    }
    match outcomes.into_iter().find_map(|outcome| outcome.failure) {
        Some(failure) => Err(failure.into()),
        None => Ok(ending.exit_code()),
    }
}

fn jobs(args: &BenchArgs) -> Result<Vec<Job>> {
    let wrong = |error: &dyn std::fmt::Display| anyhow!(Wrong(error.to_string()));
    let Some(path) = &args.job_file else {
        let mut job = args.load.job()?;
        if let Some(queues) = args.client.queues.filter(|_| args.load.jobs.is_none()) {
            job.jobs = queues.into();
        }
        job.check().map_err(|error| wrong(&error))?;
        return Ok(vec![job]);
    };
    let named = || format!("job file {}", path.display());
    let text = read_job_file(path).with_context(named)?;
    parse_jobs(&text, &args.load.given()).map_err(|error| wrong(&format!("{}: {error}", named())))
}

/// Reads any file in bounded memory.
fn read_job_file(path: &Path) -> Result<String> {
    let mut bytes = Vec::new();
    File::open(path)?.take(MAX_JOB_FILE_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_JOB_FILE_BYTES {
        bail!(Wrong(format!(
            "the file has more than {MAX_JOB_FILE_BYTES} bytes, the limit for a job file of fio"
        )));
    }
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        Wrong(format!("the file is not text (byte {at} is not UTF-8): give a job file of fio")).into()
    })
}

/// Refuses options that have no effect on any of the targets.
fn check_options(args: &BenchArgs, targets: &[Target]) -> Result<()> {
    let is_file = |target: &Target| matches!(target, Target::File(..));
    if !targets.iter().any(is_file) {
        return args.load.check_for_sockets();
    }
    // A single target must be able to use all options; of two compared targets, one suffices for each option.
    if args.compare.is_none() || targets.iter().all(is_file) { args.client.check_for_files() } else { Ok(()) }
}

/// The target from the command line, else from the job.
fn target(args: &BenchArgs, job: &Job) -> Result<Target> {
    match (&args.socket, &args.file, &job.filename) {
        (Some(socket), ..) => Ok(Target::Socket(socket.clone())),
        (_, Some(file), _) => Ok(Target::File(file.clone(), None)),
        (_, _, Some(name)) => Ok(Target::parse(name).map_err(|error| Wrong(format!("filename={error}")))?),
        _ => {
            bail!(Wrong("no target is given: add --socket PATH, --file PATH or --compare A B".to_owned()))
        }
    }
}

fn say_what_has_no_effect(jobs: &[Job]) {
    if let Some(scheduler) = jobs.iter().find_map(|job| job.io_scheduler.as_ref()) {
        eprintln_or_not(&format!(
            "bareblk: note: ioscheduler={scheduler} has no effect: the host's I/O scheduler stays as it is"
        ));
    }
}

/// Unlike `eprintln!`, does not panic when nothing reads standard error any more.
fn eprintln_or_not(line: &str) {
    let _ = writeln!(io::stderr(), "{line}");
}

fn run_one(job: &Job, target: &Target, client: &Client, stop: &Stop) -> Result<Outcome> {
    let mut bar = Bar::new();
    let outcome = run(job, target, client, stop, &mut bar);
    bar.bar.finish_and_clear();
    outcome.map_err(explain)
}

/// Reports options that do not fit the target as wrong usage.
fn explain(error: RunError) -> Error {
    match error {
        RunError::Connect { source: ConnectError::Queues { wanted, available }, .. } => Wrong(format!(
            "--queues {wanted} exceeds the {available} queues of the device: give {available} or fewer"
        ))
        .into(),
        RunError::Connect { source: source @ ConnectError::QueueSize { .. }, .. } => {
            Wrong(format!("--queue-size: {source}")).into()
        }
        RunError::Job(_)
        | RunError::Depth { .. }
        | RunError::IdleQueues { .. }
        | RunError::NotASocket { .. }
        | RunError::Pin { .. }
        | RunError::NoDirect { .. } => Wrong(error.to_string()).into(),
        other => other.into(),
    }
}

fn compare_two(
    args: &BenchArgs,
    jobs: &[Job],
    names: [&String; 2],
    stop: &Stop,
    ending: &Ending,
) -> Result<ExitCode> {
    let [job] = jobs else {
        bail!(Wrong("--compare runs only one job: give a job file with a single section".to_owned()));
    };
    let parse = |name: &String| Target::parse(name).map_err(|error| Wrong(format!("--compare: {error}")));
    let targets = [parse(names[0])?, parse(names[1])?];
    check_options(args, &targets)?;
    let mut bar = Bar::new();
    let clients = args.client.clients();
    let found = compare(job, targets, [&clients[0], &clients[1]], args.rounds, stop, &mut bar);
    bar.bar.finish_and_clear();
    match found {
        Ok(found) => command_line::print(&found.text()).map(|()| ending.exit_code()),
        Err(error @ CompareError::Interrupted) => {
            Ok(command_line::complain(&error.to_string(), ending.exit_code()))
        }
        Err(CompareError::Run { target, source }) => Err(explain(source)).with_context(|| target),
        Err(other) => Err(other.into()),
    }
}

/// Where the JSON result is written.
enum Json {
    Stdout,
    File(File),
}

impl Json {
    fn open(path: &Path) -> Result<Self> {
        if path == Path::new("-") {
            return Ok(Self::Stdout);
        }
        let file = File::create(path).with_context(|| format!("--json {}", path.display()))?;
        Ok(Self::File(file))
    }

    fn write(self, outcomes: &[Outcome]) -> Result<()> {
        let version = concat!("bareblk-", env!("CARGO_PKG_VERSION"));
        let text = serde_json::to_string_pretty(&report(version, SystemTime::now(), outcomes))? + "\n";
        match self {
            Self::Stdout => command_line::print(&text),
            Self::File(mut file) => {
                file.write_all(text.as_bytes()).context("cannot write the result of --json")
            }
        }
    }
}

/// The progress bar, on standard error if that is a terminal.
struct Bar {
    bar: ProgressBar,
    last: Progress,
    rates: String,
}

/// Time between two updates of the rate.
const RATE: Duration = Duration::from_secs(1);

impl Bar {
    fn new() -> Self {
        let bar = ProgressBar::new(RESOLUTION);
        let style = ProgressStyle::with_template("{bar:30} {percent:>3} %  {wide_msg}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        Self { bar, last: Progress::default(), rates: String::new() }
    }

    /// Updates IOPS and MiB/s since the last update.
    fn take_rates(&mut self, progress: &Progress) {
        let time = progress.elapsed.saturating_sub(self.last.elapsed);
        if progress.elapsed < self.last.elapsed
            || progress.ios.iter().sum::<u64>() < self.last.ios.iter().sum()
        {
            // The figures fell, so the next of several runs has begun.
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
