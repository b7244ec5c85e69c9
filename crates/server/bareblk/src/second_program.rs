//! Runs the commands of two other programs: replaces this program by the other one, so that a process that serves
//! guests contains no code that only measures or displays.
//!
//! `arguments → bareblk-bench or bareblk-monitor (beside this program, else in PATH) → exec`: signals and exit codes are
//! that program's.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Error, Result, anyhow};
use rustix::fs::{Access, access};

/// A program that runs some commands of `bareblk`.
#[derive(Debug)]
pub struct SecondProgram {
    /// Its name.
    pub name: &'static str,
    /// The names of its commands.
    pub commands: &'static [&'static str],
    /// The crate that builds it.
    built_from: &'static str,
    /// The Debian package that contains it.
    package: &'static str,
}

/// The program that measures.
pub const BENCH: SecondProgram = SecondProgram {
    name: "bareblk-bench",
    commands: &["bench", "lab"],
    built_from: "bareblk_bench",
    package: "bareblk-bench",
};
/// The program that shows running servers, to people and to Prometheus. `bareblk` knows the options of these commands, too
/// (`args/monitor_args.rs`).
pub const MONITOR: SecondProgram = SecondProgram {
    name: "bareblk-monitor",
    commands: &["top", "exporter"],
    built_from: "bareblk_monitor",
    package: "bareblk",
};

const ALL: [&SecondProgram; 2] = [&BENCH, &MONITOR];

/// The variable that tells the other program which program started it, as cargo does for its subcommands.
pub const PARENT_ENV: &str = "BAREBLK";

/// The other program that runs the command of these arguments, if one does. It parses the rest, even `--help`.
pub fn of(words: &[OsString]) -> Option<&'static SecondProgram> {
    let is_help = words.first().is_some_and(|word| word == "help");
    let command = words.get(usize::from(is_help))?;
    ALL.into_iter().find(|program| program.commands.iter().any(|its| command == its))
}

/// Whether this program documents the command of this name.
pub fn is_documented_here(command: &str) -> bool {
    !BENCH.commands.contains(&command)
}

impl SecondProgram {
    /// Replaces this process by the program, with these arguments.
    ///
    /// # Errors
    /// There is no such program, or the kernel cannot start it.
    pub fn run(&self, words: &[OsString]) -> Result<ExitCode> {
        let program = find(self.name).ok_or_else(|| self.missing(words))?;
        Err(replace_with(&program, words))
    }

    /// Like [`Self::run`], but returns if the program is not installed.
    ///
    /// # Errors
    /// The kernel cannot start it.
    pub fn run_if_installed(&self, words: &[OsString]) -> Result<()> {
        find(self.name).map_or(Ok(()), |program| Err(replace_with(&program, words)))
    }

    fn missing(&self, words: &[OsString]) -> Error {
        let Self { name, built_from, package, .. } = self;
        let command = words.iter().find(|word| *word != "help");
        let command = command.map_or_else(String::new, |word| word.display().to_string());
        let folder = std::env::current_exe().ok().and_then(|own| Some(own.parent()?.display().to_string()));
        let folder = folder.unwrap_or_else(|| "this program's folder".to_owned());
        anyhow!(
            "`bareblk {command}` needs the program {name}, which is neither in {folder} nor in PATH: install the \
             package {package}, or build it with `cargo build --release -p {built_from}`"
        )
    }
}

fn replace_with(program: &Path, words: &[OsString]) -> Error {
    let mut command = Command::new(program);
    command.args(words);
    if let Ok(own) = std::env::current_exe() {
        command.env(PARENT_ENV, own);
    }
    let error = command.exec();
    Error::new(error).context(format!("cannot start {}", program.display()))
}

/// The program of this name: beside the running one, else in PATH.
#[must_use]
pub fn find(name: &str) -> Option<PathBuf> {
    let own = std::env::current_exe().ok();
    find_in(own.as_deref().and_then(Path::parent), std::env::var_os("PATH").as_deref(), name)
}

fn find_in(beside: Option<&Path>, path: Option<&OsStr>, name: &str) -> Option<PathBuf> {
    let path = path.map(std::env::split_paths).into_iter().flatten();
    // An empty entry of PATH would mean the working directory.
    let folders = beside.map(Path::to_path_buf).into_iter().chain(path.filter(|folder| folder.is_absolute()));
    folders.map(|folder| folder.join(name)).find(|program| is_program(program))
}

fn is_program(path: &Path) -> bool {
    path.is_file() && access(path, Access::EXEC_OK).is_ok()
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    use clap::Subcommand;

    use super::*;
    use crate::args::monitor_args::MonitorCommand;

    const NAME: &str = BENCH.name;

    fn words(words: &[&str]) -> Vec<OsString> {
        words.iter().map(OsString::from).collect()
    }

    #[test]
    fn commands_of_other_programs_and_their_help_are_theirs() {
        let name = |given: &[&str]| of(&words(given)).map(|program| program.name);
        for given in [&["bench", "--help"][..], &["lab", "run"], &["lab"], &["help", "bench"]] {
            assert_eq!(name(given), Some(BENCH.name), "{given:?}");
        }
        assert_eq!((name(&["top", "-x"]), name(&["help", "top"])), (Some(MONITOR.name), Some(MONITOR.name)));
        for given in [&["help"][..], &[], &["serve", "bench"], &["--help", "bench"], &["help", "help", "lab"]]
        {
            assert_eq!(name(given), None, "{given:?}");
        }
    }

    #[test]
    fn program_beside_comes_before_those_in_path_and_needs_the_right_to_run() {
        let place = tempfile::tempdir().unwrap();
        let folder = |name: &str| place.path().join(name);
        for name in ["beside", "first", "second"] {
            fs::create_dir(folder(name)).unwrap();
            fs::write(folder(name).join(NAME), "").unwrap();
        }
        let path = std::env::join_paths([PathBuf::new(), folder("first"), folder("second")]).unwrap();
        let found = || find_in(Some(&folder("beside")), Some(&path), NAME);
        let allow = |name: &str| {
            fs::set_permissions(folder(name).join(NAME), Permissions::from_mode(0o755)).unwrap();
        };
        assert_eq!(found(), None);
        allow("second");
        assert_eq!(found(), Some(folder("second").join(NAME)));
        allow("first");
        assert_eq!(found(), Some(folder("first").join(NAME)));
        allow("beside");
        assert_eq!(found(), Some(folder("beside").join(NAME)));
        assert_eq!(find_in(None, None, NAME), None);
    }

    #[test]
    fn folder_of_that_name_is_no_program() {
        let place = tempfile::tempdir().unwrap();
        fs::create_dir(place.path().join(NAME)).unwrap();
        assert_eq!(find_in(Some(place.path()), None, NAME), None);
    }

    #[test]
    fn missing_program_is_named_with_the_command_and_the_cure() {
        let line = BENCH.missing(&words(&["help", "lab"])).to_string();
        assert!(line.starts_with("`bareblk lab` needs the program bareblk-bench"), "{line}");
        assert!(line.contains("install the package bareblk-bench") && !line.contains('\n'), "{line}");
        let line = MONITOR.missing(&words(&["top"])).to_string();
        assert!(line.starts_with("`bareblk top` needs the program bareblk-monitor"), "{line}");
        assert!(line.contains("install the package bareblk, or"), "{line}");
    }

    #[test]
    fn table_has_the_commands_that_the_options_are_defined_for() {
        let defined = MonitorCommand::augment_subcommands(clap::Command::new("x"));
        let names: Vec<_> = defined.get_subcommands().map(clap::Command::get_name).collect();
        assert_eq!(names, MONITOR.commands);
    }
}
