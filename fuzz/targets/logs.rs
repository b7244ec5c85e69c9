//! libFuzzer's program for the target `logs`. The target is in `crates/server/fuzz_targets/src/logs.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fuzz_targets::run("logs", bytes));
