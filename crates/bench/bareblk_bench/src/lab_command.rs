//! `bareblk lab`: lists the experiments, runs one, keeps its results.
//!
//! `arguments → lab::find_all → Output (folder) → lab::run (progress bar) → files → table on standard output`
//!
//! - A name may mean several experiments: they run one after another, and each result is kept as soon as it is
//!   complete.
//! - SIGINT or SIGTERM ends the run cleanly: nothing is reported, and temporary files are removed. A second signal ends
//!   it at once (`ending.rs`).

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use bareblk::command_line::{self, PARENT_ENV, Wrong};
use clap::{Args, Subcommand};
use indicatif::{ProgressBar, ProgressStyle};
use lab::{Effort, Experiment, LabError, Output, Progress, Setup, Stop};

use crate::ending::Ending;

/// Steps of the progress bar. It is redrawn only between samples: a drawing thread would be measured too.
const RESOLUTION: u64 = 1000;

#[derive(Debug, Subcommand)]
pub enum LabCommand {
    /// List the experiments and their questions
    List,
    /// Run an experiment and keep its table, plots and report
    #[command(after_help = RUN_EXAMPLES)]
    Run(RunArgs),
}

const RUN_EXAMPLES: &str = "\
Examples:
  bareblk lab run aio --out results --quick
      runs everything once, in under a minute
  bareblk lab run aio --out results --storage /mnt/nvme
      puts the test file on another disk
  bareblk lab run kick --out results
      measures the gain from notifying outside the queue's lock, in under ten minutes
  bareblk lab run qspinlock --out results
      compares the queued locks with others, with more threads than cores

Writes DIR/report.html (on all experiments in DIR), DIR/NAME/result.json (every
sample) and DIR/NAME/*.svg. During the run, test files of up to 1 GiB lie in --storage
and in /dev/shm. Ctrl-C ends the run without results.";

#[derive(Debug, Args)]
pub struct RunArgs {
    /// The experiment's name, from `bareblk lab list`
    pub name: String,

    /// The folder for the results; created if it does not exist
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,

    /// Few and short rounds, only to test that the experiment works
    #[arg(long)]
    pub quick: bool,

    /// Samples of each variant under each workload [default: the experiment's own]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub rounds: Option<u32>,

    /// Length of each sample in seconds [default: the experiment's own]
    #[arg(long, value_name = "S", value_parser = seconds)]
    pub seconds: Option<f64>,

    /// The folder for the test file, on the disk to be measured [default: the results' folder]
    #[arg(long, value_name = "DIR")]
    pub storage: Option<PathBuf>,

    /// A `qemu-img` with libblkio, as an independent client for the experiments `vhost-…` [default: the one in PATH]
    #[arg(long, value_name = "PROGRAM")]
    pub qemu_img: Option<PathBuf>,
}

fn seconds(text: &str) -> Result<f64> {
    let seconds: f64 = text
        .parse()
        .ok()
        .filter(|s: &f64| (0.001..=3600.0).contains(s))
        .context("give a number of seconds from 0.001 to 3600")?;
    Ok(seconds)
}

/// Runs the command.
pub fn execute(command: LabCommand) -> Result<ExitCode> {
    match command {
        LabCommand::List => command_line::print(&list()).map(|()| ExitCode::SUCCESS),
        LabCommand::Run(args) => run(&args),
    }
}

fn list() -> String {
    lab::all().into_iter().map(|experiment| experiment.declaration).fold(
        String::new(),
        |mut text, declaration| {
            let (title, year) = (declaration.source.title, declaration.source.year);
            let _ = writeln!(text, "{:22} {}", declaration.name, declaration.question);
            let _ = writeln!(text, "{:22} from: {title}, {year}", "");
            text
        },
    )
}

fn run(args: &RunArgs) -> Result<ExitCode> {
    let experiments = lab::find_all(&args.name).map_err(|error| Wrong(error.to_string()))?;
    let ending = Ending::catch().context("cannot catch SIGINT and SIGTERM")?;
    let output = Output::prepare(&args.out)?;
    for experiment in experiments {
        match run_one(args, &experiment, &output, Stop::new(ending.flag())) {
            Err(error @ LabError::Interrupted) => {
                return Ok(command_line::complain(&error.to_string(), ending.exit_code()));
            }
            text => command_line::print(&text?)?,
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the text to print.
fn run_one(args: &RunArgs, experiment: &Experiment, output: &Output, stop: Stop) -> Result<String, LabError> {
    let setup = Setup {
        scratch: output.scratch().to_path_buf(),
        storage: args.storage.clone().unwrap_or_else(|| args.out.clone()),
        effort: effort(args, &experiment.declaration),
        program: server(),
        qemu_img: args.qemu_img.clone(),
        stop,
    };
    let mut bar = Bar::new();
    let result = lab::run(experiment, &setup, &command_line(args), args.quick, &mut bar);
    bar.0.finish_and_clear();
    let result = result?;
    let report = lab::write_all(output.folder(), &result)?;
    Ok(format!("{}\nreport: {}\n", lab::table_text(&result), report.display()))
}

/// The program whose servers are measured: the one that started this program, else the one beside it or in PATH.
fn server() -> Option<PathBuf> {
    std::env::var_os(PARENT_ENV).map(PathBuf::from).or_else(|| command_line::find_program("bareblk"))
}

fn effort(args: &RunArgs, declaration: &lab::Declaration) -> Effort {
    let usual = if args.quick { declaration.quick } else { declaration.full };
    Effort {
        rounds: args.rounds.map_or(usual.rounds, |rounds| rounds as usize),
        seconds: args.seconds.unwrap_or(usual.seconds),
        file_bytes: usual.file_bytes,
    }
}

/// The command line that repeats the run.
fn command_line(args: &RunArgs) -> String {
    let mut line = format!("bareblk lab run {} --out {}", args.name, quoted(&args.out));
    if args.quick {
        line += " --quick";
    }
    args.rounds.iter().for_each(|rounds| _ = write!(line, " --rounds {rounds}"));
    args.seconds.iter().for_each(|seconds| _ = write!(line, " --seconds {seconds}"));
    args.storage.iter().for_each(|storage| _ = write!(line, " --storage {}", quoted(storage)));
    args.qemu_img.iter().for_each(|program| _ = write!(line, " --qemu-img {}", quoted(program)));
    line
}

fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    let plain = |letter: char| letter.is_ascii_alphanumeric() || "/._-+=:,@%".contains(letter);
    if !text.is_empty() && text.chars().all(plain) {
        text
    } else {
        format!("'{}'", text.replace('\'', "'\\''"))
    }
}

/// The progress bar, on standard error if that is a terminal.
struct Bar(ProgressBar);

impl Bar {
    fn new() -> Self {
        let bar = ProgressBar::new(RESOLUTION);
        let style = ProgressStyle::with_template("{bar:30} {percent:>3} %  {prefix} {wide_msg}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        Self(bar)
    }
}

impl Progress for Bar {
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // a share of RESOLUTION
    fn preparing(&mut self, what: &str, share: f64) {
        self.0.set_position((share.clamp(0.0, 1.0) * RESOLUTION as f64) as u64);
        self.0.set_message(what.to_owned());
    }

    fn measuring(&mut self, done: usize, total: usize, what: &str) {
        if done == 0 {
            self.0.reset();
            self.0.set_length(total as u64);
        }
        self.0.set_position(done as u64);
        self.0.set_prefix(time_left(self.0.elapsed(), done, total));
        self.0.set_message(what.to_owned());
    }
}

/// Assumes that the coming samples take as long as the previous ones.
fn time_left(elapsed: Duration, done: usize, total: usize) -> String {
    if done == 0 {
        return String::new();
    }
    #[allow(clippy::cast_precision_loss)] // samples of one run
    let left_s = elapsed.as_secs_f64() / done as f64 * total.saturating_sub(done) as f64;
    if left_s < 100.0 { format!("{left_s:.0} s left") } else { format!("{:.0} min left", left_s / 60.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_can_be_pasted_into_a_shell() {
        let args = RunArgs {
            name: "aio".into(),
            out: "a b/it's".into(),
            quick: true,
            rounds: Some(40),
            seconds: Some(0.5),
            storage: Some("/mnt/x".into()),
            qemu_img: Some("./new qemu-img".into()),
        };
        let expected = r"bareblk lab run aio --out 'a b/it'\''s' --quick --rounds 40 --seconds 0.5 --storage /mnt/x --qemu-img './new qemu-img'";
        assert_eq!(command_line(&args), expected);
    }

    #[test]
    fn time_left_is_what_the_rest_takes_at_the_same_pace() {
        assert_eq!(time_left(Duration::from_secs(10), 5, 15), "20 s left");
        assert_eq!(time_left(Duration::from_secs(60), 1, 11), "10 min left");
        assert_eq!(time_left(Duration::ZERO, 0, 15), "");
    }

    #[test]
    fn numbers_given_take_the_place_of_the_experiments_own() {
        let declaration = lab::find("aio").unwrap().declaration;
        let mut args = RunArgs {
            name: "aio".into(),
            out: "x".into(),
            quick: false,
            rounds: None,
            seconds: None,
            storage: None,
            qemu_img: None,
        };
        assert_eq!(effort(&args, &declaration), declaration.full);
        (args.quick, args.rounds) = (true, Some(7));
        assert_eq!(effort(&args, &declaration), Effort { rounds: 7, ..declaration.quick });
    }

    #[test]
    fn lengths_of_samples_outside_the_limits_are_refused() {
        assert!(seconds("0.15").is_ok() && seconds("3600").is_ok());
        assert!(seconds("0").is_err() && seconds("inf").is_err() && seconds("NaN").is_err());
    }
}
