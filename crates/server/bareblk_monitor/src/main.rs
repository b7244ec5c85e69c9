//! The program `bareblk-monitor`: runs the commands for operators whose libraries must stay out of the process that
//! serves guests.
//!
//! `bareblk top ARGUMENTS → bareblk-monitor top ARGUMENTS → top.rs or exporter.rs → exit code`
//!
//! - `bareblk` replaces itself with this program. Usage, errors and exit codes therefore name `bareblk`.
//! - The options are in `bareblk/src/args/monitor_args.rs`, the commands' names in `MONITOR`
//!   (`bareblk/src/second_program.rs`).
#![forbid(unsafe_code)]

mod exporter;
mod labels;
mod limit;
mod top;

use std::process::ExitCode;

use anyhow::Result;
use bareblk::command_line::{self, MonitorCommand};
use clap::Parser;

/// Shows running servers: what `bareblk top` and `bareblk exporter` run.
#[derive(Debug, Parser)]
#[command(name = "bareblk-monitor", bin_name = "bareblk", version, max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: MonitorCommand,
}

fn main() -> ExitCode {
    command_line::main(execute)
}

fn execute(cli: Cli) -> Result<ExitCode> {
    match cli.command {
        MonitorCommand::Top(args) => top::run(&args),
        MonitorCommand::Exporter(args) => exporter::run(args),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn definition_of_the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
