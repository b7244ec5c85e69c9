//! Checks that `include/bareblk_driver.h` is what cbindgen generates, and compiles as C and C++ without warnings.
//!
//! To generate it again: `BAREBLK_WRITE_HEADER=1 cargo test -p blk_driver_capi --test it header`
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::fs;
use std::path::Path;

use crate::compiler;

const HEADER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/include/bareblk_driver.h");
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
        "{HEADER} is not up to date, from line {} on; make it again: {WRITE}=1 cargo test -p blk_driver_capi --test it header",
        differing.unwrap_or_else(|| committed.lines().count().min(generated.lines().count())) + 1,
    );
}

#[test]
fn header_compiles_as_c11_and_c17_without_a_warning() {
    let Some(compiler) = compiler::find() else { return };
    for standard in ["-std=c11", "-std=c17"] {
        compiler.check(&["-x", "c", standard], HEADER);
    }
}

#[test]
fn header_compiles_as_cpp_without_a_warning() {
    let Some(compiler) = compiler::find().filter(compiler::Compiler::knows_cpp) else { return };
    for standard in ["-std=c++11", "-std=c++20"] {
        compiler.check(&["-x", "c++", standard], HEADER);
    }
}
