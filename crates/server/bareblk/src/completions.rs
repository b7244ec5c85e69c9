//! `bareblk completions SHELL`: a script that completes the words of a command line.

use anyhow::Result;
use clap::{Command, ValueEnum};

use crate::second_program;

/// A shell that completes words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Shell {
    /// GNU Bash.
    Bash,
    /// Z shell.
    Zsh,
    /// fish.
    Fish,
}

/// The script of `command`. If `bareblk-bench` is installed, it prints the whole script instead: it knows the options
/// of its commands too.
pub fn text(shell: Shell, command: Command) -> Result<String> {
    let name = shell.to_possible_value().map(|value| value.get_name().to_owned());
    second_program::BENCH.run_if_installed(&["completions".into(), name.unwrap_or_default().into()])?;
    Ok(script(command, shell))
}

/// The script with which `shell` completes the words of `command`.
#[must_use]
pub fn script(mut command: Command, shell: Shell) -> String {
    let generator = match shell {
        Shell::Bash => clap_complete::Shell::Bash,
        Shell::Zsh => clap_complete::Shell::Zsh,
        Shell::Fish => clap_complete::Shell::Fish,
    };
    let mut script = Vec::new();
    clap_complete::generate(generator, &mut command, "bareblk", &mut script);
    String::from_utf8_lossy(&script).into_owned()
}
