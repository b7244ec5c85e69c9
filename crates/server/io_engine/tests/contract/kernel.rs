//! Tests this kernel's features, and runs the whole suite again on the stock kernel of a guest.
//!
//! The guest runs Debian 12's Linux 6.1, with ext4 on a virtio disk with O_DIRECT, tmpfs, a loop device, and the
//! io_uring of that release. See also: the cases (`cases.rs`).

use io_engine::{EngineConfig, IoUringEngine};
use rustix::fs::{OFlags, fcntl_getfl};

use crate::bed::uring_direct;

/// The major and minor version, read from a text like `6.1.0-18-amd64`.
fn kernel_version() -> (u32, u32) {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().unwrap());
    (numbers.next().unwrap(), numbers.next().unwrap())
}

/// Distributions backport features, so an older kernel may have them too.
#[test]
fn kernel_since_6_1_defers_completions_and_since_6_15_does_not_count_idling_as_iowait() {
    let version = kernel_version();
    let features = IoUringEngine::new(EngineConfig::default()).unwrap().features();
    println!("BB:FEATURES={features}");
    assert!(features.deferred_task_run || version < (6, 1), "{features}");
    assert!(features.no_iowait || version < (6, 15), "{features}");
}

#[test]
fn direct_bed_bypasses_the_page_cache() {
    let Some(bed) = uring_direct() else { return };
    let flags = fcntl_getfl(bed.image.file().unwrap()).unwrap();
    println!("BB:ALIGNMENT={:?}", bed.image.alignment());
    assert!(flags.contains(OFlags::DIRECT), "{flags:?}");
}

#[cfg(target_arch = "x86_64")] // the guest is an x86-64 machine
mod in_a_guest {
    use xtask::guest::{GuestImage, OwnTests, TestsPassed};
    use xtask::sizes::GUEST_RUNS_THREADED_ENGINES;

    /// Beds of engines on threads of their own, and the number of these beds. These engines use only calls that every
    /// supported kernel has, so a smoke run omits them.
    const THREADED: [&str; 2] = ["posix_aio_", "threads_"];
    const THREADED_BEDS: usize = 10;

    /// Minimum number of tests in a run: beds times cases, plus the tests above.
    fn least_tests() -> usize {
        let omitted = if GUEST_RUNS_THREADED_ENGINES.now() { 0 } else { THREADED_BEDS };
        (31 - omitted) * 33 + 2
    }

    /// The guest's tmpfs has no O_DIRECT, which came with Linux 6.6.
    const KNOWN_SKIP: &str = "cannot be opened with O_DIRECT";

    /// Omits the tests on the fake engine and on mapped disks, which make the same calls as other tests, and those of
    /// disks on other machines, which the guest does not reach.
    fn suite_in_a_guest() -> TestsPassed {
        let image = GuestImage::prepare(|step| eprintln!("{step}")).unwrap();
        let tests = OwnTests::new(&image, env!("CARGO_TARGET_TMPDIR"), "in_a_guest");
        let omitted: &[&str] = if GUEST_RUNS_THREADED_ENGINES.now() { &[] } else { &THREADED };
        let tests = omitted.iter().fold(tests, |tests, bed| tests.without(bed));
        let tests = tests
            .without("fake")
            .without("faults::")
            .without("mapped")
            .without("nbd")
            .without("rbd")
            .with_program("losetup")
            .unwrap();
        tests.run().unwrap_or_else(|error| panic!("{error:#}"))
    }

    #[test]
    fn suite_passes_on_the_guests_kernel_with_every_feature_and_every_storage() {
        let passed = suite_in_a_guest();

        let console = &passed.output.console;
        println!("{}: {} tests, {:?}", passed.kernel, passed.count, passed.output.wall);
        assert!(passed.count >= least_tests(), "{console}");
        let features = passed.output.value("FEATURES").unwrap();
        assert!(features.starts_with("task run deferred, 1024 registered files, opcodes restricted: yes"));
        assert!(passed.output.value("ALIGNMENT").is_some(), "no O_DIRECT in the guest: {console}");
        let skipped = console.lines().filter(|line| line.starts_with("skipped:"));
        let unexpected: Vec<&str> = skipped.filter(|line| !line.contains(KNOWN_SKIP)).collect();
        assert!(unexpected.is_empty(), "{unexpected:?}");
    }
}
