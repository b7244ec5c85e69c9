//! Connections of a confined process, on a thread of each role that opens them.
//!
//! Each case runs in its own process, because confinement is permanent.

use std::process::{Command, Output};

use sandbox::{FileRules, Role, confine, enter, enter_apart};

use super::pki::{HOST, Pki};
use super::rig::Server;

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

/// Connects with certificates on a thread that first calls `limit`.
fn connect_on_a_thread(limit: impl FnOnce() + Send + 'static) {
    let pki = Pki::new("nbdkit").expect("checked before");
    let option = format!("--tls-certificates={}", pki.folder.path().display());
    let (credentials, mut server) = (pki.credentials(), Server::nbdkit(&[&option], &["memory", "1M"]));
    // A network thread starts before the process is confined, and waits until it is.
    let (limited, wait) = std::sync::mpsc::channel();
    let (go, start) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        limit();
        limited.send(()).unwrap();
        start.recv().unwrap();
        server.client(Some(HOST), &credentials).assert_stores_data();
        // The server's process ends with its connection: a confined process may not kill it.
        std::process::exit(SURVIVED);
    });
    wait.recv().unwrap();
    confine().unwrap();
    go.send(()).unwrap();
    thread.join().unwrap();
}

#[test]
fn worker_of_a_confined_process_connects() {
    if Pki::new("nbdkit").is_some() {
        assert_survives(&in_a_process("worker_of_a_confined_process_connects", || {
            confine_first_then_connect();
        }));
    }
}

fn confine_first_then_connect() {
    let pki = Pki::new("nbdkit").expect("checked before");
    let option = format!("--tls-certificates={}", pki.folder.path().display());
    let (credentials, mut server) = (pki.credentials(), Server::nbdkit(&[&option], &["memory", "1M"]));
    confine().unwrap();
    let thread = std::thread::spawn(move || {
        enter(Role::Worker).unwrap();
        server.client(Some(HOST), &credentials).assert_stores_data();
        std::process::exit(SURVIVED);
    });
    thread.join().unwrap();
}

#[test]
fn network_thread_of_a_confined_process_connects() {
    if Pki::new("nbdkit").is_some() {
        assert_survives(&in_a_process("network_thread_of_a_confined_process_connects", || {
            connect_on_a_thread(|| {
                enter_apart(Role::Network, &FileRules::default()).unwrap();
            });
        }));
    }
}
