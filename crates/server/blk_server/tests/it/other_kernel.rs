//! Runs this program's tests again in one guest with a stock kernel: Linux 6.1 of Debian 12.
//!
//! The disks there are on ext4, on a virtio disk.
#![cfg(target_arch = "x86_64")]
#![allow(missing_docs, clippy::unwrap_used)]

use xtask::guest::{GuestImage, OwnTests};

const FEWEST: usize = 27 + 14;

#[test]
fn requests_and_driver_are_served_on_the_guests_kernel() {
    let image = GuestImage::prepare(|step| eprintln!("{step}")).unwrap();
    let tests = OwnTests::new(&image, env!("CARGO_TARGET_TMPDIR"), "other_kernel::");
    let tests = tests.only("requests::").only("virtio_driver::");
    let passed = tests.run().unwrap_or_else(|error| panic!("{error:#}"));
    println!("{}: {} tests, {:?}", passed.kernel, passed.count, passed.output.wall);
    assert!(passed.count >= FEWEST, "{}", passed.output.console);
    assert!(!passed.output.console.contains("skipped:"), "{}", passed.output.console);
}
