//! A copy of the crate, and the checks that run on each mutant: compiler, models, tests, Miri.
//!
//! The first sign of a failure ends a check. So does its time limit, which counts as noticed "by hang".

use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use super::mutant::{CRATE, Mutant};

/// The result for a mutant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Verdict {
    /// A check failed.
    Noticed {
        /// The check's name.
        check: String,
        /// The check's output: the test's name, if it has one.
        how: String,
    },
    /// All checks passed.
    Survived,
}

/// A mutant, and the check that noticed it.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Judged {
    #[serde(flatten)]
    pub(crate) mutant: Mutant,
    pub(crate) verdict: Verdict,
}

impl Verdict {
    /// The verdict in one word.
    pub(crate) fn short(&self) -> &str {
        match self {
            Self::Noticed { check, .. } => check,
            Self::Survived => "SURVIVED",
        }
    }
}

struct Check {
    name: &'static str,
    command: &'static [&'static str],
    env: &'static [(&'static str, &'static str)],
    limit: Duration,
}

impl Check {
    fn is_model(&self) -> bool {
        self.env == LOOM_ENV
    }
}

/// Limits executions instead of time, so that a busy machine notices as many mutants as an idle one.
const LOOM_ENV: &[(&str, &str)] = &[
    ("RUSTFLAGS", "--cfg loom"),
    ("CARGO_PROFILE_TEST_OPT_LEVEL", "3"),
    ("CARGO_PROFILE_DEV_OPT_LEVEL", "3"),
    ("LOOM_MAX_PERMUTATIONS", "20000"),
];

/// The models come first: they end at the first failure, while a test may hang until its limit. Builds before
/// a check do not count against its limit.
const CHECKS: &[Check] = &[
    Check {
        name: "compiler",
        command: &["cargo", "test", "-p", "qspinlock", "--lib", "--no-run", "--target-dir", "target/loom"],
        env: LOOM_ENV,
        limit: Duration::from_secs(600),
    },
    Check {
        name: "loom",
        command: &["cargo", "test", "-p", "qspinlock", "--lib", "--target-dir", "target/loom", "model"],
        env: LOOM_ENV,
        limit: Duration::from_secs(1800),
    },
    Check {
        name: "compiler",
        command: &[
            "cargo",
            "test",
            "-p",
            "qspinlock",
            "--lib",
            "--tests",
            "--no-run",
            "--target-dir",
            "target",
        ],
        env: &[],
        limit: Duration::from_secs(600),
    },
    Check {
        name: "tests",
        command: &["cargo", "test", "-p", "qspinlock", "--lib", "--tests", "--target-dir", "target"],
        env: &[],
        limit: Duration::from_secs(120),
    },
    Check {
        name: "Miri",
        command: &[
            "rustup",
            "run",
            "nightly",
            "cargo",
            "miri",
            "test",
            "-p",
            "qspinlock",
            "--test",
            "it",
            "few_threads",
            "--target-dir",
            "target/miri",
        ],
        env: &[("MIRIFLAGS", "-Zmiri-many-seeds=0..16")],
        limit: Duration::from_secs(600),
    },
];

/// A separate workspace that contains only this crate.
#[derive(Debug)]
pub(super) struct Bench {
    folder: PathBuf,
    original: PathBuf,
}

impl Bench {
    pub(super) fn set_up(root: &Path, folder: &Path) -> Result<Self> {
        fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
        let manifest = fs::read_to_string(root.join("Cargo.toml"))?;
        fs::write(folder.join("Cargo.toml"), alone(&manifest, root)?)?;
        fs::copy(root.join("Cargo.lock"), folder.join("Cargo.lock"))?;
        let bench = Self { folder: folder.to_owned(), original: root.join(CRATE) };
        bench.restore()?;
        Ok(bench)
    }

    /// Restores the unchanged source.
    fn restore(&self) -> Result<()> {
        let copy = self.folder.join(CRATE);
        for inner in ["src", "tests"] {
            // Removes files that the last mutant or an older source added.
            remove_strangers(&self.original.join(inner), &copy.join(inner))?;
        }
        copy_folder(&self.original, &copy)
    }

    /// Fails if the unchanged source does not pass the checks. A smoke run only checks that the source compiles.
    pub(super) fn must_pass_unchanged(&self, is_smoke: bool) -> Result<()> {
        match self.checked(|check| !is_smoke || (check.is_model() && check.name == "compiler"))? {
            Verdict::Survived => Ok(()),
            Verdict::Noticed { check, how } => {
                bail!("{check} fails even without a mutation ({how}); see {}", self.log().display())
            }
        }
    }

    /// Runs the checks on a mutant. A smoke run uses only the models.
    pub(super) fn judge(&self, mutant: &Mutant, is_smoke: bool) -> Result<Verdict> {
        self.restore()?;
        for (path, text) in &mutant.files {
            fs::write(self.folder.join(CRATE).join(path), text)?;
        }
        let verdict = self.checked(|check| !is_smoke || check.is_model())?;
        self.restore()?;
        if mutant.by_hand && verdict.short() == "compiler" {
            bail!("{} does not compile; see {}", mutant.name, self.log().display());
        }
        Ok(verdict)
    }

    fn checked(&self, is_wanted: impl Fn(&Check) -> bool) -> Result<Verdict> {
        for check in CHECKS.iter().filter(|check| is_wanted(check)) {
            if let Some(how) = self.failure(check)? {
                return Ok(Verdict::Noticed { check: check.name.to_owned(), how });
            }
        }
        Ok(Verdict::Survived)
    }

    fn log(&self) -> PathBuf {
        self.folder.join("log.txt")
    }

    fn failure(&self, check: &Check) -> Result<Option<String>> {
        let log = File::create(self.log())?;
        let (program, arguments) = check.command.split_first().context("a check without a program")?;
        let mut command = Command::new(program);
        command.args(arguments).current_dir(&self.folder).envs(check.env.iter().copied());
        // The cargo that runs this program has set this variable for another workspace.
        command
            .env_remove("CARGO_TARGET_DIR")
            .env_remove("BAREBLK_LONG")
            .env_remove(xtask::skip::FILE_ENV)
            .env("RUST_BACKTRACE", "0");
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).process_group(0);
        let mut child = command.spawn().with_context(|| format!("cannot start {program}"))?;
        let failure = self.wait_for_failure(&mut child, check.limit);
        kill_group(&child);
        child.wait()?;
        failure
    }

    fn wait_for_failure(&self, child: &mut Child, limit: Duration) -> Result<Option<String>> {
        let started = Instant::now();
        loop {
            let ended = child.try_wait()?;
            if let Some(how) = failed_test(&String::from_utf8_lossy(&fs::read(self.log())?)) {
                return Ok(Some(how));
            }
            match ended {
                Some(status) if status.success() => return Ok(None),
                Some(status) => return Ok(Some(format!("{status}"))),
                None if started.elapsed() > limit => return Ok(Some("hang".to_owned())),
                None => std::thread::sleep(Duration::from_millis(100)),
            }
        }
    }
}

/// The first failed test, or Miri's error.
fn failed_test(log: &str) -> Option<String> {
    let failed = |line: &str| {
        let test = line.strip_prefix("test ")?.strip_suffix(" ... FAILED")?;
        Some(test.to_owned())
    };
    let undefined = |line: &str| {
        line.strip_prefix("error: ").filter(|rest| rest.starts_with("Undefined")).map(str::to_owned)
    };
    log.lines().find_map(|line| failed(line).or_else(|| undefined(line)))
}

fn kill_group(child: &Child) {
    if let Some(group) = i32::try_from(child.id()).ok().and_then(rustix::process::Pid::from_raw) {
        // Fails if the group has already ended.
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
    }
}

/// The workspace's manifest with this crate as the only member.
fn alone(manifest: &str, root: &Path) -> Result<String> {
    let mut lines = Vec::new();
    for line in manifest.lines() {
        match line {
            _ if line.starts_with("members = ") => lines.push(format!("members = [\"{CRATE}\"]")),
            _ if line.starts_with("default-members = ") => {}
            _ if line.contains("{ path = \"") && !line.contains(CRATE) => {
                lines.push(line.replace("{ path = \"", &format!("{{ path = \"{}/", root.display())));
            }
            _ => lines.push(line.to_owned()),
        }
    }
    if !lines.iter().any(|line| line.contains(CRATE) && line.starts_with("members")) {
        bail!("the workspace's manifest has no line that begins with `members = `");
    }
    Ok(lines.join("\n") + "\n")
}

/// Copies only files that differ: the others keep their times and are not rebuilt.
fn copy_folder(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from).with_context(|| format!("cannot read {}", from.display()))? {
        let entry = entry?;
        let (from, to) = (entry.path(), to.join(entry.file_name()));
        if from.is_dir() {
            copy_folder(&from, &to)?;
        } else if fs::read(&to).ok() != Some(fs::read(&from)?) {
            // A copy would keep the old time, and cargo would not notice that the file has changed back.
            fs::write(&to, fs::read(&from)?)?;
        }
    }
    Ok(())
}

fn remove_strangers(original: &Path, copy: &Path) -> Result<()> {
    let Ok(entries) = fs::read_dir(copy) else { return Ok(()) };
    for entry in entries {
        let entry = entry?;
        let theirs = original.join(entry.file_name());
        if entry.path().is_dir() {
            remove_strangers(&theirs, &entry.path())?;
        } else if !theirs.exists() {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_failed_test_is_named() {
        let log = "test a ... ok\ntest model::two::b ... FAILED\ntest c ... FAILED\n";
        assert_eq!(failed_test(log).as_deref(), Some("model::two::b"));
    }

    #[test]
    fn what_miri_says_counts_as_failure() {
        assert_eq!(failed_test("error: Undefined Behavior: x\n").as_deref(), Some("Undefined Behavior: x"));
        assert_eq!(failed_test("error: could not compile\n"), None);
    }

    #[test]
    fn copy_of_the_workspace_has_one_member_and_absolute_paths() {
        let text = "members = [\"crates/*\", \"xtask\"]\na = { path = \"crates/a\" }\n";
        let alone = alone(text, Path::new("/r")).unwrap();
        assert_eq!(alone, "members = [\"crates/locks/qspinlock\"]\na = { path = \"/r/crates/a\" }\n");
        assert!(super::alone("", Path::new("/r")).is_err());
    }
}
