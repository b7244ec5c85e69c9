//! Handshakes that fail: each cause has its own error.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use super::pki::{CLIENT, HOST, Pki, SERVER, USER, VALID, has, psk, psk_folder, psk_with};
use super::rig::{PATIENCE, Server};
use crate::{CertificateFault, Connection, Credentials, TlsError, connect};

const MEMORY: &[&str] = &["memory", "1M"];

/// The outcome of a client that trusts the server's CA.
fn outcome(server: &Pki, host: &str) -> Result<Connection, TlsError> {
    outcome_with(server, host, &server.credentials())
}

fn outcome_with(server: &Pki, host: &str, client: &Credentials) -> Result<Connection, TlsError> {
    let option = format!("--tls-certificates={}", server.folder.path().display());
    Server::nbdkit(&[&option], MEMORY).connect(Some(host), client)
}

fn fault(outcome: Result<Connection, TlsError>) -> CertificateFault {
    match outcome {
        Err(TlsError::Certificate(fault)) => fault,
        other => panic!("{other:?}"),
    }
}

#[test]
fn certificate_of_another_ca_is_refused() {
    let (Some(pki), Some(other)) = (Pki::new("nbdkit"), Pki::new("nbdkit")) else { return };
    let refused = outcome_with(&pki, HOST, &other.credentials());
    assert_eq!(fault(refused), CertificateFault::UnknownIssuer);
}

#[test]
fn certificate_for_another_host_is_refused() {
    let Some(pki) = Pki::new("nbdkit") else { return };
    let host = "other.example".to_owned();
    assert_eq!(fault(outcome(&pki, &host)), CertificateFault::WrongHost { host });
}

#[test]
fn certificate_for_another_ip_address_is_refused() {
    let Some(pki) = Pki::new("nbdkit") else { return };
    let host = "127.0.0.2".to_owned();
    assert_eq!(fault(outcome(&pki, &host)), CertificateFault::WrongHost { host });
}

#[test]
fn expired_certificate_is_refused() {
    let times = "activation_date = \"2020-01-01 00:00:00\"\nexpiration_date = \"2021-01-01 00:00:00\"";
    let Some(pki) = Pki::with_server("nbdkit", &format!("{SERVER}\n{times}")) else { return };
    assert_eq!(fault(outcome(&pki, HOST)), CertificateFault::Expired);
}

#[test]
fn certificate_of_the_future_is_refused() {
    let times = "activation_date = \"2100-01-01 00:00:00\"\nexpiration_date = \"2101-01-01 00:00:00\"";
    let Some(pki) = Pki::with_server("nbdkit", &format!("{SERVER}\n{times}")) else { return };
    assert_eq!(fault(outcome(&pki, HOST)), CertificateFault::NotYetValid);
}

#[test]
fn clients_certificate_does_not_make_a_server() {
    let lines = format!("dns_name = \"{HOST}\"\n{CLIENT}\n{VALID}");
    let Some(pki) = Pki::with_server("nbdkit", &lines) else { return };
    assert_eq!(fault(outcome(&pki, HOST)), CertificateFault::WrongPurpose);
}

/// With TLS 1.3, the server refuses after the client's handshake is over.
#[test]
fn client_without_the_demanded_certificate_is_told_by_the_end_of_the_connection() {
    let Some(pki) = Pki::new("nbdkit") else { return };
    let option = format!("--tls-certificates={}", pki.folder.path().display());
    let mut server = Server::nbdkit(&[&option, "--tls-verify-peer"], MEMORY);
    let Connection { socket, end } = server.connect(Some(HOST), &pki.credentials()).unwrap();
    assert_eq!(UnixStream::from(socket).read(&mut [0]).unwrap(), 0);
    assert!(matches!(end.error(), Some(TlsError::Refused { .. } | TlsError::Cut)), "{:?}", end.error());
}

fn psk_outcome(client: &Credentials) -> Result<Connection, TlsError> {
    let folder = psk_folder();
    let keys = format!("--tls-psk={}", folder.path().join("keys.psk").display());
    Server::nbdkit(&[&keys], MEMORY).connect(None, client)
}

fn assert_names_the_key(refused: Result<Connection, TlsError>) {
    let error = refused.unwrap_err();
    assert!(matches!(error, TlsError::Refused { .. } | TlsError::Closed { .. }), "{error:?}");
    assert!(error.to_string().contains("the user name and the key"), "{error}");
}

#[test]
fn wrong_key_is_refused() {
    if has("nbdkit") {
        assert_names_the_key(psk_outcome(&psk_with(USER, &[7; 16]).unwrap()));
    }
}

#[test]
fn unknown_user_is_refused() {
    if has("nbdkit") {
        assert_names_the_key(psk_outcome(&psk_with("nobody", &[7; 16]).unwrap()));
    }
}

#[test]
fn server_with_only_a_certificate_cannot_replace_one_with_the_key() {
    let Some(pki) = Pki::new("nbdkit") else { return };
    let error = outcome_with(&pki, HOST, &psk_with(USER, &[7; 16]).unwrap()).unwrap_err();
    assert!(matches!(error, TlsError::OtherKind { .. } | TlsError::Refused { .. }), "{error:?}");
    assert!(error.to_string().contains("accepts pre-shared keys"), "{error}");
}

#[test]
fn server_with_only_keys_refuses_a_client_with_certificates() {
    let Some(pki) = Pki::new("nbdkit") else { return };
    let error = psk_outcome(&pki.credentials()).unwrap_err();
    assert!(matches!(error, TlsError::Refused { .. } | TlsError::Closed { .. }), "{error:?}");
    assert!(error.to_string().contains("accepts certificates"), "{error}");
}

// ---- peers that do not speak TLS

fn against(timeout: Duration, peer: impl FnOnce(UnixStream) + Send) -> Result<Connection, TlsError> {
    let (ours, theirs) = UnixStream::pair().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || peer(theirs));
        connect(ours.into(), None, &psk(&psk_folder()), timeout)
    })
}

/// Reads until the client closes the connection.
fn listen(mut peer: UnixStream) {
    let _ = peer.read_to_end(&mut Vec::new());
}

#[test]
fn peer_that_never_answers_meets_the_deadline() {
    let error = against(Duration::from_millis(30), listen).unwrap_err();
    assert!(matches!(error, TlsError::Deadline { .. }), "{error:?}");
    assert!(error.to_string().contains("within 0.03 s"), "{error}");
}

#[test]
fn peer_that_stops_inside_a_record_meets_the_deadline() {
    let half = |mut peer: UnixStream| {
        peer.write_all(&[22, 3, 3, 0x20, 0, 2, 0]).unwrap();
        listen(peer);
    };
    let error = against(Duration::from_millis(30), half).unwrap_err();
    assert!(matches!(error, TlsError::Deadline { .. }), "{error:?}");
}

#[test]
fn peer_that_sends_garbage_does_not_speak_tls() {
    let garbage = |mut peer: UnixStream| {
        peer.write_all(&[b'x'; 100]).unwrap();
        listen(peer);
    };
    let error = against(PATIENCE, garbage).unwrap_err();
    assert!(matches!(error, TlsError::NotTls { .. }), "{error:?}");
}

#[test]
fn peer_that_floods_the_client_does_not_hold_it_up() {
    let flood = |mut peer: UnixStream| while peer.write_all(&[22; 65536]).is_ok() {};
    let error = against(PATIENCE, flood).unwrap_err();
    assert!(matches!(error, TlsError::NotTls { .. }), "{error:?}");
}

#[test]
fn peer_that_closes_the_connection_is_named() {
    let error = against(PATIENCE, drop).unwrap_err();
    assert!(matches!(error, TlsError::Closed { .. }), "{error:?}");
}
