//! libFuzzer's program for the target `config`. The target is in `crates/server/fuzz_targets/src/config.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fuzz_targets::run("config", bytes));
