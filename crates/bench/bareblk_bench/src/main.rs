//! The program `bareblk-bench`: what `bareblk bench` and `bareblk lab` run.
//!
//! `bareblk bench WORDS → bareblk-bench bench WORDS → cli.rs → bench.rs | lab.rs → exit code`
//!
//! - `bareblk` replaces itself with this program. Usage, errors and exit codes therefore speak of `bareblk`.
//! - Exit codes are those of `bareblk`: 0, 1 an error, 2 wrong usage, 128 + n ended by signal n.
//!
//! Not here: loads (`workload`), experiments (`lab`), how errors are printed (`bareblk::command_line`).
#![forbid(unsafe_code)]

mod bench;
mod bench_args;
mod cli;
mod ending;
mod lab_command;

use std::process::ExitCode;

use bareblk::command_line;

fn main() -> ExitCode {
    command_line::main(cli::obey)
}
