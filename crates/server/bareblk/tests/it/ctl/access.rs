//! The control socket as a file: its mode, leftovers of a killed server, and other users.

use super::*;

#[test]
fn control_socket_is_for_its_owner_only() {
    let place = Place::new();
    let _server = controlled(&place);
    assert_eq!(rig::mode(&place.socket("c")), 0o600);
}

#[test]
fn control_socket_of_a_killed_server_is_replaced() {
    let place = Place::new();
    controlled(&place).kill();
    assert!(place.socket("c").exists());
    let mut server = controlled(&place);
    assert_well(&place, &mut server);
}

#[test]
fn control_socket_that_cannot_be_had_keeps_the_server_from_starting() {
    let place = Place::new();
    let mut first = controlled(&place);
    let second = |control: &std::path::Path| {
        let mut command = place.serve(&place.image("other.raw", MIB), "other");
        command.arg("--control").arg(control);
        // Suppresses the log line that names the socket's owner at once.
        command.env("RUST_LOG", "error");
        refusal(command)
    };
    assert_says(&second(&place.socket("c")), &["control socket", "in use by a running server"]);
    assert_says(&second(&place.socket("no/folder")), &["control socket", "folder", "create it first"]);
    assert_says(&second(&place.path("disk.raw")), &["control socket", "not a socket"]);
    assert!(!place.socket("other").exists());
    assert_well(&place, &mut first);
}

#[test]
fn another_user_is_refused_even_if_the_socket_lets_him_in() {
    if !is_root() {
        return skip(Reason::NotRoot, "only root can become another user");
    }
    let place = Place::new();
    let mut server = controlled(&place);
    open_to_all(&place.socket("c"));
    let program = std::fs::File::open(env!("CARGO_BIN_EXE_bareblk")).unwrap();
    let mut command = as_user_4321(&program, &place.socket("c"));
    let said = String::from_utf8(command.output().unwrap().stderr).unwrap();
    assert_says(&said, &["user 4321 may not control this server", "root"]);
    server.wait_logged("control client refused: user 4321");
    assert_well(&place, &mut server);
}

#[test]
fn server_that_has_no_control_socket_serves_as_before() {
    let place = Place::new();
    let serving = Starting::new(place.serve(&place.image("disk.raw", MIB), "s")).wait_ready();
    assert_eq!(threads(&serving, "bareblk-control"), 0);
}
