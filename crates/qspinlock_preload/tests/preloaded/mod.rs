//! Programs in C, compiled as they are and run under the library that cargo built for this test.
//!
//! Rust links by `cc` too, so where there is none there are no tests either, but for machines with a linker of another
//! name: there these tests say so and do nothing.
#![allow(dead_code, missing_debug_implementations, missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const STRICT: &[&str] = &["-Wall", "-Wextra", "-Wshadow", "-Werror", "-std=gnu11", "-O1", "-g", "-pthread"];

/// Compiles `tests/c/<name>.c` and runs it under the library; it says itself what is wrong.
pub fn passes(name: &str) {
    passes_with(name, &[]);
}

/// The same, compiled with `flags` as well.
pub fn passes_with(name: &str, flags: &[&str]) {
    let Some(compiler) = compiler() else { return };
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join(name);
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c");
    let mut compile = Command::new(compiler);
    compile
        .args(STRICT)
        .args(flags)
        .arg("-o")
        .arg(&program)
        .arg(sources.join(format!("{name}.c")))
        .arg("-ldl");
    let output = compile.output().unwrap();
    assert!(output.status.success(), "{compile:?}\n{}", String::from_utf8_lossy(&output.stderr));

    let output = Command::new(program).env("LD_PRELOAD", library()).output().unwrap();

    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.is_empty(), "{name} ended with {}\n{said}", output.status);
}

/// `None`, and a word about it, if there is no compiler.
fn compiler() -> Option<String> {
    let program = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let runs = Command::new(&program).arg("--version").stdout(Stdio::null()).status().is_ok();
    if !runs {
        eprintln!("skipped: there is no C compiler ({program}; the variable CC may name another)");
    }
    runs.then_some(program)
}

/// Beside the test's own program (`deps`); only `cargo build` puts it one folder higher, where it may be from before the
/// last change.
pub fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let name = "libqspinlock_preload.so";
    let places = test.ancestors().skip(1).take(2).map(|folder| folder.join(name));
    let found = places.clone().find(|place| place.is_file());
    found.unwrap_or_else(|| panic!("cargo has left no library at any of {:?}", places.collect::<Vec<_>>()))
}
