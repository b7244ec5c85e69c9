//! `bareblk completions SHELL`: a script that completes the words of a command line.
//!
//! clap generates the script. The lines in `completions/` are added to it: they complete disk names by asking the
//! server.

use anyhow::Result;
use clap::{Command, ValueEnum};

use crate::second_program;

/// How a line of zsh's script begins if its argument is one disk, and if it is several disks.
const DISK: &str = "':disk -- ";
const DISKS: &str = "'*::disks -- ";
/// The action of an argument that clap cannot complete.
const ZSH_DEFAULT: &str = ":_default";

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

/// The script of `command`. If `bareblk-bench` is installed, it prints the whole script instead, because it also knows
/// the options of its own commands.
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
    let script = String::from_utf8_lossy(&script);
    match shell {
        Shell::Bash => format!("{script}{}", include_str!("completions/disks.bash")),
        Shell::Zsh => with_disks_in_zsh(&script),
        Shell::Fish => format!("{script}{}", include_str!("completions/disks.fish")),
    }
}

/// Makes the completion of disk names the action of each argument that is a disk. The added function must be defined
/// before the script calls its main function.
fn with_disks_in_zsh(script: &str) -> String {
    let names_disks = |line: &str| [DISK, DISKS].iter().any(|begin| line.trim_start().starts_with(begin));
    let with_action = |line: &str| match line.rsplit_once(ZSH_DEFAULT) {
        Some((before, after)) if names_disks(line) => format!("{before}:_bareblk_disks{after}\n"),
        _ => format!("{line}\n"),
    };
    let (first, rest) = script.split_once('\n').unwrap_or((script, ""));
    let rest: String = rest.lines().map(with_action).collect();
    format!("{first}\n{}{rest}", include_str!("completions/disks.zsh"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_argument_that_is_a_disk_gets_its_action_in_zsh() {
        let script = script(crate::command_line::command(), Shell::Zsh);
        // attach, placement, remove, resize, resume, show, slow, flush, pause, stream, commit, reclaim, job; stats.
        assert_eq!(script.matches(":_bareblk_disks").count(), 14, "{script}");
        assert!(script.starts_with("#compdef bareblk\n"));
    }
}
