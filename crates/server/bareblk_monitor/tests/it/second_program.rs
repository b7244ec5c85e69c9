//! `bareblk` with and without an installed `bareblk-monitor`: which commands it passes on, and its errors.

use std::fs;
use std::process::{Command, Stdio};

use crate::rig::{
    Place, Server, assert_says, bareblk, eventually, monitor_program, output, refusal, top, wrong_usage,
};

#[test]
fn without_the_second_program_one_line_says_what_to_install() {
    let place = Place::new();
    let program = place.path("bareblk");
    fs::copy(bareblk().get_program(), &program).unwrap();
    for words in [&["top"][..], &["top", "--help"], &["help", "top"]] {
        let mut command = Command::new(&program);
        command.env("PATH", place.path("")).stdin(Stdio::null()).args(words);
        assert_says(
            &refusal(command),
            &["`bareblk top` needs the program bareblk-monitor", "install the package bareblk, or"],
        );
    }
}

#[test]
fn help_and_usage_speak_of_the_first_program() {
    monitor_program();
    for words in [["top", "--help"], ["help", "top"]] {
        let mut command = bareblk();
        command.args(words);
        assert_says(&output(command), &["Usage: bareblk top [OPTIONS]", "--interval"]);
    }
    let mut command = top();
    command.args(["--interval", "0"]);
    assert_says(&wrong_usage(command), &["'0' for '--interval <SECONDS>'", "(see bareblk top --help)"]);
}

#[test]
fn second_program_takes_the_place_of_the_first_process() {
    let place = Place::new();
    let mut serve = place.serve(&place.image("disk.raw", 1 << 20), "disk.sock");
    serve.arg("--control").arg(place.socket("control.sock"));
    let _server = Server::start(serve);
    let mut command = top();
    command.arg("--control").arg(place.socket("control.sock"));
    let mut child = command.stdout(Stdio::null()).spawn().unwrap();
    let program = format!("/proc/{}/exe", child.id());
    eventually("it is the second program", || {
        (fs::read_link(&program).ok()? == monitor_program().canonicalize().unwrap()).then_some(())
    });
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn missing_server_is_an_error_in_one_line() {
    let place = Place::new();
    let mut command = top();
    command.arg("--control").arg(place.socket("none.sock"));
    assert_says(&refusal(command), &["there is no server at ", "none.sock"]);
}
