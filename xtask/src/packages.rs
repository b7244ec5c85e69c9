//! The programs that the demo and the tests need, and the Debian packages they come from.
//!
//! A program that exists counts as installed, wherever it came from. So other distributions work once the
//! user has installed the programs. Not here: the guest's kernel, which is only unpacked (`guest/kernel.rs`).

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::command;

/// A Debian package, a program that proves that it is installed, and its purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Package {
    /// The name for `apt-get install`.
    pub name: &'static str,
    /// A program that only this package contains.
    pub program: &'static str,
    /// Shown to the user who is asked whether to install it.
    pub purpose: &'static str,
}

const fn package(name: &'static str, program: &'static str, purpose: &'static str) -> Package {
    Package { name, program, purpose }
}

/// Everything that `cargo xtask demo` and `cargo xtask test` need besides Rust.
pub const NEEDED: &[Package] = &[
    package("qemu-system-x86", "qemu-system-x86_64", "runs the guest"),
    package("qemu-utils", "qemu-img", "a second program that locks images, for the lock tests"),
    package(
        "qemu-system-common",
        "qemu-storage-daemon",
        "a second vhost-user-blk back-end, for the driver's tests",
    ),
    package("fio", "fio", "load and verification, in the guest and on the host"),
    package("busybox-static", "busybox", "the guest's shell and small tools"),
    package("cpio", "cpio", "packs the guest's root file system"),
    package("xz-utils", "xz", "unpacks compressed kernel modules"),
    package("e2fsprogs", "mkfs.ext4", "makes and checks file systems in the guest"),
    package("util-linux", "blkdiscard", "discards blocks in the guest; loop devices on the host"),
    package("valgrind", "valgrind", "counts instructions per request (callgrind)"),
    package("zstd", "zstd", "runs on the preloaded locks, for their tests"),
    package("python3", "python3", "the same, with sqlite"),
    // Not `redis-server`: this package also contains the program, and the other one starts a service.
    package("redis-tools", "redis-check-rdb", "the same"),
    package("stress-ng", "stress-ng", "the same"),
    package("git", "git", "the same"),
];

/// What `cargo xtask test --long` uses beside them.
pub const NEEDED_FOR_LONG: &[Package] = &[
    package("debootstrap", "debootstrap", "a folder with Debian 13's QEMU and libvirt (needs root)"),
    // It has no program: a path is found like one.
    package("ovmf", "/usr/share/OVMF/OVMF_CODE_4M.fd", "UEFI firmware for guests"),
];

/// Programs of root often lie where a user's PATH does not look.
const MORE_PLACES: &[&str] = &["/usr/sbin", "/sbin", "/usr/local/sbin"];

/// The path of `program`, if it is installed.
#[must_use]
pub fn find_program(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let places = std::env::split_paths(&path).chain(MORE_PLACES.iter().map(PathBuf::from));
    places.map(|place| place.join(program)).find(|candidate| candidate.is_file())
}

/// Those of `packages` whose programs are not on this machine.
#[must_use]
pub fn missing(packages: &[&[Package]]) -> Vec<Package> {
    let all = packages.iter().copied().flatten();
    all.copied().filter(|package| find_program(package.program).is_none()).collect()
}

/// Installs `packages`; changes nothing else on the machine.
///
/// # Errors
/// If there is no apt-get, no way to become root, or apt-get fails.
pub fn install(packages: &[Package]) -> Result<()> {
    let names: Vec<&str> = packages.iter().map(|package| package.name).collect();
    if find_program("apt-get").is_none() {
        bail!("no apt-get here; install by hand what Debian calls {}", names.join(", "));
    }
    make_available(&names)?;
    let mut apt = as_root("apt-get")?;
    apt.args(["install", "-y", "--no-install-recommends"]).args(&names);
    command::run(apt.env("DEBIAN_FRONTEND", "noninteractive"))
}

/// Fetches apt's package lists, but only if one of `names` is not in the present ones.
///
/// # Errors
/// If the lists are needed and cannot be fetched.
pub fn make_available(names: &[&str]) -> Result<()> {
    if names.iter().all(|name| has_candidate(name)) { Ok(()) } else { update_lists() }
}

/// Runs `apt-get update`.
///
/// # Errors
/// If there is no way to become root, or apt-get fails.
pub fn update_lists() -> Result<()> {
    command::output(as_root("apt-get")?.args(["update", "-q"])).map(drop)
}

fn has_candidate(name: &str) -> bool {
    let policy = command::output(Command::new("apt-cache").args(["policy", name]).env("LC_ALL", "C"));
    policy.is_ok_and(|text| names_a_candidate(&text))
}

fn names_a_candidate(policy: &str) -> bool {
    let mut candidates = policy.lines().filter_map(|line| line.trim().strip_prefix("Candidate:"));
    candidates.next().is_some_and(|version| version.trim() != "(none)")
}

fn as_root(program: &str) -> Result<Command> {
    if rustix::process::geteuid().is_root() {
        return Ok(Command::new(program));
    }
    let sudo =
        find_program("sudo").with_context(|| format!("`{program}` needs root, and there is no sudo"))?;
    let mut command = Command::new(sudo);
    // sudo clears the environment; apt's front-end must not ask questions.
    command.args(["DEBIAN_FRONTEND=noninteractive", program]);
    Ok(command)
}

/// Whether `path` can be opened for reading and writing, as QEMU would.
#[must_use]
pub fn opens_read_write(path: &Path) -> bool {
    std::fs::File::options().read(true).write(true).open(path).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn program_in_no_place_is_not_found() {
        assert_eq!(find_program("bareblk-no-such-program"), None);
    }

    #[test]
    fn packages_of_all_lists_are_looked_for() {
        let [here, gone] = [package("a", "sh", ""), package("b", "/no/such/file", "")];
        assert_eq!(missing(&[&[here], &[gone]]), [gone]);
    }

    #[test]
    fn shell_is_found() {
        assert!(find_program("sh").is_some());
    }

    #[test]
    fn policy_without_candidate_means_unavailable() {
        assert!(!names_a_candidate("fio:\n  Installed: (none)\n  Candidate: (none)\n"));
        assert!(!names_a_candidate(""));
    }

    #[test]
    fn policy_with_a_version_means_available() {
        assert!(names_a_candidate("fio:\n  Installed: (none)\n  Candidate: 3.33-3\n"));
    }
}
