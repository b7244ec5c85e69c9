//! The tests of this program again, on the stock kernel of a guest: Linux 6.1 on Debian 12.
//!
//! Disks are on ext4 there, on a virtio disk. Not here: how a guest is made (`xtask::guest`).

use xtask::guest::{GuestImage, OwnTests};

/// All but those whose path contains `but`, the test that asks; at least `least` of them must pass.
pub fn tests_pass(but: &str, least: usize) {
    let image = GuestImage::prepare(|step| eprintln!("{step}")).unwrap();
    let tests = OwnTests::new(&image, env!("CARGO_TARGET_TMPDIR"), but);
    let passed = tests.run().unwrap_or_else(|error| panic!("{error:#}"));
    println!("{}: {} tests, {:?}", passed.kernel, passed.count, passed.output.wall);
    assert!(passed.count >= least, "{}", passed.output.console);
    assert!(!passed.output.console.contains("skipped:"), "{}", passed.output.console);
}
