//! Threads of a confined process: a worker that cannot restrict its system calls does not start, and the lists allow
//! the system calls that front-ends' descriptors need.
//!
//! Each case runs this program again in a process of its own, because a process cannot leave its sandbox.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::error::Error;
use std::io::Read;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use blk_server::{Balance, EngineSource, Server, ServerConfig, ServerError, WorkerOptions};
use disk_image::{HostOpener, Opener};
use guest_mem::{Budget, Limits, Quota};
use io_engine::{Engine, EngineConfig, SyncEngine, prepare_signals, signal_shared};
use rustix::event::{EventfdFlags, eventfd};
use sandbox::{Role, confine, enter};

const CASE: &str = "BLK_SERVER_TEST_CASE";
/// The exit code of a case that ran to its end. Nothing else exits with this code.
const SURVIVED: i32 = 42;
/// More filters than the kernel accepts in sequence (`MAX_INSNS_PER_PATH`, kernel/seccomp.c).
const TOO_MANY: usize = 2000;

fn start() -> Result<Server, ServerError> {
    let config = EngineConfig { depth: 16, ..EngineConfig::default() };
    let make = move || Ok(Box::new(SyncEngine::new(config.clone())?) as Box<dyn Engine>);
    let engine = EngineSource::new("test", 16, Box::new(make));
    let workers = vec![WorkerOptions::default()];
    let config = ServerConfig { engine, workers, poll: Duration::ZERO, balance: Balance::Off };
    let opener: Arc<dyn Opener> = Arc::new(HostOpener);
    Server::start(&config, &opener, Vec::new())
}

fn case() {
    confine().unwrap();
    drop(start().unwrap());
    // The worker inherits these filters and cannot add its own.
    let full = std::iter::repeat_with(|| enter(Role::Worker)).take(TOO_MANY).any(|entered| entered.is_err());
    assert!(full, "a kernel with a limit");
    let refused = start().unwrap_err();
    let line = format!("{refused}: {}", refused.source().unwrap());
    assert!(
        line.contains(
            "worker 0 cannot restrict its system calls: the kernel does not accept the system-call filter"
        ),
        "{line}"
    );
}

/// The lists allow both calls, so neither ends the process.
fn close_and_signal() {
    prepare_signals().unwrap();
    confine().unwrap();
    for role in [Role::Session, Role::Worker] {
        let (mut reader, writer) = std::io::pipe().unwrap();
        let event = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        let quota = Quota::of(&Budget::new(Limits::of_process()));
        let thread = std::thread::spawn(move || {
            enter(role).unwrap();
            drop(quota.admit(writer.into()).unwrap());
            // Returns when another thread has closed the other end.
            assert_eq!(reader.read(&mut [0]).unwrap(), 0);
            prepare_signals().unwrap();
            (0..100).for_each(|_| signal_shared(&event));
            let mut count = [0; 8];
            rustix::io::read(&event, &mut count).unwrap();
            assert_eq!(u64::from_ne_bytes(count), 100);
        });
        thread.join().unwrap();
    }
}

#[test]
fn session_and_worker_may_close_on_another_thread_and_signal_without_waiting() {
    const NAME: &str = "confined::session_and_worker_may_close_on_another_thread_and_signal_without_waiting";
    if std::env::var_os(CASE).is_some_and(|case| case == NAME) {
        close_and_signal();
        std::process::exit(SURVIVED);
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    let output = command.args(["--exact", NAME, "--nocapture", "--test-threads=1"]).env(CASE, NAME).output();
    let output = output.unwrap();
    assert_eq!(output.status.code(), Some(SURVIVED), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn worker_that_gets_no_list_of_calls_does_not_start() {
    const NAME: &str = "confined::worker_that_gets_no_list_of_calls_does_not_start";
    if std::env::var_os(CASE).is_some_and(|case| case == NAME) {
        case();
        std::process::exit(SURVIVED);
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    let output =
        command.args(["--exact", NAME, "--nocapture", "--test-threads=1"]).env(CASE, NAME).output().unwrap();
    assert_eq!(output.status.code(), Some(SURVIVED), "{}", String::from_utf8_lossy(&output.stderr));
}
