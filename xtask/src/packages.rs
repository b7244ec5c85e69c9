//! The programs that the demo and the tests need, and their Debian packages.
//!
//! A program counts as installed if it exists, however it was installed. So other distributions work once the user has
//! installed the programs.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::command;

/// A Debian package, a program that shows that it is installed, and its purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Package {
    /// The name for `apt-get install`.
    pub name: &'static str,
    /// A program that only this package contains.
    pub program: &'static str,
    /// The package's purpose, shown to the user before the installation.
    pub purpose: &'static str,
    /// Crates whose tests run its programs.
    users: &'static [&'static str],
}

const fn package(
    name: &'static str,
    program: &'static str,
    purpose: &'static str,
    users: &'static [&'static str],
) -> Package {
    Package { name, program, purpose, users }
}

/// Crates whose tests boot guests.
const WITH_GUESTS: &[&str] = &["bareblk", "blk_server", "io_engine", "xtask"];
/// Crates whose tests run other programs on the preloaded locks.
const WITH_PROGRAMS: &[&str] = &["qspinlock_preload"];
/// Crates whose tests need none of the packages.
const WITHOUT: &[&str] = &[
    "blk_driver_capi",
    "ceph_cluster",
    "fuzz_targets",
    "guest_mem",
    "qspinlock",
    "qspinlock_capi",
    "sandbox",
    "virtio_blk",
    "virtqueue",
    "workload",
];

/// Everything that `cargo xtask demo` and `cargo xtask test` need besides Rust.
pub const NEEDED: &[Package] = &[
    package("qemu-system-x86", "qemu-system-x86_64", "runs the guest", WITH_GUESTS),
    package(
        "qemu-utils",
        "qemu-img",
        "a second program that locks images, and an NBD server, for tests",
        &["disk_image", "io_engine", "bareblk", "tls_client"],
    ),
    package(
        "nbdkit",
        "nbdkit",
        "an NBD server with faults, for tests",
        &["io_engine", "bareblk", "tls_client"],
    ),
    package(
        "gnutls-bin",
        "certtool",
        "makes certificates for TLS with NBD servers, for tests",
        &["bareblk", "tls_client"],
    ),
    package(
        "qemu-system-common",
        "qemu-storage-daemon",
        "a second vhost-user-blk back-end, for the driver's tests",
        &["blk_driver"],
    ),
    package("fio", "fio", "load and verification, in the guest and on the host", &["bareblk"]),
    package("busybox-static", "busybox", "the guest's shell and small tools", WITH_GUESTS),
    package("cpio", "cpio", "packs the guest's root file system", WITH_GUESTS),
    package("xz-utils", "xz", "unpacks compressed kernel modules", WITH_GUESTS),
    package("e2fsprogs", "mkfs.ext4", "makes and checks file systems in the guest", WITH_GUESTS),
    package(
        "util-linux",
        "blkdiscard",
        "discards blocks in the guest; loop devices on the host",
        &["bareblk", "blk_server", "disk_image", "io_engine", "xtask"],
    ),
    package("valgrind", "valgrind", "counts instructions per request (callgrind)", &["blk_server"]),
    package("zstd", "zstd", "runs on the preloaded locks, for their tests", WITH_PROGRAMS),
    package(
        "python3",
        "python3",
        "runs sqlite on the preloaded locks, for their tests",
        &["bareblk", "qspinlock_preload"],
    ),
    // Not `redis-server`, which starts a service: `redis-tools` contains the program as well.
    package("redis-tools", "redis-check-rdb", "runs on the preloaded locks, for their tests", WITH_PROGRAMS),
    package("stress-ng", "stress-ng", "runs on the preloaded locks, for their tests", WITH_PROGRAMS),
    package("git", "git", "runs on the preloaded locks, for their tests", WITH_PROGRAMS),
    package("tmux", "tmux", "a terminal for the tests of `bareblk top`", &["bareblk_monitor"]),
];

/// The packages that `cargo xtask test --long` needs in addition.
pub const NEEDED_FOR_LONG: &[Package] = &[
    package(
        "debootstrap",
        "debootstrap",
        "a folder with Debian 13's QEMU and libvirt (needs root)",
        &["bareblk"],
    ),
    // The package has no program, so the path of one of its files is given instead.
    package("ovmf", "/usr/share/OVMF/OVMF_CODE_4M.fd", "UEFI firmware for guests", &["bareblk"]),
];

/// The package that `cargo xtask demo --ceph` needs in addition. It has no program.
pub const NEEDED_FOR_CEPH: &[Package] = &[package(
    "librbd1",
    "/usr/lib/x86_64-linux-gnu/librbd.so.1",
    "Ceph's client library, which bareblk loads for disks in Ceph clusters",
    &[],
)];

/// The packages of [`NEEDED`] that the tests of these crates use; no crate means all crates.
#[must_use]
pub fn used_by_tests(crates: &[String]) -> Vec<Package> {
    let is_known =
        |name: &str| WITHOUT.contains(&name) || NEEDED.iter().any(|package| package.is_used_by(name));
    // A crate that is in no list may use all packages.
    if crates.is_empty() || crates.iter().any(|name| !is_known(name)) {
        return NEEDED.iter().copied().filter(|package| !package.users.is_empty()).collect();
    }
    let is_used = |package: &Package| crates.iter().any(|name| package.is_used_by(name));
    NEEDED.iter().copied().filter(is_used).collect()
}

impl Package {
    fn is_used_by(&self, name: &str) -> bool {
        self.users.contains(&name)
    }
}

/// Folders with root's programs, which a user's PATH often lacks.
const MORE_PLACES: &[&str] = &["/usr/sbin", "/sbin", "/usr/local/sbin"];

/// The path of `program`, if it is installed.
#[must_use]
pub fn find_program(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let places = std::env::split_paths(&path).chain(MORE_PLACES.iter().map(PathBuf::from));
    places.map(|place| place.join(program)).find(|candidate| candidate.is_file())
}

/// The packages whose programs are not on this machine.
#[must_use]
pub fn missing(packages: &[&[Package]]) -> Vec<Package> {
    let all = packages.iter().copied().flatten();
    all.copied().filter(|package| find_program(package.program).is_none()).collect()
}

/// Installs `packages`, and changes nothing else on the machine.
///
/// # Errors
/// There is no apt-get or no way to become root, or apt-get fails.
pub fn install(packages: &[Package]) -> Result<()> {
    let names: Vec<&str> = packages.iter().map(|package| package.name).collect();
    if find_program("apt-get").is_none() {
        bail!(
            "apt-get is not installed: install the equivalents of these Debian packages: {}",
            names.join(", ")
        );
    }
    make_available(&names)?;
    let mut apt = as_root("apt-get")?;
    apt.args(["install", "-y", "--no-install-recommends"]).args(&names);
    command::run(apt.env("DEBIAN_FRONTEND", "noninteractive"))
}

/// Fetches apt's package lists, but only if the present ones lack one of `names`.
///
/// # Errors
/// The lists are needed and cannot be fetched.
pub fn make_available(names: &[&str]) -> Result<()> {
    if names.iter().all(|name| has_candidate(name)) { Ok(()) } else { update_lists() }
}

/// Runs `apt-get update`.
///
/// # Errors
/// There is no way to become root, or apt-get fails.
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
        find_program("sudo").with_context(|| format!("`{program}` needs root, and sudo is not installed"))?;
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
        let [here, gone] = [package("a", "sh", "", &[]), package("b", "/no/such/file", "", &[])];
        assert_eq!(missing(&[&[here], &[gone]]), [gone]);
    }

    #[test]
    fn crate_in_no_list_may_use_every_package_of_tests() {
        let names = |crates: &[&str]| {
            let crates: Vec<String> = crates.iter().map(|name| (*name).to_owned()).collect();
            used_by_tests(&crates).iter().map(|package| package.name).collect::<Vec<_>>()
        };
        assert_eq!(names(&["new_crate", "virtqueue"]), names(&[]));
        assert_eq!(names(&["disk_image", "virtqueue"]), ["qemu-utils", "util-linux"]);
        assert!(names(&["virtqueue"]).is_empty());
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
