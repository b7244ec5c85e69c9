//! Compiles C and C++ programs against the header and runs them: the example, and a program that makes every mistake
//! that a lock can detect.
//!
//! See also: the header by itself (`header.rs`), and the correctness of the locks (`qspinlock`'s own tests).
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::path::Path;
use std::process::Command;

use crate::compiler;
use crate::compiler::Compiler;

const EXAMPLE: &str = "examples/counter.c";
const COUNTED: &str = "fair 80000, hybrid 80000\ngave up after 10 ms\n";

fn run(program: &Path) -> String {
    // cargo's own search path contains a folder whose copy of the library may be older than the last change.
    let output = Command::new(program).env_remove("LD_LIBRARY_PATH").output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Compiles the example as `standard`, with the shared and with the static library, and returns both outputs.
fn printed(compiler: &Compiler, standard: &str) -> [String; 2] {
    let folder = tempfile::tempdir().unwrap();
    let shared = run(&compiler.link_shared(standard, EXAMPLE, folder.path()));
    [shared, run(&compiler.link_static(standard, EXAMPLE, folder.path()))]
}

#[test]
fn example_counts_with_either_library_in_each_c() {
    let Some(compiler) = compiler::find() else { return };
    compiler::C
        .iter()
        .for_each(|standard| assert_eq!(printed(&compiler, standard), [COUNTED; 2], "{standard}"));
}

#[test]
fn example_counts_with_either_library_in_each_cpp() {
    let Some(compiler) = compiler::find().filter(Compiler::knows_cpp) else { return };
    compiler::CPP
        .iter()
        .for_each(|standard| assert_eq!(printed(&compiler, standard), [COUNTED; 2], "{standard}"));
}

#[test]
fn mistakes_of_a_program_in_c_end_as_numbers_and_change_nothing() {
    let Some(compiler) = compiler::find() else { return };
    let folder = tempfile::tempdir().unwrap();
    run(&compiler.link_shared("-std=c11", "tests/c/errors.c", folder.path()));
}

#[test]
fn shared_library_shows_the_calls_of_the_header_and_nothing_else() {
    let library = compiler::built("libqspin.so");
    let Ok(listed) = Command::new("nm").args(["-D", "--defined-only"]).arg(library).output() else {
        return xtask::skip::skip(xtask::skip::Reason::NoProgram("nm".into()), "");
    };
    let listed = String::from_utf8(listed.stdout).unwrap();
    let mut shown: Vec<_> = listed.lines().filter_map(|line| line.split_whitespace().last()).collect();
    shown.sort_unstable();
    let header = include_str!("../../include/qspinlock.h");
    let calls = header.lines().filter(|line| !line.starts_with(['/', ' ', '#']) && line.contains('('));
    let name = |line: &'static str| line.split('(').next()?.rsplit([' ', '*']).next();
    let mut declared: Vec<_> = calls.filter_map(name).collect();
    declared.sort_unstable();
    assert!(declared.len() >= 29, "{declared:?}");
    assert_eq!(shown, declared);
}

#[test]
fn shared_library_has_its_major_version_in_its_soname() {
    let library = compiler::built("libqspin.so");
    let Ok(listed) = Command::new("readelf").args(["--dynamic", "--wide"]).arg(library).output() else {
        return xtask::skip::skip(xtask::skip::Reason::NoProgram("readelf".into()), "");
    };
    let listed = String::from_utf8(listed.stdout).unwrap();
    let sonames: Vec<_> = listed.lines().filter(|line| line.contains("(SONAME)")).collect();
    assert!(matches!(sonames[..], [one] if one.ends_with(&format!("[{}]", compiler::SONAME))), "{sonames:?}");
}
