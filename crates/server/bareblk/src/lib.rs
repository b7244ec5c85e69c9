//! The program `bareblk`: serves disk images to virtual machines.
//!
//! `arguments → cli.rs → serve.rs | ctl.rs | vmm_args.rs | engines.rs | image/ | second_program.rs | completions.rs | man.rs → exit code`
//!
//! - Exit codes: 0 success; 1 an error, one line on standard error; 2 wrong usage, likewise; 128 + n: signal n ended a
//!   measurement, or a second signal n ended a stop; 159 the sandbox ended the server. `image check` has those of
//!   `qemu-img check`.
//! - The library has three users: fuzzing (`inputs`) and two other programs, `bareblk-bench` (`command_line`) and
//!   `bareblk-monitor` (also `client`).
#![forbid(unsafe_code)]

mod cli;

mod completions;

mod args;

mod config;

mod service;

mod engines;

mod image;

mod helper;

mod serving;

// docs/reference/control.md describes the verbs and fields.
#[allow(missing_docs)]
mod control;

mod live_upgrade;

mod logging;

mod signals;

mod ctl;

mod man;

mod vmm_args;

mod second_program;

pub mod client;

pub mod command_line;

pub mod inputs;

use std::process::ExitCode;

use anyhow::Result;

use crate::cli::{Cli, Command};
use crate::serving::{check, serve};

/// The program.
#[must_use]
pub fn main() -> ExitCode {
    let words: Vec<_> = std::env::args_os().skip(1).collect();
    if let Some(other) = second_program::of(&words) {
        return command_line::exit_with(other.run(&words));
    }
    command_line::main(|cli: Cli| run(cli.command))
}

/// Ends the process at once if it has reached clusters: the destructors of their libraries do not expect their threads,
/// which still run.
fn end_with_clusters(served: Result<()>) -> Result<()> {
    if rbd_client::is_loaded() {
        let code = match &served {
            Ok(()) => 0,
            Err(error) => {
                let _ = command_line::complain(&format!("{error:#}"), ExitCode::FAILURE);
                1
            }
        };
        signal_hook::low_level::exit(code);
    }
    served
}

fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::Serve(args) => {
            let (log, cut) = (args.log.clone(), args.take_over_cut.clone());
            let live_upgrade = args.take_over.clone().map(|control| live_upgrade::Wanted { control, cut });
            logging::start(&log)?;
            let check = args.check;
            let configuration = args.configuration()?;
            if check {
                return check::check(&configuration);
            }
            end_with_clusters(serve::serve(configuration, live_upgrade, &log))
        }
        Command::Helper(log) => {
            logging::start(&log)?;
            helper::server::run()
        }
        Command::Ctl(args) => return ctl::run(args),
        Command::VmmArgs(args) => command_line::print(&vmm_args::text(&args)?),
        Command::Engines(args) => command_line::print(&engines::text(&args)?),
        Command::Image(args) => return image::run(&args),
        Command::Bench => return second_program::BENCH.run(&["bench".into()]),
        Command::Lab => return second_program::BENCH.run(&["lab".into()]),
        Command::Monitor(_) => {
            return second_program::MONITOR.run(&std::env::args_os().skip(1).collect::<Vec<_>>());
        }
        Command::Completions { shell } => {
            command_line::print(&completions::text(shell, command_line::command())?)
        }
        Command::Man { folder } => {
            man::write(command_line::command(), &folder, second_program::is_documented_here)
        }
    }?;
    Ok(ExitCode::SUCCESS)
}
