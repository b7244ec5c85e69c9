//! Handshakes that succeed.

use tempfile::TempDir;

use super::pki::{CLIENT, HOST, Pki, VALID, has, psk, psk_folder};
use super::rig::Server;

const MEMORY: &[&str] = &["memory", "1M"];

fn certificates(pki: &Pki) -> String {
    format!("--tls-certificates={}", pki.folder.path().display())
}

fn image() -> (TempDir, std::path::PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image");
    std::fs::write(&path, vec![0; 1 << 20]).unwrap();
    (folder, path)
}

#[test]
fn nbdkit_with_a_pre_shared_key_stores_data() {
    if has("nbdkit") {
        let folder = psk_folder();
        let keys = format!("--tls-psk={}", folder.path().join("keys.psk").display());
        let mut server = Server::nbdkit(&[&keys], MEMORY);
        server.client(None, &psk(&folder)).assert_stores_data();
    }
}

#[test]
fn nbdkit_with_a_certificate_for_the_host_stores_data() {
    if let Some(pki) = Pki::new("nbdkit") {
        let mut server = Server::nbdkit(&[&certificates(&pki)], MEMORY);
        server.client(Some(HOST), &pki.credentials()).assert_stores_data();
    }
}

#[test]
fn certificate_for_an_ip_address_is_accepted() {
    if let Some(pki) = Pki::new("nbdkit") {
        let mut server = Server::nbdkit(&[&certificates(&pki)], MEMORY);
        server.client(Some("127.0.0.1"), &pki.credentials()).assert_stores_data();
    }
}

#[test]
fn without_a_host_any_certificate_of_the_ca_is_accepted() {
    if let Some(pki) = Pki::with_server("nbdkit", &format!("dns_name = \"a.example\"\n{VALID}")) {
        let mut server = Server::nbdkit(&[&certificates(&pki)], MEMORY);
        server.client(None, &pki.credentials()).assert_stores_data();
    }
}

#[test]
fn server_that_demands_a_certificate_gets_the_clients() {
    if let Some(pki) = Pki::new("nbdkit") {
        pki.issue("client", &format!("{CLIENT}\n{VALID}"));
        let mut server = Server::nbdkit(&[&certificates(&pki), "--tls-verify-peer"], MEMORY);
        server.client(Some(HOST), &pki.credentials()).assert_stores_data();
    }
}

#[test]
fn qemu_nbd_with_a_pre_shared_key_stores_data() {
    if has("qemu-nbd") {
        let (folder, (_kept, image)) = (psk_folder(), image());
        let object = format!("tls-creds-psk,id=tls0,endpoint=server,dir={}", folder.path().display());
        Server::qemu_nbd(&object, &image).client(None, &psk(&folder)).assert_stores_data();
    }
}

#[test]
fn qemu_nbd_with_a_certificate_stores_data() {
    if let Some(pki) = Pki::new("qemu-nbd") {
        let (_kept, image) = image();
        let dir = pki.folder.path().display();
        let object = format!("tls-creds-x509,id=tls0,endpoint=server,verify-peer=off,dir={dir}");
        Server::qemu_nbd(&object, &image).client(Some(HOST), &pki.credentials()).assert_stores_data();
    }
}

#[test]
fn server_with_only_tls_1_2_stores_data_with_a_pre_shared_key() {
    if has("qemu-nbd") {
        let (folder, (_kept, image)) = (psk_folder(), image());
        let dir = folder.path().display();
        let object = format!("tls-creds-psk,id=tls0,endpoint=server,dir={dir},priority=NORMAL:-VERS-TLS1.3");
        Server::qemu_nbd(&object, &image).client(None, &psk(&folder)).assert_stores_data();
    }
}

#[test]
fn server_with_only_tls_1_2_stores_data_with_a_certificate() {
    if let Some(pki) = Pki::new("qemu-nbd") {
        let (_kept, image) = image();
        let dir = pki.folder.path().display();
        let object = format!(
            "tls-creds-x509,id=tls0,endpoint=server,verify-peer=off,dir={dir},priority=NORMAL:-VERS-TLS1.3"
        );
        Server::qemu_nbd(&object, &image).client(Some(HOST), &pki.credentials()).assert_stores_data();
    }
}
