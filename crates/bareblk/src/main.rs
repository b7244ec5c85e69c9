//! The program `bareblk`: serves disk images to virtual machines.
//!
//! `arguments → cli.rs → serve.rs | vmm_args.rs | completions → exit code`
//!
//! - Exit codes: 0 all is well; 1 an error, which is one line on standard error; 2 wrong usage; 128 + n the
//!   second signal n ended a stop that took too long.
//!
//! Not here: what serving means (`blk_server`), what an image is (`disk_image`).
#![forbid(unsafe_code)]

mod cli;

mod serve;

mod logging;

mod signals;

mod vmm_args;

use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;

use crate::cli::{Cli, Command};

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Not `eprintln!`, which panics when nobody reads any more.
            let _ = writeln!(io::stderr(), "bareblk: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<()> {
    match command {
        Command::Serve(args) => {
            logging::start(&args.log)?;
            serve::serve(args.configuration()?)
        }
        Command::VmmArgs(args) => print(&vmm_args::text(&args)?),
        Command::Completions { shell } => print(&cli::completions(shell)),
    }
}

/// A reader that has seen enough (`| head`) is no error.
fn print(text: &str) -> Result<()> {
    match io::stdout().write_all(text.as_bytes()).and_then(|()| io::stdout().flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}
