//! The program `bareblk`: serves disk images to virtual machines. A library only so that its inputs can be fuzzed.
//!
//! `arguments → cli.rs → serve.rs | ctl.rs | vmm_args.rs | engines.rs | bench.rs | lab.rs | completions | man.rs → exit code`
//!
//! - Exit codes: 0 success; 1 an error, one line on standard error; 2 wrong usage, likewise; 128 + n: signal n ended a
//!   measurement, or a second signal n ended a stop; 159 the sandbox ended the server.
//!
//! Not here: serving (`blk_server`), images (`disk_image`).
#![forbid(unsafe_code)]

mod cli;

mod args;

mod config;

mod service;

mod engines;

mod helper;

mod serving;

mod control;

mod live_upgrade;

mod logging;

mod signals;

mod ctl;

mod man;

mod vmm_args;

mod bench;

mod lab;

pub mod inputs;

use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::Result;
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};

use crate::args::usage;
use crate::cli::{Cli, Command};
use crate::serving::serve;

/// The program.
#[must_use]
pub fn main() -> ExitCode {
    let result = match Cli::try_parse() {
        Ok(cli) => run(cli.command).map_err(|error| (format!("{error:#}"), exit_code(&error))),
        Err(error) if is_help(&error) => error.exit(),
        Err(error) => {
            let line = usage::line(Cli::command(), &error, std::env::args_os().skip(1));
            Err((line, ExitCode::from(usage::EXIT_CODE)))
        }
    };
    result.unwrap_or_else(complain)
}

/// Options that contradict each other are wrong usage too.
fn exit_code(error: &anyhow::Error) -> ExitCode {
    if error.is::<usage::Contradiction>() || error.is::<usage::Wrong>() {
        ExitCode::from(usage::EXIT_CODE)
    } else {
        ExitCode::FAILURE
    }
}

/// Help or a version, requested or because there are no arguments.
fn is_help(error: &clap::Error) -> bool {
    !error.use_stderr() || error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
}

fn complain((line, code): (String, ExitCode)) -> ExitCode {
    // Not `eprintln!`, which panics when the reader has closed standard error.
    let _ = writeln!(io::stderr(), "bareblk: {line}");
    code
}

fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::Bench(args) => return bench::obey(&args),
        Command::Lab(command) => return lab::obey(command),
        Command::Serve(args) => {
            let (log, cut) = (args.log.clone(), args.take_over_cut.clone());
            let live_upgrade = args.take_over.clone().map(|control| live_upgrade::Wanted { control, cut });
            logging::start(&log)?;
            serve::serve(args.configuration()?, live_upgrade, &log)
        }
        Command::Helper(log) => {
            logging::start(&log)?;
            helper::run()
        }
        Command::Ctl(args) => ctl::obey(args),
        Command::VmmArgs(args) => print(&vmm_args::text(&args)?),
        Command::Engines(args) => print(&engines::text(&args)?),
        Command::Completions { shell } => print(&cli::completions(shell)),
        Command::Man { folder } => man::write(&folder),
    }?;
    Ok(ExitCode::SUCCESS)
}

/// A reader that closes the pipe (`| head`) is no error.
fn print(text: &str) -> Result<()> {
    match io::stdout().write_all(text.as_bytes()).and_then(|()| io::stdout().flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}
