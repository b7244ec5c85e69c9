//! `bareblk bench` and `bareblk lab`: replaces this program by `bareblk-bench`, so that a process that serves guests
//! contains no code that only measures.
//!
//! `arguments → bareblk-bench (beside this program, else in PATH) → exec`: signals and exit codes are that program's.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Error, Result, anyhow};
use rustix::fs::{Access, access};

const NAME: &str = "bareblk-bench";
/// The commands of the other program.
pub const COMMANDS: [&str; 2] = ["bench", "lab"];
/// Tells the other program which program started it, as cargo tells its subcommands.
pub const PARENT_ENV: &str = "BAREBLK";

/// Whether these arguments name a command of the other program. That program parses the rest, even `--help`.
pub fn has(words: &[OsString]) -> bool {
    let is_its = |word: Option<&OsString>| word.is_some_and(|word| COMMANDS.iter().any(|its| word == its));
    is_its(words.first()) || words.first().is_some_and(|word| word == "help") && is_its(words.get(1))
}

/// Whether this program documents the command of this name.
pub fn is_not_its(command: &str) -> bool {
    !COMMANDS.contains(&command)
}

/// Replaces this process by the other program, with these arguments.
///
/// # Errors
/// There is no such program, or the kernel cannot start it.
pub fn run(words: &[OsString]) -> Result<ExitCode> {
    let program = find(NAME).ok_or_else(|| missing(words))?;
    Err(replace_with(&program, words))
}

/// Like [`run`], but returns if the other program is not installed.
///
/// # Errors
/// The kernel cannot start it.
pub fn run_if_installed(words: &[OsString]) -> Result<()> {
    find(NAME).map_or(Ok(()), |program| Err(replace_with(&program, words)))
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

fn missing(words: &[OsString]) -> Error {
    let command =
        words.iter().find(|word| *word != "help").map_or_else(String::new, |word| word.display().to_string());
    let folder = std::env::current_exe().ok().and_then(|own| Some(own.parent()?.display().to_string()));
    let folder = folder.unwrap_or_else(|| "this program's folder".to_owned());
    anyhow!(
        "`bareblk {command}` needs the program {NAME}, which is neither in {folder} nor in PATH: install the package \
         {NAME}, or build it with `cargo build --release -p bareblk_bench`"
    )
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

    use super::*;

    fn words(words: &[&str]) -> Vec<OsString> {
        words.iter().map(OsString::from).collect()
    }

    #[test]
    fn its_commands_and_their_help_are_its_own() {
        assert!(has(&words(&["bench", "--help"])) && has(&words(&["lab", "run"])) && has(&words(&["lab"])));
        assert!(has(&words(&["help", "bench"])));
        assert!(!has(&words(&["help"])) && !has(&words(&[])) && !has(&words(&["serve", "bench"])));
        assert!(!has(&words(&["--help", "bench"])));
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
        let line = missing(&words(&["help", "lab"])).to_string();
        assert!(line.starts_with("`bareblk lab` needs the program bareblk-bench"), "{line}");
        assert!(line.contains("install the package bareblk-bench") && !line.contains('\n'), "{line}");
    }
}
