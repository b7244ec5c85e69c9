//! Builds programs of other crates for a test: for a test, cargo builds only the programs of the test's own crate.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::time::SystemTime;

use crate::{command, workspace};

/// Packages whose programs cargo has just built: their names, with blanks between them. Cargo writes no list of sources
/// for a program that it builds for tests, so the program's age is no indication.
pub const BUILT_ENV: &str = "BAREBLK_BUILT";

/// The programs that this process has already checked.
static READY: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// The program `name` of the crate `package`, in the folder of `own`, which cargo built. Builds it if it is missing or
/// older than its sources.
///
/// # Panics
/// cargo cannot build it.
#[must_use]
pub fn beside(own: &Path, package: &str, name: &str) -> PathBuf {
    let program = own.with_file_name(name);
    let mut ready = READY.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if !ready.contains(&program) {
        let is_built = names(std::env::var(BUILT_ENV).ok().as_deref(), package) && program.exists();
        if !is_built && !is_fresh(&program) {
            build(own, package);
        }
        ready.push(program.clone());
    }
    program
}

fn names(built: Option<&str>, package: &str) -> bool {
    built.is_some_and(|built| built.split(' ').any(|name| name == package))
}

/// Whether no source is newer than the program, according to the dependency file that cargo writes beside the program.
fn is_fresh(program: &Path) -> bool {
    let built = modified(program);
    let sources = fs::read_to_string(program.with_extension("d")).unwrap_or_default();
    let sources = sources_in(&sources);
    !sources.is_empty()
        && sources.iter().all(|source| modified(source).is_some_and(|time| Some(time) <= built))
}

fn modified(path: &Path) -> Option<SystemTime> {
    fs::metadata(path).and_then(|about| about.modified()).ok()
}

/// Parses `target: source source …`, in which `\ ` stands for a space.
fn sources_in(list: &str) -> Vec<PathBuf> {
    let sources =
        list.lines().next().and_then(|line| line.split_once(": ")).map_or("", |(_, sources)| sources);
    let sources = sources.replace("\\ ", "\0");
    sources.split_whitespace().map(|source| PathBuf::from(source.replace('\0', " "))).collect()
}

/// Builds the package's programs into the folder of `own`, with the same profile.
#[allow(clippy::panic)] // only tests call it
fn build(own: &Path, package: &str) {
    let folder = own.parent().unwrap_or(own);
    let profile = match folder.file_name().and_then(|name| name.to_str()) {
        Some("debug") | None => "dev",
        Some(profile) => profile,
    };
    let mut cargo = Command::new(workspace::cargo());
    cargo.args(["build", "--quiet", "--package", package, "--profile", profile, "--target-dir"]);
    cargo.arg(folder.parent().unwrap_or(folder)).current_dir(workspace::root());
    if let Err(error) = command::output(&mut cargo) {
        panic!("{package} does not build: {error:#}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_of_sources_may_have_blanks_in_names() {
        let list = "/t/debug/x: /a/b.rs /a/c\\ d.rs\n\n/a/b.rs:\n";
        assert_eq!(sources_in(list), [Path::new("/a/b.rs"), Path::new("/a/c d.rs")]);
        assert!(sources_in("").is_empty());
    }

    #[test]
    fn only_whole_names_of_packages_count_as_built() {
        assert!(names(Some("bareblk bareblk_bench"), "bareblk_bench"));
        assert!(!names(Some("bareblk_bench"), "bareblk") && !names(None, "bareblk"));
    }

    #[test]
    fn program_is_fresh_until_a_source_is_newer_or_gone() {
        let place = tempfile::tempdir().unwrap();
        let (program, source) = (place.path().join("x"), place.path().join("s.rs"));
        fs::write(&source, "").unwrap();
        assert!(!is_fresh(&program), "there is none");
        fs::write(&program, "").unwrap();
        assert!(!is_fresh(&program), "its sources are unknown");
        fs::write(place.path().join("x.d"), format!("x: {}\n", source.display())).unwrap();
        assert!(is_fresh(&program));
        let later = SystemTime::now() + std::time::Duration::from_secs(10);
        fs::File::options().append(true).open(&source).unwrap().set_modified(later).unwrap();
        assert!(!is_fresh(&program));
        fs::remove_file(&source).unwrap();
        assert!(!is_fresh(&program));
    }
}
