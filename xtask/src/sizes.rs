//! One table with the sizes of the slow checks, as smoke tests and in full.
//!
//! A run with the full sizes takes one to two hours on two cores (77 minutes: `bench_results/2026-11-25-long`).
//!
//! `cargo xtask test --long` sets [`LONG_ENV`] for all programs that it starts. A user may set it for a single test.

use std::time::Duration;

/// If this variable is 1, the checks have their full size.
pub const LONG_ENV: &str = "BAREBLK_LONG";

/// Set to 1 if a test program runs again in a guest (`guest::OwnTests`), where emulation makes it tens of times slower.
pub const EMULATED_ENV: &str = "BAREBLK_EMULATED";

/// Returns `here` if the processor itself runs the tests, as in every run, and `emulated` if they run again in a guest
/// to test its kernel.
#[must_use]
pub fn unless_emulated<T>(here: T, emulated: T) -> T {
    of_env(std::env::var(EMULATED_ENV).ok().as_deref(), here, emulated)
}

fn of_env<T>(set: Option<&str>, unset: T, one: T) -> T {
    if set == Some("1") { one } else { unset }
}

/// A quantity with its two sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size<T> {
    /// The size in every run.
    pub smoke: T,
    /// The size in a long run.
    pub full: T,
}

/// The micro-benchmarks: without `--bench` on their command line, criterion's benches run each case once. Long runs do
/// so as well, because they keep no figures; `cargo xtask bench` measures.
pub const BENCHES: &[&str] = &["cargo", "test", "--workspace", "--all-features", "--bench", "*"];
/// The rings under Miri: the logs that another thread overwrites, or all tests.
pub const MIRI: Size<&[&str]> = size(
    &["rustup", "run", "nightly", "cargo", "miri", "test", "-p", "virtqueue", "--lib", "race"],
    &["rustup", "run", "nightly", "cargo", "miri", "test", "-p", "virtqueue", "--lib", "--tests"],
);
/// The queued locks under Miri. Each seed gives a different order of events.
pub const MIRI_LOCK: Size<&[&str]> = size(
    &miri_lock("MIRIFLAGS=-Zmiri-many-seeds=0..16"), //
    &miri_lock("MIRIFLAGS=-Zmiri-many-seeds=0..64"),
);
/// Models under loom: all interleavings of small ones, and those within a bound on preemptions. `loom.toml` compiles
/// only this workspace's crates for loom, and optimises the code that models run.
pub const LOOM: &[&str] = &[
    "cargo",
    "test",
    "--config=xtask/loom.toml",
    "-p",
    "qspinlock",
    "-p",
    "blk_driver",
    "-p",
    "disk_image",
    "-p",
    "io_engine",
    "-p",
    "blk_server",
    "-p",
    "rbd_client",
    "--lib",
    "model",
];
/// A small selection of mutants of the lock, each of which a check must notice. They run one at a time, which is
/// faster, because each job builds the dependencies. `cargo xtask mutants` runs all of them.
pub const MUTANTS: &[&str] = &["xtask", "mutants", "--smoke", "--jobs", "1"];
/// Fuzzing: checks that programs and seeds exist (the targets run among the tests), or runs libFuzzer on each target.
pub const FUZZ: Size<&[&str]> =
    size(&["xtask", "fuzz", "--check"], &["xtask", "fuzz", "--seconds", "30", "--keep"]);
/// Mutated seeds for each fuzz target without libFuzzer. Some of these inputs run beside a second thread, or with a
/// server that has its own threads (`fuzz_targets/tests/smoke.rs`).
pub const FUZZ_INPUTS: Size<u32> = size(4000, 200_000);
/// Number of good requests beside a ring that another thread overwrites.
pub const RACES: Size<u32> = size(400, 20_000);
/// The limit of a guest's run, enough for emulation on a busy machine: only a guest that hangs takes longer.
pub const GUEST_DEADLINE: Size<Duration> = size(Duration::from_secs(600), Duration::from_secs(1800));
/// Whether the contract of the engines on threads also runs on a guest's kernel.
pub const GUEST_RUNS_THREADED_ENGINES: Size<bool> = size(false, true);
/// Data that each fio job in a guest writes and verifies, in MiB.
pub const VERIFIED_MIB: Size<u64> = size(32, 256);
/// Data that is written and verified with one large block size in a guest, in MiB.
pub const LARGE_BLOCKS_MIB: Size<u64> = size(32, 256);
/// Number of files made in a guest's file system.
pub const FILES: Size<u64> = size(24, 400);
/// Random workloads per engine, cache mode and kind of fault in the durability model.
pub const DURABILITY_SEEDS: Size<u64> = size(2, 16);
/// Random workloads per engine and cache mode of which every prefix is replayed.
pub const POWER_LOSS_SEEDS: Size<u64> = size(3, 16);
/// Times that a server is replaced under a running guest.
pub const RESTARTS: Size<u64> = size(3, 15);
/// Times that a server is killed under a running guest's load.
pub const KILLS: Size<u64> = size(10, 60);
/// Times that a server is killed under the driver library's load, per engine.
pub const SERVER_KILLS: Size<u64> = size(12, 120);
/// Times that a server is killed while queues move or memory is added, and that a front-end is killed.
pub const OTHER_KILLS: Size<u64> = size(3, 16);
/// Times that a server takes over from another under the driver library's load.
pub const TAKE_OVERS: Size<u64> = size(5, 30);
/// Times that daemons of a Ceph cluster are killed or stopped under the driver library's load, per ring format.
pub const CEPH_FAULTS: Size<u32> = size(2, 60);
/// Whether a Ceph cluster is filled and emptied.
pub const CEPH_FILLS: Size<bool> = size(false, true);
/// Whether a guest installs Debian, and boots from it.
pub const INSTALLS_DEBIAN: Size<bool> = size(false, true);
/// Times that the server of a disk elsewhere is killed under a running guest. 0: there is no such guest.
pub const REMOTE_GUEST_FAULTS: Size<u64> = size(0, 20);
/// Stock clients: this machine's QEMU with its defaults, or all QEMUs, firmwares, guest kernels, queue sizes and ring
/// formats, and libvirt.
pub const ALL_CLIENTS: Size<bool> = size(false, true);
/// Times that the server of each disk of a stock client is killed.
pub const CLIENT_KILLS: Size<u64> = size(1, 1);
/// Number of fio runs between two kills.
pub const RUNS_BETWEEN_RESTARTS: Size<u64> = size(1, 2);
/// Times that a running guest moves to another QEMU under load.
pub const MIGRATIONS: Size<u64> = size(2, 6);

/// How long many threads submit to a queue while it is restarted.
pub const RESTART_STRESS: Size<Duration> = size(Duration::from_secs(3), Duration::from_secs(30));

/// How long each part of the locks' torture runs.
pub const TORTURE: Size<Duration> = size(Duration::from_secs(1), Duration::from_secs(30));

const fn size<T: Copy>(smoke: T, full: T) -> Size<T> {
    Size { smoke, full }
}

const fn miri_lock(flags: &'static str) -> [&'static str; 12] {
    [
        "env",
        flags,
        "rustup",
        "run",
        "nightly",
        "cargo",
        "miri",
        "test",
        "-p",
        "qspinlock",
        "--test=it",
        "few_threads",
    ]
}

impl<T: Copy> Size<T> {
    /// The size for this run.
    #[must_use]
    pub fn now(self) -> T {
        self.of(std::env::var(LONG_ENV).ok().as_deref())
    }

    fn of(self, long: Option<&str>) -> T {
        of_env(long, self.smoke, self.full)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_size_is_only_for_those_who_ask_for_it() {
        let taken = [None, Some(""), Some("0"), Some("1")].map(|long| FILES.of(long));
        assert_eq!(taken, [FILES.smoke, FILES.smoke, FILES.smoke, FILES.full]);
    }
}
