//! libFuzzer's program for the target `vhost_user`. See also: the target
//! (`crates/server/fuzz_targets/src/vhost_user.rs`).
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fuzz_targets::run("vhost_user", bytes));
