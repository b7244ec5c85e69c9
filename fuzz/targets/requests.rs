//! libFuzzer's program for the target `requests`. The target is in `crates/server/fuzz_targets/src/requests.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fuzz_targets::run("requests", bytes));
