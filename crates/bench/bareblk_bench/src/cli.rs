//! The command line: the commands `bench` and `lab`, and the generators of completions and manual pages.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use bareblk::command_line::{self, BENCH, BENCH_PROGRAM, LAB, Shell};
use clap::{CommandFactory, Parser, Subcommand};

use crate::bench_args::{self, BenchArgs};
use crate::lab_command::LabCommand;
use crate::{bench, lab_command};

/// Measures virtio disks: the program behind `bareblk bench` and `bareblk lab`.
#[derive(Debug, Parser)]
#[command(name = "bareblk-bench", bin_name = "bareblk", version, max_term_width = 110)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    #[command(about = BENCH, after_help = bench_args::EXAMPLES)]
    Bench(Box<BenchArgs>),
    #[command(about = LAB, subcommand)]
    Lab(LabCommand),
    /// Print a completion script for all commands of `bareblk`
    #[command(hide = true)]
    Completions {
        /// The shell that will run the script
        shell: Shell,
    },
    /// Write the manual pages of `bench` and `lab` into a folder
    #[command(hide = true)]
    Man {
        /// An existing folder
        folder: PathBuf,
    },
}

const COMMANDS: &[&str] = BENCH_PROGRAM.commands;

/// Runs the command.
pub fn execute(cli: Cli) -> Result<ExitCode> {
    match cli.command {
        Command::Bench(args) => return bench::execute(&args),
        Command::Lab(command) => return lab_command::execute(command),
        Command::Completions { shell } => {
            command_line::print(&command_line::completions(whole_command(), shell))
        }
        Command::Man { folder } => {
            command_line::write_manual(whole_command(), &folder, |name| COMMANDS.contains(&name))
        }
    }?;
    Ok(ExitCode::SUCCESS)
}

/// The command line of `bareblk`, with the options of this program's commands.
fn whole_command() -> clap::Command {
    let own = Cli::command();
    COMMANDS.iter().fold(command_line::command(), |whole, name| match own.find_subcommand(name) {
        Some(its) => whole.mut_subcommand(*name, |_| its.clone()),
        None => whole,
    })
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::*;

    #[test]
    fn definition_of_the_command_line_is_consistent() {
        Cli::command().debug_assert();
        whole_command().debug_assert();
    }

    #[test]
    fn reference_page_is_what_the_command_line_says() {
        xtask::cli_page::check("docs/reference/cli-bench.md", Cli::command());
    }

    #[test]
    fn both_programs_have_the_same_commands() {
        let visible = Cli::command().get_subcommands().filter(|its| !its.is_hide_set()).count();
        assert_eq!(visible, COMMANDS.len());
        for name in COMMANDS.iter().copied() {
            let about = |command: clap::Command| {
                command.find_subcommand(name).unwrap().get_about().unwrap().to_string()
            };
            assert_eq!(about(Cli::command()), about(command_line::command()), "{name}");
        }
    }

    #[test]
    fn completions_of_the_whole_have_the_options_of_both_programs() {
        let script = command_line::completions(whole_command(), Shell::Bash);
        for option in ["--lock-timeout", "--iodepth_batch", "--storage", "--interval"] {
            assert!(script.contains(option), "no {option}");
        }
        assert!(!command_line::completions(command_line::command(), Shell::Bash).contains("--storage"));
    }

    #[test]
    fn pages_are_those_of_these_commands_only() {
        let folder = tempfile::tempdir().unwrap();
        command_line::write_manual(whole_command(), folder.path(), |name| COMMANDS.contains(&name)).unwrap();
        let files = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
        let mut files: Vec<_> = files.map(|name| name.into_string().unwrap()).collect();
        files.sort();
        assert_eq!(files, ["bareblk-bench.1", "bareblk-lab-list.1", "bareblk-lab-run.1", "bareblk-lab.1"]);
        let page = std::fs::read_to_string(folder.path().join("bareblk-lab-run.1")).unwrap();
        assert!(page.contains("bareblk lab run") && page.contains("EXAMPLES"), "{page}");
    }

    fn refusal(arguments: &[&str]) -> String {
        let words = std::iter::once("bareblk-bench").chain(arguments.iter().copied());
        let error = Cli::try_parse_from(words).unwrap_err();
        command_line::line(Cli::command(), &error, arguments.iter().map(OsString::from))
    }

    #[test]
    fn unknown_option_of_a_command_with_positionals_is_not_explained_as_a_value() {
        let line = refusal(&["bench", "--refill_buffers"]);
        assert_eq!(line, "unexpected argument '--refill_buffers' found (see bareblk bench --help)");
    }

    #[test]
    fn wrong_option_of_a_nested_command_is_sent_to_the_help_that_has_it() {
        let line = refusal(&["lab", "run", "aio", "--out", "x", "--rounds", "0"]);
        assert!(line.ends_with("(see bareblk lab run --help)"), "{line}");
        let line = refusal(&["lab", "rnu"]);
        assert!(line.ends_with("(see bareblk lab --help)"), "{line}");
    }
}
