//! Compiles C programs unchanged, and runs them under the library that cargo built for this test.
//!
//! Rust links with `cc` too, so a machine without it cannot build these tests, unless its linker has another
//! name: there these tests say so and do nothing.
#![allow(dead_code, missing_debug_implementations, missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const STRICT: &[&str] = &["-Wall", "-Wextra", "-Wshadow", "-Werror", "-O1", "-g", "-pthread"];

/// Compiles `tests/c/<name>.c` and runs it under the library; the program itself reports what is wrong.
pub fn passes(name: &str) {
    passes_with(name, &[]);
}

/// Does the same with the extra compiler flags `flags`.
pub fn passes_with(name: &str, flags: &[&str]) {
    let Some(compiler) = compiler("CC", "cc", "c") else { return };
    run(&compiler, name, "c", &[&["-std=gnu11"], flags].concat());
}

/// Compiles and runs `tests/c/<name>.cpp`.
pub fn passes_in_cpp(name: &str) {
    let Some(compiler) = compiler("CXX", "c++", "c++") else { return };
    run(&compiler, name, "cpp", &["-std=c++17"]);
}

fn run(compiler: &str, name: &str, ending: &str, flags: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let program = compile(compiler, name, ending, flags, folder.path());

    let output = Command::new(program).env("LD_PRELOAD", library()).output().unwrap();

    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.is_empty(), "{name} ended with {}\n{said}", output.status);
}

/// Returns the output of `tests/c/<name>.c` when it runs without the library. `None` if there is no compiler.
pub fn complaint_without(name: &str) -> Option<String> {
    let folder = tempfile::tempdir().unwrap();
    let program = compile(&compiler("CC", "cc", "c")?, name, "c", &["-std=gnu11"], folder.path());
    let output = Command::new(program).env_remove("LD_PRELOAD").output().unwrap();
    Some(String::from_utf8_lossy(&output.stderr).into_owned())
}

fn compile(compiler: &str, name: &str, ending: &str, flags: &[&str], folder: &Path) -> PathBuf {
    let program = folder.join(name);
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c");
    let mut compile = Command::new(compiler);
    compile
        .args(STRICT)
        .args(flags)
        .arg("-o")
        .arg(&program)
        .arg(sources.join(format!("{name}.{ending}")))
        .arg("-ldl");
    let output = compile.output().unwrap();
    assert!(output.status.success(), "{compile:?}\n{}", String::from_utf8_lossy(&output.stderr));
    program
}

/// Returns `None`, with a message, if there is no compiler for the language: C++ may be missing while C is installed.
fn compiler(variable: &str, usual: &str, language: &str) -> Option<String> {
    let program = std::env::var(variable).unwrap_or_else(|_| usual.into());
    let empty = ["-x", language, "-fsyntax-only", "/dev/null"];
    let runs = Command::new(&program).args(empty).stderr(Stdio::null()).status();
    let works = runs.is_ok_and(|status| status.success());
    if !works {
        xtask::skip::skip(xtask::skip::Reason::NoCompiler(language.into()), &program);
    }
    works.then_some(program)
}

/// The library next to the test's own program (`deps`). Only `cargo build` copies it one folder higher, and
/// that copy may be older than the last change.
pub fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let name = "libqspinlock_preload.so";
    let places = test.ancestors().skip(1).take(2).map(|folder| folder.join(name));
    let found = places.clone().find(|place| place.is_file());
    found.unwrap_or_else(|| panic!("cargo has left no library at any of {:?}", places.collect::<Vec<_>>()))
}
