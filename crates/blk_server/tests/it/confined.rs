//! Workers of a confined process: one that does not get its list of system calls does not start.
//!
//! The case runs in a process of its own, this very program once more: what is given up here is given up for good.
//!
//! Not here: what is on the lists, and threads of engines (`sandbox/tests/confined.rs`).
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::error::Error;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use blk_server::{Balance, EngineSource, Server, ServerConfig, ServerError, WorkerOptions};
use disk_image::{HostOpener, Opener};
use io_engine::{Engine, EngineConfig, SyncEngine};
use sandbox::{Role, confine, enter};

const CASE: &str = "BLK_SERVER_TEST_CASE";
/// A case that ran to its end; nobody else gives this.
const SURVIVED: i32 = 42;
/// More filters than the kernel takes one after the other (`MAX_INSNS_PER_PATH`, kernel/seccomp.c).
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
    // The worker inherits them, and has no room for its own.
    let full = std::iter::repeat_with(|| enter(Role::Worker)).take(TOO_MANY).any(|entered| entered.is_err());
    assert!(full, "a kernel with a limit");
    let refused = start().unwrap_err();
    let line = format!("{refused}: {}", refused.source().unwrap());
    assert!(
        line.contains("worker 0 does not get its list of system calls: the kernel takes no filter"),
        "{line}"
    );
}

#[test]
fn worker_that_gets_no_list_of_calls_does_not_start() {
    if std::env::var_os(CASE).is_some() {
        case();
        std::process::exit(SURVIVED);
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    let output =
        command.args(["confined::", "--nocapture", "--test-threads=1"]).env(CASE, "1").output().unwrap();
    assert_eq!(output.status.code(), Some(SURVIVED), "{}", String::from_utf8_lossy(&output.stderr));
}
