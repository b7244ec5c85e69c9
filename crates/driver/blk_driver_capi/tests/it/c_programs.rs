//! Programs in C, compiled against the header and run against a server: the example, and one that makes every mistake.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::path::Path;
use std::process::{Command, Output};

use crate::compiler;
use crate::server::Disk;

const EXAMPLE: &str = "examples/read_write.c";

fn run(program: &Path, disk: &Disk) -> Output {
    let output = Command::new(program).arg(&disk.socket).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    output
}

/// `pattern` of the example.
fn pattern() -> Vec<u8> {
    (0..64 << 10_usize).map(|at: usize| (at * 7 + at / 4096).to_le_bytes()[0]).collect()
}

#[test]
fn example_with_the_shared_library_reads_back_what_it_wrote_and_the_image_has_it() {
    let Some(compiler) = compiler::find() else { return };
    let disk = Disk::serve();
    let example = compiler.link_shared(EXAMPLE, disk.folder.path());
    let output = run(&example, &disk);
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        "32768 sectors, blocks of 512 bytes\n65536 bytes written and read back\n"
    );
    assert!(disk.bytes(0, 64 << 10) == pattern());
}

#[test]
fn example_with_the_library_inside_does_the_same() {
    let Some(compiler) = compiler::find() else { return };
    let disk = Disk::serve();
    let example = compiler.link_static(EXAMPLE, disk.folder.path());
    run(&example, &disk);
    assert!(disk.bytes(0, 64 << 10) == pattern());
}

#[test]
fn mistakes_of_a_program_in_c_end_as_codes_and_texts() {
    let Some(compiler) = compiler::find() else { return };
    let disk = Disk::serve();
    let program = compiler.link_shared("tests/c/errors.c", disk.folder.path());
    run(&program, &disk);
}

#[test]
fn shared_library_shows_the_calls_of_the_header_and_nothing_else() {
    let library = compiler::built("libbareblk_driver.so");
    let Ok(listed) = Command::new("nm").args(["-D", "--defined-only"]).arg(library).output() else {
        return xtask::skip::skip(xtask::skip::Reason::NoProgram("nm".into()), "");
    };
    let listed = String::from_utf8(listed.stdout).unwrap();
    let mut shown: Vec<_> = listed.lines().filter_map(|line| line.split_whitespace().last()).collect();
    shown.sort_unstable();
    let header = include_str!("../../include/bareblk_driver.h");
    let calls = header.lines().filter(|line| !line.starts_with(['/', ' ', '#', 't']) && line.contains('('));
    let name = |line: &'static str| line.split('(').next()?.rsplit([' ', '*']).next();
    let mut declared: Vec<_> = calls.filter_map(name).collect();
    declared.sort_unstable();
    assert!(declared.len() > 40, "{declared:?}");
    assert_eq!(shown, declared);
}

#[test]
fn shared_library_has_its_major_version_in_its_soname() {
    let library = compiler::built("libbareblk_driver.so");
    let Ok(listed) = Command::new("readelf").args(["--dynamic", "--wide"]).arg(library).output() else {
        return xtask::skip::skip(xtask::skip::Reason::NoProgram("readelf".into()), "");
    };
    let listed = String::from_utf8(listed.stdout).unwrap();
    let sonames: Vec<_> = listed.lines().filter(|line| line.contains("(SONAME)")).collect();
    assert!(matches!(sonames[..], [one] if one.ends_with(&format!("[{}]", compiler::SONAME))), "{sonames:?}");
}
