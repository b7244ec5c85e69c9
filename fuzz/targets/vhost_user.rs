//! libFuzzer's program for the target `vhost_user`.
//! The target is in `crates/server/fuzz_targets/src/vhost_user.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fuzz_targets::run("vhost_user", bytes));
