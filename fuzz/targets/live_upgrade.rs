//! libFuzzer's program for the target `live_upgrade`.
//! The target is in `crates/server/fuzz_targets/src/live_upgrade.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fuzz_targets::run("live_upgrade", bytes));
