//! The program `bareblk-bench`: runs `bareblk bench` and `bareblk lab`.
//!
//! `bareblk bench ARGUMENTS → bareblk-bench bench ARGUMENTS → cli.rs → bench.rs | lab.rs → exit code`
//!
//! - `bareblk` replaces itself with this program. Usage, errors and exit codes therefore name `bareblk`.
//! - Exit codes are those of `bareblk`: 0, 1 an error, 2 wrong usage, 128 + n ended by signal n.
#![forbid(unsafe_code)]

mod bench;
mod bench_args;
mod cli;
mod ending;
mod lab_command;

use std::process::ExitCode;

use bareblk::command_line;

fn main() -> ExitCode {
    command_line::main(cli::execute)
}
