//! `bareblk` and `bareblk-bench` together: what the first passes to the second, and what it does without the second.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use crate::rig::{
    Place, assert_says, bareblk, bench, bench_program, eventually, output, refusal, wrong_usage,
};

/// The first program alone in a folder, with an empty PATH.
fn alone(place: &Place) -> Command {
    let program = place.path("bareblk");
    fs::copy(bareblk().get_program(), &program).unwrap();
    let mut command = Command::new(program);
    command.env("PATH", place.path("")).stdin(Stdio::null());
    command
}

#[test]
fn without_the_second_program_one_line_says_what_to_install() {
    let place = Place::new();
    for words in [&["bench", "--help"][..], &["lab", "list"], &["help", "lab"], &["bench"]] {
        let mut command = alone(&place);
        command.args(words);
        assert_says(
            &refusal(command),
            &["needs the program bareblk-bench", "install the package bareblk-bench"],
        );
    }
    let mut command = alone(&place);
    command.arg("--help");
    assert_says(&output(command), &["\n  bench ", "\n  lab "]);
}

#[test]
fn second_program_is_found_beside_the_first_and_then_in_path() {
    let place = Place::new();
    let script = |folder: PathBuf, word: &str| {
        fs::create_dir_all(&folder).unwrap();
        let path = folder.join("bareblk-bench");
        fs::write(&path, format!("#!/bin/sh\necho {word} \"$@\"\n")).unwrap();
        fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    };
    let run = || {
        let mut command = alone(&place);
        command
            .env("PATH", format!("{}:/usr/bin:/bin", place.path("path").display()))
            .args(["lab", "--", "-x", ""]);
        output(command)
    };
    script(place.path("path"), "path");
    assert_eq!(run(), "path lab -- -x \n");
    script(place.path(""), "beside");
    assert_eq!(run(), "beside lab -- -x \n");
}

#[test]
fn second_program_that_cannot_start_is_named() {
    let place = Place::new();
    let broken = place.path("bareblk-bench");
    fs::write(&broken, "#!/no/such/interpreter\n").unwrap();
    fs::set_permissions(&broken, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let mut command = alone(&place);
    command.arg("bench");
    assert_says(&refusal(command), &["cannot start ", "bareblk-bench: ", "No such file or directory"]);
}

#[test]
fn second_program_takes_the_place_of_the_first_process() {
    let place = Place::new();
    let file = place.image("disk.raw", 1 << 20);
    let mut command = bench();
    command.arg("--file").arg(&file).args(["--rw=randread", "--runtime=300"]);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let program = format!("/proc/{}/exe", child.id());
    eventually("it is the second program", || {
        (fs::read_link(&program).ok()? == bench_program().canonicalize().unwrap()).then_some(())
    });
    // A signal that the program does not catch.
    kill_process(Pid::from_child(&child), Signal::USR2).unwrap();
    let status = child.wait().unwrap();
    assert_eq!(status.signal(), Some(Signal::USR2.as_raw()), "{status}");
}

#[test]
fn help_and_usage_speak_of_the_first_program() {
    for words in [["bench", "--help"], ["help", "bench"]] {
        let mut command = bareblk();
        command.args(words);
        assert_says(&output(command), &["Usage: bareblk bench [OPTIONS]", "--iodepth_batch", "Exit codes:"]);
    }
    let mut command = bareblk();
    command.args(["lab", "run", "aio", "--rounds", "1"]);
    assert_says(&wrong_usage(command), &["--out <DIR>", "(see bareblk lab run --help)"]);
}

#[test]
fn second_program_on_its_own_says_what_it_is() {
    let mut command = Command::new(bench_program());
    command.arg("--version");
    assert_eq!(output(command), concat!("bareblk-bench ", env!("CARGO_PKG_VERSION"), "\n"));
    let mut command = Command::new(bench_program());
    command.args(["lab", "list"]);
    assert_says(&output(command), &["aio"]);
    let run = assert_cmd::Command::new(bench_program()).assert().code(2);
    assert_says(
        &String::from_utf8_lossy(&run.get_output().stderr),
        &["Usage: bareblk <COMMAND>", "bench", "lab"],
    );
}

#[test]
fn completions_have_the_options_of_both_programs() {
    let completions = |mut command: Command| {
        command.args(["completions", "bash"]);
        output(command)
    };
    assert_says(&completions(bareblk()), &["--lock-timeout", "--iodepth_batch", "--storage"]);
    let own = completions(alone(&Place::new()));
    assert!(own.contains("--lock-timeout") && !own.contains("--iodepth_batch"), "{own}");
}
