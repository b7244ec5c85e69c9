//! libFuzzer's program for the target `chains`. The target is in `crates/server/fuzz_targets/src/chains.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fuzz_targets::run("chains", bytes));
