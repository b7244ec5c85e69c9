//! libFuzzer's program for the target `control`. The target is in `crates/server/fuzz_targets/src/control.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fuzz_targets::run("control", bytes));
