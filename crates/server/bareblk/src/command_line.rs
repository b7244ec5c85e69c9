//! Reads arguments, prints an error as one line and returns an exit code: shared by `bareblk`, `bareblk-bench` and
//! `bareblk-monitor`.

use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::Result;
use clap::error::ErrorKind;
use clap::{Command, CommandFactory, Parser};

use crate::config::config_file::InvalidFile;

pub use crate::args::monitor_args::{ExporterArgs, MonitorCommand, TopArgs};
pub use crate::args::usage::{Contradiction, EXIT_CODE, Wrong, line};
pub use crate::args::values::queue_size;
pub use crate::cli::{BENCH, LAB};
pub use crate::completions::{Shell, script as completions};
use crate::config::config_words::one_line;
pub use crate::man::write as write_manual;
pub use crate::second_program::{BENCH as BENCH_PROGRAM, PARENT_ENV, find as find_program};

/// Parses the process's arguments as `C`, and passes them to `run`.
#[must_use]
pub fn main<C: Parser>(run: impl FnOnce(C) -> Result<ExitCode>) -> ExitCode {
    match C::try_parse() {
        Ok(command_line) => exit_with(run(command_line)),
        Err(error) if is_help(&error) => error.exit(),
        Err(error) => {
            let line = line(C::command(), &error, std::env::args_os().skip(1));
            if let Some(object) = crate::ctl::of_usage(std::env::args_os().skip(1), &line) {
                let _ = print(&format!("{object}\n"));
            }
            complain(&line, ExitCode::from(EXIT_CODE))
        }
    }
}

/// Prints the error, if any. Returns the exit code.
#[must_use]
pub fn exit_with(result: Result<ExitCode>) -> ExitCode {
    result.unwrap_or_else(|error| match error.downcast_ref::<InvalidFile>() {
        // All mistakes of a file at once, each on its own line.
        Some(file @ InvalidFile::Problems { .. }) => {
            complain(&file.lines().join("\nbareblk: "), exit_code(&error))
        }
        _ => complain(&format!("{error:#}"), exit_code(&error)),
    })
}

/// Options that contradict each other count as wrong usage.
fn exit_code(error: &anyhow::Error) -> ExitCode {
    if error.is::<Contradiction>() || error.is::<Wrong>() {
        ExitCode::from(EXIT_CODE)
    } else {
        ExitCode::FAILURE
    }
}

/// Whether the user asked for help or the version, or gave no arguments at all.
fn is_help(error: &clap::Error) -> bool {
    !error.use_stderr() || error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
}

/// Prints an error's line; returns the exit code.
#[must_use]
pub fn complain(line: &str, code: ExitCode) -> ExitCode {
    // A path in the message may contain control characters, which must not reach the terminal. `eprintln!` would panic
    // if standard error is closed.
    let lines: Vec<String> = line.split('\n').map(one_line).collect();
    let _ = writeln!(io::stderr(), "bareblk: {}", lines.join("\n"));
    code
}

/// Prints to standard output. It is not an error if the reader closes it early (`| head`).
///
/// # Errors
/// Standard output cannot be written.
pub fn print(text: &str) -> Result<()> {
    match io::stdout().write_all(text.as_bytes()).and_then(|()| io::stdout().flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

/// The command line of `bareblk`. The commands of [`BENCH_PROGRAM`] have no options here; that program defines them.
#[must_use]
pub fn command() -> Command {
    crate::cli::Cli::command()
}
