//! libFuzzer's program for the target `qcow2`. The target is in `crates/server/fuzz_targets/src/qcow2.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fuzz_targets::run("qcow2", bytes));
