//! How a test reports that it cannot run on this machine, so that `cargo xtask test` can count it and check the reason.
//!
//! `skip(reason, why) → a line on standard output, and a line of JSON in the file that FILE_ENV names → read`
//!
//! - The reasons are a closed list: `cargo xtask test` has an independent check for each.
//! - Each line is appended by one write, because several tests write at the same time.

use std::fmt;
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};

/// Names the file to which tests append their skips. Without this variable, tests only print their skips.
pub const FILE_ENV: &str = "BAREBLK_SKIPS";

/// What the machine lacks.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reason {
    /// The test runs only with `--long`.
    NotLong,
    /// The test runs only in a guest, where another test of its program starts it.
    NotInAGuest,
    /// The user is not root.
    NotRoot,
    /// The process may use only one CPU.
    OneCpu,
    /// The kernel is older than this major and minor version.
    KernelBefore(u32, u32),
    /// The program is not installed.
    NoProgram(String),
    /// No compiler for `c` or `c++`: the variables CC and CXX may name one.
    NoCompiler(String),
    /// The kernel or the C library does not support the engine.
    NoEngine(String),
    /// The kernel has no landlock.
    NoLandlock,
    /// The process may not attach a loop device.
    NoLoopDevice,
    /// The process may not mount a tmpfs.
    NoTmpfs,
    /// The process may not make and mount an ext4 in a file.
    NoExt4,
    /// The process may not make and mount an XFS in a file.
    NoXfs,
    /// The process may not mount a FUSE file system.
    NoFuse,
    /// The kernel provides no huge pages of 2 MiB.
    NoHugePages,
    /// No huge page of 2 MiB is free.
    NoFreeHugePage,
    /// Files in this folder cannot be opened with `O_DIRECT`.
    NoDirectIo(String),
    /// `O_DIRECT` in this folder accepts buffers at any address.
    NoAlignment(String),
    /// There is no control group version 2 in which the process may make a group.
    NoCgroups,
    /// The process is not in the root control group.
    InOwnCgroup,
    /// `strace` is not installed or not allowed.
    NoStrace,
    /// A program in Python may not trace another program.
    NoPtrace,
    /// `setpriv` cannot take capabilities from root.
    NoSetpriv,
    /// The unprivileged user that tests switch to cannot run programs from the build's folder.
    HiddenFromNobody,
    /// The process may not make a mount namespace of its own and mount in it.
    NoPrivateMounts,
    /// The firmware OVMF is not installed.
    NoOvmf,
    /// `mmdebstrap` cannot make a Debian system, for example without a network.
    NoDebian,
    /// The variable `BAREBLK_CEPH` names no folder in which `cargo xtask ceph up` has started a cluster.
    NoCeph,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self {
            Self::NotLong => "only in the long run (BAREBLK_LONG=1)",
            Self::NotInAGuest => "only in a guest",
            Self::NotRoot => "only for root",
            Self::OneCpu => "this process may use only one CPU",
            Self::KernelBefore(major, minor) => return write!(f, "Linux before {major}.{minor}"),
            Self::NoProgram(program) => return write!(f, "no program {program}"),
            Self::NoCompiler(language) => return write!(f, "no compiler for {language} (CC, CXX)"),
            Self::NoEngine(engine) => return write!(f, "no {engine} on this host"),
            Self::NoLandlock => "no landlock in this kernel",
            Self::NoLoopDevice => "no loop device",
            Self::NoTmpfs => "no right to mount a tmpfs",
            Self::NoExt4 => "no right to mount an ext4",
            Self::NoXfs => "no XFS (mkfs.xfs), or no right to mount it",
            Self::NoFuse => "no FUSE",
            Self::NoHugePages => "no huge pages of 2 MiB",
            Self::NoFreeHugePage => "no free huge page of 2 MiB",
            Self::NoDirectIo(folder) => return write!(f, "no O_DIRECT in {folder}"),
            Self::NoAlignment(folder) => return write!(f, "O_DIRECT requires no alignment in {folder}"),
            Self::NoCgroups => "no right to make control groups of version 2",
            Self::InOwnCgroup => "not in the root control group",
            Self::NoStrace => "no strace",
            Self::NoPtrace => "no ptrace for python3",
            Self::NoSetpriv => "root keeps its capabilities (setpriv)",
            Self::HiddenFromNobody => "the user nobody cannot run programs from the build's folder",
            Self::NoPrivateMounts => "no right to private mounts",
            Self::NoOvmf => "no OVMF",
            Self::NoDebian => "mmdebstrap cannot make a Debian system",
            Self::NoCeph => "no Ceph cluster (BAREBLK_CEPH=FOLDER of `cargo xtask ceph up FOLDER`)",
        };
        f.write_str(text)
    }
}

/// How much of a test did not run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Extent {
    /// The whole test.
    Whole,
    /// One of several cases, which `why` names.
    Part,
}

/// A test that did not run, wholly or in part.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Skip {
    /// What the machine lacks.
    pub reason: Reason,
    /// Package, program and test: `blk_server/memory::huge_pages_work`.
    pub test: String,
    /// How much did not run.
    pub extent: Extent,
    /// The test's explanation; may be empty.
    pub why: String,
}

/// Records that the calling test cannot run here. The test must return next.
///
/// # Panics
/// The file that [`FILE_ENV`] names cannot be written.
pub fn skip(reason: Reason, why: impl fmt::Display) {
    say(reason, Extent::Whole, &why);
}

/// Records that one case of the calling test cannot run here. The other cases run.
///
/// # Panics
/// The file that [`FILE_ENV`] names cannot be written.
pub fn skip_part(reason: Reason, why: impl fmt::Display) {
    say(reason, Extent::Part, &why);
}

fn say(reason: Reason, extent: Extent, why: &dyn fmt::Display) {
    println!("skipped: {reason}: {why}");
    let Some(file) = std::env::var_os(FILE_ENV) else { return };
    let skip = Skip { reason, test: test_name(), extent, why: why.to_string() };
    let kept = append(Path::new(&file), &skip);
    kept.unwrap_or_else(|error| panic!("cannot append to {}: {error}", file.display()));
}

fn append(path: &Path, skip: &Skip) -> io::Result<()> {
    let line = serde_json::to_string(skip)? + "\n";
    File::options().append(true).create(true).open(path)?.write_all(line.as_bytes())
}

/// libtest gives a test's thread the name of the test.
fn test_name() -> String {
    let package = std::env::var("CARGO_PKG_NAME").unwrap_or_default();
    let program = std::env::current_exe().unwrap_or_default();
    let program = program.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let thread = std::thread::current();
    format!("{package}/{}::{}", without_hash(&program), thread.name().unwrap_or("?"))
}

/// cargo adds a hash: `memory-0123456789abcdef` is `memory`.
fn without_hash(program: &str) -> &str {
    let is_hash = |text: &str| text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    program.rsplit_once('-').filter(|(_, end)| is_hash(end)).map_or(program, |(name, _)| name)
}

/// Parses the lines that tests have written. Any other line is an error.
///
/// # Errors
/// The line that is not a [`Skip`].
pub fn read(lines: &str) -> Result<Vec<Skip>, String> {
    let parse = |line| serde_json::from_str(line).map_err(|error| format!("{line:?}: {error}"));
    lines.lines().map(parse).collect()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    const CHILD: &str = "skip::tests::child_skips_a_part_and_then_all_of_it";

    /// Does nothing unless the test below starts it.
    #[test]
    fn child_skips_a_part_and_then_all_of_it() {
        if std::env::var_os("BAREBLK_SKIP_CHILD").is_some() {
            skip_part(Reason::NoEngine("linux-aio".into()), "one\tof \"two\"\n");
            skip(Reason::KernelBefore(6, 12), "");
        }
    }

    #[test]
    fn skips_of_a_test_program_are_in_the_file_with_the_tests_name() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("skips");
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", CHILD]).env(FILE_ENV, &file).env("BAREBLK_SKIP_CHILD", "1");
        child.env("CARGO_PKG_NAME", "here");
        assert!(child.output().unwrap().status.success());
        let skips = read(&std::fs::read_to_string(&file).unwrap()).unwrap();
        let of = |reason, extent, why: &str| Skip {
            reason,
            test: format!("here/xtask::{CHILD}"),
            extent,
            why: why.into(),
        };
        let part = of(Reason::NoEngine("linux-aio".into()), Extent::Part, "one\tof \"two\"\n");
        assert_eq!(skips, [part, of(Reason::KernelBefore(6, 12), Extent::Whole, "")]);
    }

    #[test]
    fn test_fails_if_its_skip_cannot_be_kept() {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", CHILD]).env(FILE_ENV, "/dev/null/skips").env("BAREBLK_SKIP_CHILD", "1");
        let output = child.output().unwrap();
        assert!(!output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    }

    #[test]
    fn reason_that_is_not_in_the_list_is_an_error() {
        let line = r#"{"reason":"no-desire","test":"a/b::c","extent":"whole","why":""}"#;
        assert!(read(line).unwrap_err().contains("no-desire"));
        assert!(read("skipped").is_err());
    }

    #[test]
    fn only_the_hash_that_cargo_appends_is_cut_off() {
        let names = ["memory-0123456789abcdef", "memory", "a-b", "own-tests"].map(without_hash);
        assert_eq!(names, ["memory", "memory", "a-b", "own-tests"]);
    }
}
