//! Tests that `include/qspinlock.h` matches the output of cbindgen, and that C and C++ compilers accept it without a
//! warning.
//!
//! To generate the header again: `BAREBLK_WRITE_HEADER=1 cargo test -p qspinlock_capi --test it header`
//!
//! See also: programs that use it (`c_programs.rs`).
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::fs;
use std::path::Path;

use crate::compiler;

const HEADER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/include/qspinlock.h");
const WRITE: &str = "BAREBLK_WRITE_HEADER";

fn generated() -> String {
    let manifest_dir = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(manifest_dir.join("cbindgen.toml")).unwrap();
    let mut bytes = Vec::new();
    cbindgen::generate_with_config(manifest_dir, config).unwrap().write(&mut bytes);
    String::from_utf8(bytes).unwrap()
}

#[test]
fn committed_header_is_what_the_sources_say() {
    let generated = generated();
    if std::env::var_os(WRITE).is_some() {
        fs::write(HEADER, &generated).unwrap();
    }
    let committed = fs::read_to_string(HEADER).unwrap_or_default();
    let differing = committed.lines().zip(generated.lines()).position(|(ours, new)| ours != new);
    assert!(
        committed == generated,
        "{HEADER} is not up to date, from line {} on; make it again: {WRITE}=1 cargo test -p qspinlock_capi --test it header",
        differing.unwrap_or_else(|| committed.lines().count().min(generated.lines().count())) + 1,
    );
}

/// Returns the lines of a file with the names of its kind of lock replaced, without the lines that describe that kind.
fn shape(source: &str, c_name: &str, policy: &str) -> Vec<String> {
    let says_kind = |line: &&str| line.starts_with("//! `qspin_") || line.starts_with("/// A lock that");
    let lines = source.lines().filter(|line| !says_kind(line));
    lines.map(|line| line.replace(c_name, "KIND").replace(policy, "POLICY")).collect()
}

#[test]
fn kinds_are_alike() {
    let fair = shape(include_str!("../../src/fair.rs"), "qspin_fair_", "qspinlock::Fair");
    assert!(fair.len() > 80);
    assert_eq!(fair, shape(include_str!("../../src/fifo.rs"), "qspin_fifo_", "qspinlock::Fifo"));
    assert_eq!(fair, shape(include_str!("../../src/hybrid.rs"), "qspin_hybrid_", "qspinlock::Hybrid"));
    assert_eq!(fair, shape(include_str!("../../src/native.rs"), "qspin_native_", "qspinlock::Native"));
}

#[test]
fn header_compiles_as_c_without_a_warning() {
    let Some(compiler) = compiler::find() else { return };
    compiler::C.iter().for_each(|standard| compiler.check(standard, HEADER));
}

#[test]
fn header_compiles_as_cpp_without_a_warning() {
    let Some(compiler) = compiler::find().filter(compiler::Compiler::knows_cpp) else { return };
    compiler::CPP.iter().for_each(|standard| compiler.check(standard, HEADER));
}
