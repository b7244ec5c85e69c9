//! The step `tests`: builds the workspace's test programs, runs some of them at once, then the documentation's tests.
//!
//! `cargo test --no-run → list of programs → lanes → cargo test --doc`
//!
//! cargo itself runs one program after another, although many mostly wait for a guest or a timer.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result};
use serde_json::Value;
use xtask::programs::BUILT_ENV;
use xtask::workspace;

use super::lanes::{self, BUILD, Done, Job};

/// These programs start first, so that no slow program runs alone at the end. The others follow in cargo's order.
const SLOWEST_FIRST: &[&str] = &[
    "bareblk it",
    "io_engine contract",
    "io_engine lib",
    "blk_server it",
    "blk_server process",
    "xtask lib",
    "blk_driver it",
    "qspinlock_preload it",
    "lab it",
    "qspinlock torture",
];

/// Test programs that run at the same time: most of them wait for guests and timers.
pub(super) const AT_ONCE: usize = 2;

/// Runs the tests of `selection` (`--workspace`, or `-p` and names). None if they do not compile.
/// `prepare` adds the environment that the tests expect.
pub(super) fn run(
    selection: &[String],
    at_once: usize,
    prepare: impl Fn(&mut Command),
) -> Result<Option<Vec<Done>>> {
    let started = Instant::now();
    let Some(mut programs) = build(selection)? else { return Ok(None) };
    programs.sort_by_key(|program| {
        SLOWEST_FIRST.iter().position(|name| *name == program.name).unwrap_or(SLOWEST_FIRST.len())
    });
    println!("built {} test programs in {:.1} s", programs.len(), started.elapsed().as_secs_f64());
    let built = Done::step(BUILD, started.elapsed());
    let folder = output_folder()?;
    println!("at once: {at_once}; output: {}/", folder.display());
    let mut jobs: Vec<Job> = programs.iter().map(|program| program.job(&folder)).collect();
    if programs.iter().any(|program| program.name.ends_with(" lib")) {
        jobs.push(doc_tests(selection, &folder));
    }
    let with_programs = with_programs(&programs);
    jobs.iter_mut().for_each(|job| prepare(job.command.env(BUILT_ENV, &with_programs)));
    let mut done = lanes::run(jobs, at_once)?;
    done.push(built);
    Ok(Some(done))
}

/// The folder for the output of programs and of steps that run beside others.
pub(super) fn output_folder() -> Result<PathBuf> {
    let folder = workspace::build_dir()?.join("test-output");
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    Ok(folder)
}

fn build(selection: &[String]) -> Result<Option<Vec<Program>>> {
    let mut cargo = cargo_test(selection);
    cargo.args(["--no-run", "--message-format=json-render-diagnostics"]);
    let mut child =
        cargo.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().context("cannot start cargo test")?;
    let stdout = child.stdout.take().context("the child process has no standard output")?;
    let mut programs = Vec::new();
    for line in BufReader::new(stdout).lines() {
        programs.extend(serde_json::from_str(&line?).ok().and_then(|message| program(&message)));
    }
    Ok(child.wait()?.success().then_some(programs))
}

/// Names of the packages whose programs cargo has built as well: those with integration tests.
fn with_programs(programs: &[Program]) -> String {
    let packages: BTreeSet<&str> =
        programs.iter().filter(|program| program.is_integration).map(|program| &*program.package).collect();
    packages.into_iter().collect::<Vec<_>>().join(" ")
}

fn cargo_test(selection: &[String]) -> Command {
    let mut cargo = Command::new(workspace::cargo());
    cargo.arg("test").args(selection).current_dir(workspace::root());
    cargo
}

fn doc_tests(selection: &[String], folder: &Path) -> Job {
    let mut command = cargo_test(selection);
    command.args(["--doc", "--no-fail-fast"]);
    Job { name: "(documentation)".into(), command, output: folder.join("documentation.log"), has_many: true }
}

/// A test program that cargo has built.
#[derive(Debug, PartialEq, Eq)]
struct Program {
    /// The crate and the program, such as `blk_server it` or `blk_server lib`.
    name: String,
    package: String,
    manifest: PathBuf,
    executable: PathBuf,
    /// Whether the program is in the package's folder `tests`.
    is_integration: bool,
}

impl Program {
    /// Sets the folder and the variables that cargo sets for the program.
    fn job(&self, folder: &Path) -> Job {
        let home = self.manifest.parent().unwrap_or(Path::new("."));
        let mut command = Command::new(&self.executable);
        command.current_dir(home).env("CARGO_PKG_NAME", &self.package);
        command.env("CARGO_MANIFEST_DIR", home).env("CARGO_MANIFEST_PATH", &self.manifest);
        let output = folder.join(format!("{}.log", self.name.replace(' ', "-")));
        Job { name: self.name.clone(), command, output, has_many: false }
    }
}

/// The program in one of cargo's messages, if it is a test program.
fn program(message: &Value) -> Option<Program> {
    let target = &message["target"];
    let executable = message["executable"].as_str().filter(|_| message["profile"]["test"] == true)?;
    let manifest = PathBuf::from(message["manifest_path"].as_str()?);
    let package = package_name(message["package_id"].as_str()?, &manifest)?;
    let is = |kind: &str| target["kind"].as_array().is_some_and(|kinds| kinds.iter().any(|one| one == kind));
    let own = target["name"].as_str()?;
    let target = match (is("test"), is("bin")) {
        (true, _) => own.to_owned(),
        (_, true) => format!("{own} (program)"),
        _ => "lib".to_owned(),
    };
    let (name, executable) = (format!("{package} {target}"), executable.into());
    Some(Program { name, package, manifest, executable, is_integration: is("test") })
}

/// Parses `path+file:///…/virtqueue#0.1.0`, if the folder has the package's name, or `path+file:///…#name@0.1.0`.
fn package_name(id: &str, manifest: &Path) -> Option<String> {
    let named = id.rsplit_once('#').and_then(|(_, end)| end.split_once('@')).map(|(name, _)| name.to_owned());
    let folder = || Some(manifest.parent()?.file_name()?.to_str()?.to_owned());
    named.or_else(folder)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn message(kind: &str, id: &str) -> Value {
        json!({
            "reason": "compiler-artifact", "package_id": id, "manifest_path": "/ws/crates/a/virtqueue/Cargo.toml",
            "target": {"kind": [kind], "name": "it"}, "profile": {"test": true}, "executable": "/ws/it-0",
        })
    }

    #[test]
    fn program_runs_where_cargo_would_run_it() {
        let program = program(&message("test", "path+file:///ws/crates/a/virtqueue#0.1.0")).unwrap();
        assert_eq!(program.name, "virtqueue it");
        let job = program.job(Path::new("/out"));
        assert_eq!(job.command.get_current_dir(), Some(Path::new("/ws/crates/a/virtqueue")));
        let name = job.command.get_envs().find(|(name, _)| *name == "CARGO_PKG_NAME");
        assert_eq!(name.and_then(|(_, value)| value), Some("virtqueue".as_ref()));
        assert_eq!(job.output, Path::new("/out/virtqueue-it.log"));
    }

    #[test]
    fn name_says_which_kind_of_program_it_is() {
        let name = |kind: &str| program(&message(kind, "path+file:///ws#rings@0.1.0")).unwrap().name;
        assert_eq!(
            [name("lib"), name("cdylib"), name("bin")],
            ["rings lib", "rings lib", "rings it (program)"]
        );
    }

    #[test]
    fn libraries_and_other_messages_are_no_programs() {
        let mut library = message("lib", "path+file:///ws#rings@0.1.0");
        library["executable"] = Value::Null;
        assert_eq!(program(&library), None);
        let mut build_script = message("bin", "path+file:///ws#rings@0.1.0");
        build_script["profile"]["test"] = json!(false);
        assert_eq!(program(&build_script), None);
        assert_eq!(program(&json!({"reason": "build-finished", "success": true})), None);
    }

    #[test]
    fn packages_with_integration_tests_have_their_programs_built() {
        let of = |kind: &str, package: &str| {
            program(&message(kind, &format!("path+file:///ws#{package}@0.1.0"))).unwrap()
        };
        let programs = [of("test", "rings"), of("lib", "rings"), of("bin", "other"), of("test", "a")];
        assert_eq!(with_programs(&programs), "a rings");
    }

    #[test]
    fn slowest_programs_exist() {
        let metadata = workspace::metadata().unwrap();
        let packages = metadata["packages"].as_array().unwrap();
        for slow in SLOWEST_FIRST {
            let (package, target) = slow.split_once(' ').unwrap();
            let package = packages.iter().find(|one| one["name"] == package).unwrap();
            let targets = package["targets"].as_array().unwrap();
            assert!(target == "lib" || targets.iter().any(|one| one["name"] == target), "{slow}");
        }
    }
}
