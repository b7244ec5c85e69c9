//! libFuzzer's program for the target `nbd`. The target is in `crates/server/fuzz_targets/src/nbd.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fuzz_targets::run("nbd", bytes));
