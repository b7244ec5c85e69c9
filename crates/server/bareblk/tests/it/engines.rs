//! Engines from the command line: which engine is chosen, which are refused, and what the program does if the host
//! forbids an engine's calls.
//!
//! A seccomp filter on a thread forbids the calls, and the program that the thread starts inherits the filter.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::collections::BTreeMap;
use std::fs::File;
use std::path::PathBuf;
use std::process::Command;

use rustix::process::Signal;
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, apply_filter};

use crate::rig::{Place, Server, assert_says, bareblk, output, refusal, wrong_usage};

const MIB: u64 = 1 << 20;

/// Runs `act` on a thread where these system calls fail with these error numbers. Programs that the thread starts
/// inherit the filter.
fn where_calls_fail<T: Send>(calls: &[(i64, i32)], act: impl FnOnce() -> T + Send) -> T {
    let filters = calls.iter().map(|&(call, errno)| {
        let rules = BTreeMap::from([(call, vec![])]);
        let fails = SeccompAction::Errno(errno as u32);
        let arch = std::env::consts::ARCH.try_into().unwrap();
        BpfProgram::try_from(SeccompFilter::new(rules, SeccompAction::Allow, fails, arch).unwrap()).unwrap()
    });
    let filters: Vec<BpfProgram> = filters.collect();
    let run = || {
        filters.iter().for_each(|filter| apply_filter(filter).unwrap());
        act()
    };
    std::thread::scope(|scope| scope.spawn(run).join().unwrap())
}

const NO_IO_URING: (i64, i32) = (libc::SYS_io_uring_setup, libc::EPERM);
const NO_AIO_CONTEXTS: (i64, i32) = (libc::SYS_io_setup, libc::EAGAIN);

fn with(mut command: Command, arguments: &[&str]) -> Command {
    command.args(arguments);
    command
}

/// A sparse file on tmpfs, deleted with its folder.
fn image_in_memory() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = folder.path().join("disk.raw");
    File::create(&path).unwrap().set_len(MIB).unwrap();
    (folder, path)
}

fn stop(server: Server) {
    assert!(server.stop(Signal::TERM).success());
}

#[test]
fn every_engine_that_can_serves_by_name() {
    let place = Place::new();
    let image = place.image("disk.raw", MIB);
    for engine in ["io_uring", "linux-aio", "posix-aio", "threads", "sync"] {
        let server = Server::start(with(place.serve(&image, "s"), &["--engine", engine]));
        server.wait_logged(&format!("engine={engine}"));
        stop(server);
    }
}

#[test]
fn image_in_memory_is_served_in_the_worker_and_the_log_says_why() {
    let place = Place::new();
    let (_folder, image) = image_in_memory();
    let server = Server::start(place.serve(&image, "s"));
    server.wait_logged("engine=mmap");
    assert_says(&server.log(), &["engine_because=", "on tmpfs"]);
    stop(server);
}

#[test]
fn image_in_memory_can_be_mapped() {
    let place = Place::new();
    let (_folder, image) = image_in_memory();
    let server = Server::start(with(place.serve(&image, "s"), &["--engine", "mmap"]));
    server.wait_logged("engine=mmap");
    stop(server);
}

#[test]
fn mmap_of_an_image_on_disk_is_refused() {
    let place = Place::new();
    let image = place.image("disk.raw", MIB);
    let line = refusal(with(place.serve(&image, "s"), &["--engine", "mmap"]));
    assert_says(&line, &["engine mmap cannot be used", "memory"]);
}

#[test]
fn linux_aio_through_the_page_cache_is_refused_and_says_why() {
    let place = Place::new();
    let image = place.image("disk.raw", MIB);
    for cache in ["writeback", "writethrough", "unsafe"] {
        let line = refusal(with(place.serve(&image, "s"), &["--engine", "linux-aio", "--cache", cache]));
        assert_says(&line, &["engine linux-aio cannot be used", "O_DIRECT", "--cache none"]);
    }
}

#[test]
fn io_uring_that_is_forbidden_is_passed_over_with_one_line_and_the_next_best_serves() {
    let place = Place::new();
    let image = place.image("disk.raw", MIB);
    where_calls_fail(&[NO_IO_URING], || {
        let server = Server::start(place.serve(&image, "s"));
        server.wait_logged("engine=linux-aio");
        let log = server.log();
        let lines: Vec<&str> = log.lines().filter(|line| line.contains("WARN")).collect();
        assert_eq!(lines.len(), 1, "{log}");
        assert_says(lines[0], &["engine linux-aio is used instead of io_uring", "forbidden"]);
        stop(server);
    });
}

#[test]
fn host_without_io_uring_and_aio_contexts_serves_with_threads() {
    let place = Place::new();
    let image = place.image("disk.raw", MIB);
    where_calls_fail(&[NO_IO_URING, NO_AIO_CONTEXTS], || {
        let server = Server::start(place.serve(&image, "s"));
        server.wait_logged("engine=threads");
        assert_says(&server.log(), &["engine threads is used instead of linux-aio", "aio-max-nr"]);
        stop(server);
    });
}

#[test]
fn io_uring_asked_for_by_name_is_an_error_where_it_cannot_be_had() {
    let place = Place::new();
    let image = place.image("disk.raw", MIB);
    let refused_with = |errno| {
        let call = [(libc::SYS_io_uring_setup, errno)];
        where_calls_fail(&call, || refusal(with(place.serve(&image, "s"), &["--engine", "io_uring"])))
    };
    assert_says(&refused_with(libc::EPERM), &["io_uring", "forbidden", "kernel.io_uring_disabled"]);
    assert_says(&refused_with(libc::ENOSYS), &["io_uring", "kernel"]);
    assert_says(&refused_with(libc::ENOMEM), &["io_uring", "ulimit -l"]);
}

#[test]
fn linux_aio_asked_for_by_name_is_an_error_where_contexts_are_exhausted() {
    let place = Place::new();
    let image = place.image("disk.raw", MIB);
    let line = where_calls_fail(&[NO_AIO_CONTEXTS], || {
        refusal(with(place.serve(&image, "s"), &["--engine", "linux-aio"]))
    });
    assert_says(&line, &["engine linux-aio cannot be used", "fs.aio-max-nr"]);
}

#[test]
fn option_of_an_engine_that_was_not_asked_for_is_refused() {
    let place = Place::new();
    let image = place.image("disk.raw", MIB);
    for option in [&["--iopoll"][..], &["--sqpoll-ms", "50"], &["--pin-guest-memory"]] {
        let line = wrong_usage(with(place.serve(&image, "s"), option));
        assert_says(&line, &[option[0], "add --engine io_uring"]);
    }
    for descriptors in ["2", "4"] {
        let pool = ["--engine", "threads", "--fd-pool", descriptors];
        let line = wrong_usage(with(place.serve(&image, "s"), &pool));
        assert_says(&line, &["--fd-pool", "add --engine posix-aio"]);
    }
}

#[test]
fn threads_for_an_engine_without_any_are_refused() {
    let place = Place::new();
    let image = place.image("disk.raw", MIB);
    let threads = ["--engine", "io_uring", "--io-threads", "8"];
    assert_says(&wrong_usage(with(place.serve(&image, "s"), &threads)), &["--io-threads", "io_uring"]);
}

#[test]
fn polled_completions_through_the_page_cache_are_refused() {
    let place = Place::new();
    let image = place.image("disk.raw", MIB);
    let polled = ["--engine", "io_uring", "--iopoll", "--cache", "writeback"];
    assert_says(
        &wrong_usage(with(place.serve(&image, "s"), &polled)),
        &["--iopoll", "--cache none or directsync"],
    );
}

#[test]
fn unknown_engine_is_wrong_usage_and_names_the_known_ones() {
    let place = Place::new();
    let image = place.image("disk.raw", MIB);
    let line = wrong_usage(with(place.serve(&image, "s"), &["--engine", "aio"]));
    assert_says(&line, &["aio", "auto", "io_uring", "linux-aio", "posix-aio", "threads", "sync", "mmap"]);
}

#[test]
fn engines_lists_all_with_reasons_for_those_that_are_off() {
    let text = where_calls_fail(&[NO_IO_URING], || output(with(bareblk(), &["engines"])));
    let line = |name: &str| text.lines().find(|line| line.trim_start().starts_with(name)).unwrap().to_owned();
    assert_says(&line("io_uring"), &[" no ", "forbidden"]);
    for engine in ["linux-aio", "posix-aio", "threads", "sync", "mmap"] {
        assert_says(&line(engine), &[" yes "]);
    }
}

#[test]
fn engines_with_an_image_says_what_auto_takes() {
    let place = Place::new();
    let image = place.image("disk.raw", MIB);
    let mut command = with(bareblk(), &["engines", "--json", "--cache", "writeback"]);
    command.arg(&image);
    let report: serde_json::Value = serde_json::from_str(&output(command)).unwrap();
    assert_eq!(report["image"]["auto"], "io_uring");
    let taken: Vec<bool> =
        report["engines"].as_array().unwrap().iter().map(|e| e["available"].as_bool().unwrap()).collect();
    // io_uring, linux-aio, posix-aio, threads, sync, mmap, and the engines for disks on other machines
    assert_eq!(taken, [true, false, true, true, true, false, false, false]);
}

#[test]
fn engines_with_an_image_that_is_served_answers() {
    let place = Place::new();
    let image = place.image("disk.raw", MIB);
    let server = Server::start(place.serve(&image, "s"));
    let mut command = with(bareblk(), &["engines"]);
    command.arg(&image);
    assert_says(&output(command), &["--engine auto picks io_uring"]);
    stop(server);
}

#[test]
fn engines_with_something_that_is_no_image_is_refused() {
    let place = Place::new();
    let refused = |path: PathBuf| {
        let mut command = with(bareblk(), &["engines"]);
        command.arg(path);
        refusal(command)
    };
    assert_says(&refused(place.path("none.raw")), &["none.raw", "cannot be opened"]);
    assert_says(&refused(place.path("")), &["directory"]);
}

#[test]
fn engines_with_a_cache_mode_but_no_image_is_wrong_usage() {
    let line = wrong_usage(with(bareblk(), &["engines", "--cache", "writeback"]));
    assert_says(&line, &["IMAGE", "not provided"]);
}
