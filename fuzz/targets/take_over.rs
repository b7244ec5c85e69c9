//! libFuzzer's program for the target `take_over`. Not here: the target (`crates/server/fuzz_targets/src/take_over.rs`).
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fuzz_targets::run("take_over", bytes));
