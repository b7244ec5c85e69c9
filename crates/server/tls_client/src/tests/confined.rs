//! Connections of a confined process, on a thread of each role that opens them.
//!
//! Each case runs in its own process, because confinement is permanent.

use std::process::{Command, Output};

use sandbox::{FileRules, Role, confine, enter, enter_apart};

use super::pki::{HOST, Pki};
use super::rig::{Client, Server};

const CASE: &str = "TLS_CLIENT_TEST_CASE";
/// Exit code of a case that ran to its end; nothing else returns it.
const SURVIVED: i32 = 42;

fn in_a_process(test: &str, case: impl FnOnce()) -> Output {
    if std::env::var_os(CASE).is_some_and(|wanted| wanted == test) {
        case();
        unreachable!("the case exits");
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    let name = format!("tests::confined::{test}");
    command.args(["--exact", &name, "--nocapture", "--test-threads=1"]).env(CASE, test);
    command.output().unwrap()
}

fn assert_survives(output: &Output) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(SURVIVED), "{text}");
}

/// Connects with certificates on a thread that calls `before`, waits until the process is confined, and calls `after`.
/// The process ends with [`SURVIVED`].
fn connect_on_a_thread(before: impl FnOnce() + Send + 'static, after: impl FnOnce() + Send + 'static) {
    let pki = Pki::new("nbdkit").expect("checked before");
    let option = format!("--tls-certificates={}", pki.folder.path().display());
    let (credentials, mut server) = (pki.credentials(), Server::nbdkit(&[&option], &["memory", "1M"]));
    let (started, wait) = std::sync::mpsc::channel();
    let (go, start) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        before();
        started.send(()).unwrap();
        start.recv().unwrap();
        after();
        // The server lives until the end of the process, which may not kill it.
        (server.connect(Some(HOST), &credentials).unwrap(), server)
    });
    wait.recv().unwrap();
    confine().unwrap();
    go.send(()).unwrap();
    let (connection, _server) = thread.join().unwrap();
    Client::open(connection).assert_stores_data();
    std::process::exit(SURVIVED);
}

#[test]
fn worker_of_a_confined_process_connects() {
    const TEST: &str = "worker_of_a_confined_process_connects";
    if Pki::new("nbdkit").is_some() {
        let case = || connect_on_a_thread(|| (), || enter(Role::Worker).unwrap());
        assert_survives(&in_a_process(TEST, case));
    }
}

#[test]
fn network_thread_of_a_confined_process_connects() {
    const TEST: &str = "network_thread_of_a_confined_process_connects";
    if Pki::new("nbdkit").is_some() {
        let limit = || {
            let _ = enter_apart(Role::Network, &FileRules::default()).unwrap();
        };
        assert_survives(&in_a_process(TEST, || connect_on_a_thread(limit, || ())));
    }
}
