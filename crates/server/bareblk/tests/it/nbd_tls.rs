//! Exports of NBD servers over TLS, on the real program and real servers: nbdkit and qemu-nbd.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::Signal;
use tempfile::TempDir;
use xtask::packages::find_program;
use xtask::skip::{Reason, skip};

use crate::rig::nbd_server::NbdServer;
use crate::rig::{Place, Server, assert_says, bench, ctl, eventually, ok, output, refusal};

const MIB: u64 = 1 << 20;
const KEY: &str = "0123456789abcdef0123456789abcdef";

/// `bareblk serve URI` with a control socket; the disk is `far`.
fn serve(place: &Place, uri: &str) -> Command {
    let mut command = place.serve(Path::new(uri), "s");
    command.args(["--name", "far", "--control"]).arg(place.socket("c"));
    command
}

/// Writes the disk, reads it back and compares.
fn verify(place: &Place, size: &str, words: &[&str]) {
    let mut command = bench();
    command.arg("--socket").arg(place.socket("s")).args(["--bs=16k", "--iodepth=8", "--json"]);
    command.args(["--verify=crc32c", "--rw=randwrite", "--size", size]).args(words);
    output(command);
}

/// The URI over TCP. `host` may begin with a user.
fn tcp_uri(server: &NbdServer, host: &str, keys: &str) -> String {
    format!("nbds://{host}:{}/?{keys}", server.port())
}

fn uri(server: &NbdServer, keys: &str) -> String {
    format!("nbds+unix:///?socket={}&{keys}", server.socket().display())
}

/// A file of keys with this key for the user `vm`.
fn keys(folder: &TempDir, name: &str, key: &str) -> PathBuf {
    let path = folder.path().join(name);
    std::fs::write(&path, format!("other:00ff\nvm:{key}\n")).unwrap();
    path
}

fn psk(file: &Path) -> String {
    format!("tls-psk-file={}&tls-username=vm", file.display())
}

/// nbdkit with a file of 16 MiB, which demands TLS with a pre-shared key. The folder has the keys.
fn psk_server() -> Option<(NbdServer, TempDir, PathBuf)> {
    let folder = tempfile::tempdir().unwrap();
    let file = keys(&folder, "keys.psk", KEY);
    let option = format!("--tls-psk={}", file.display());
    Some((NbdServer::file(16 * MIB, &["--tls=require", &option])?, folder, file))
}

/// A CA, with the certificate of a server for `storage.example`, one for this host in the folder `here`, and with one for a client in the folder `client`.
struct Pki(TempDir);

impl Pki {
    /// `None`: the test is skipped.
    fn new() -> Option<Self> {
        if find_program("certtool").is_none() {
            skip(Reason::NoProgram("certtool".to_owned()), "certificates");
            return None;
        }
        let pki = Self(tempfile::tempdir().unwrap());
        for folder in ["client", "here"] {
            std::fs::create_dir(pki.path(folder)).unwrap();
        }
        pki.issue("ca", "ca\ncert_signing_key", "--generate-self-signed");
        let signed = "--generate-certificate --load-ca-certificate ca-cert.pem --load-ca-privkey ca-key.pem";
        pki.issue("server", "dns_name = \"storage.example\"\ntls_www_server\nsigning_key", signed);
        let here = "dns_name = \"localhost\"\nip_address = \"127.0.0.1\"\ntls_www_server\nsigning_key";
        pki.issue("here/server", here, signed);
        pki.issue("client/client", "tls_www_client\nsigning_key", signed);
        for folder in ["client", "here"] {
            std::fs::copy(pki.path("ca-cert.pem"), pki.path(folder).join("ca-cert.pem")).unwrap();
        }
        Some(pki)
    }

    fn issue(&self, name: &str, lines: &str, how: &str) {
        std::fs::write(self.path("template"), format!("cn = \"{name}\"\n{lines}\nexpiration_days = 10\n"))
            .unwrap();
        self.certtool(&format!("--generate-privkey --key-type=ecdsa --outfile {name}-key.pem"));
        let files = format!("--load-privkey {name}-key.pem --template template --outfile {name}-cert.pem");
        self.certtool(&format!("{how} {files}"));
    }

    fn certtool(&self, words: &str) {
        let mut command = Command::new("certtool");
        command.current_dir(self.0.path()).arg("--no-text").args(words.split(' '));
        output(command);
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// nbdkit with this CA's certificate, which demands TLS.
    fn server(&self, words: &[&str]) -> Option<NbdServer> {
        let option = self.elsewhere_option();
        NbdServer::file(16 * MIB, &[&["--tls=require", &option], words].concat())
    }

    /// nbdkit's option for the certificate of `storage.example`.
    fn elsewhere_option(&self) -> String {
        format!("--tls-certificates={}", self.0.path().display())
    }

    /// nbdkit's option for the certificate of this host.
    fn here_option(&self) -> String {
        format!("--tls-certificates={}", self.path("here").display())
    }

    /// nbdkit on a TCP port with the certificate of this host, which demands one of the client.
    fn server_over_tcp(&self) -> Option<NbdServer> {
        NbdServer::file_over_tcp(16 * MIB, &["--tls=require", &self.here_option(), "--tls-verify-peer"])
    }

    /// The URI's keys of a client with a certificate.
    fn client(&self) -> String {
        format!("tls-certificates={}", self.path("client").display())
    }

    /// The URI's keys of a client that has only the CA's certificate.
    fn anonymous(&self) -> String {
        format!("tls-certificates={}", self.0.path().display())
    }
}

#[test]
fn export_is_served_with_a_pre_shared_key_on_several_workers() {
    let Some((export, _folder, file)) = psk_server() else { return };
    let (place, uri) = (Place::new(), uri(&export, &psk(&file)));
    let mut command = serve(&place, &uri);
    command.args(["-v", "--workers", "2", "--queues", "2"]);
    let server = Server::start(command);
    assert_says(&server.ready_line, &["serving nbds+unix:///?socket="]);
    verify(&place, "4m", &["--numjobs=2"]);
    output(ctl(&place, &["flush", "far"]));
    output(ctl(&place, &["remove", "far"]));
    let words = [format!("image={uri}"), format!("socket={}", place.socket("s").display())];
    output(ctl(&place, &["add", "name=far", &words[0], &words[1]]));
    verify(&place, "4m", &[]);
    assert!(!server.log().contains(KEY));
    assert!(server.stop(Signal::TERM).success());
}

#[test]
fn export_is_served_with_certificates_for_its_host_name() {
    let Some(pki) = Pki::new() else { return };
    let Some(export) = pki.server(&["--tls-verify-peer"]) else { return };
    let place = Place::new();
    let with = |keys: &str| uri(&export, &format!("{}&tls-hostname=storage.example", keys));
    let server = Server::start(serve(&place, &with(&pki.client())));
    verify(&place, "4m", &[]);
    assert!(server.stop(Signal::TERM).success());
    let refused = refusal(serve(&place, &with(&pki.anonymous())));
    assert_says(&refused, &["no TLS connection with the NBD server at", "check"]);
}

#[test]
fn export_is_served_over_tcp_with_certificates_for_the_uris_host() {
    let Some(pki) = Pki::new() else { return };
    let Some(export) = pki.server_over_tcp() else { return };
    let place = Place::new();
    for host in ["localhost", "127.0.0.1"] {
        let uri = tcp_uri(&export, host, &pki.client());
        let server = Server::start(serve(&place, &uri));
        assert_says(&server.ready_line, &["serving nbds://", host]);
        verify(&place, "8m", &[]);
        assert!(server.stop(Signal::TERM).success());
    }
    let refused = refusal(serve(&place, &tcp_uri(&export, "localhost", &pki.anonymous())));
    assert_says(&refused, &["no TLS connection with the NBD server at localhost:", "check"]);
}

#[test]
fn export_is_served_over_tcp_with_a_pre_shared_key() {
    let folder = tempfile::tempdir().unwrap();
    let (file, other) = (keys(&folder, "keys.psk", KEY), keys(&folder, "other.psk", "ffff"));
    let option = format!("--tls-psk={}", file.display());
    let Some(export) = NbdServer::file_over_tcp(16 * MIB, &["--tls=require", &option]) else { return };
    let place = Place::new();
    let with = |file: &Path| tcp_uri(&export, "vm@localhost", &format!("tls-psk-file={}", file.display()));
    let server = Server::start(serve(&place, &with(&file)));
    verify(&place, "8m", &[]);
    assert!(server.stop(Signal::TERM).success());
    let refused = refusal(serve(&place, &with(&other)));
    assert_says(&refused, &["at localhost:", "check the user name and the key"]);
    let clear = format!("nbd://localhost:{}/", export.port());
    assert_says(&refusal(serve(&place, &clear)), &["demands TLS", "use nbds://"]);
}

#[test]
fn server_that_comes_back_with_a_wrong_certificate_is_not_used_and_the_load_waits() {
    let Some(pki) = Pki::new() else { return };
    let Some(mut export) = pki.server_over_tcp() else { return };
    let place = Place::new();
    let server = Server::start(serve(&place, &tcp_uri(&export, "localhost", &pki.client())));
    let writes = || ok(&place, &["stats"])["disks"][0]["queues"][0]["writes"].as_u64().unwrap_or(0);
    std::thread::scope(|scope| {
        let load = scope.spawn(|| verify(&place, "16m", &["--loops=10"]));
        eventually("writes go on", || (writes() > 0).then_some(()));
        export.kill();
        // A certificate of the same CA, but for another host: as of a server that was put in its place.
        export.replace_argument(&pki.here_option(), &pki.elsewhere_option());
        export.start().unwrap();
        server.wait_logged("it is not for the host 'localhost'");
        assert!(!load.is_finished());
        export.kill();
        export.replace_argument(&pki.elsewhere_option(), &pki.here_option());
        export.start().unwrap();
        load.join().unwrap();
    });
    server.wait_logged("connected to the NBD server again");
    assert!(server.stop(Signal::TERM).success());
}

#[test]
fn qemu_nbd_is_served_with_a_pre_shared_key() {
    let folder = tempfile::tempdir().unwrap();
    let file = keys(&folder, "keys.psk", KEY);
    let credentials = format!("tls-creds-psk,id=tls0,endpoint=server,dir={}", folder.path().display());
    let words = ["--object", &credentials, "--tls-creds=tls0"];
    let Some(export) = NbdServer::qemu_nbd(16 * MIB, &words) else { return };
    let place = Place::new();
    let server = Server::start(serve(&place, &uri(&export, &psk(&file))));
    verify(&place, "4m", &[]);
    assert!(server.stop(Signal::TERM).success());
}

#[test]
fn load_goes_on_when_the_server_is_killed_and_comes_back() {
    let Some((mut export, _folder, file)) = psk_server() else { return };
    let place = Place::new();
    let server = Server::start(serve(&place, &uri(&export, &psk(&file))));
    let writes = || ok(&place, &["stats"])["disks"][0]["queues"][0]["writes"].as_u64().unwrap_or(0);
    std::thread::scope(|scope| {
        let load = scope.spawn(|| verify(&place, "16m", &["--loops=3"]));
        for _ in 0..3 {
            let before = writes();
            eventually("writes go on", || (writes() > before || load.is_finished()).then_some(()));
            export.kill();
            export.start().unwrap();
        }
        load.join().unwrap();
    });
    server.wait_logged("connection to the NBD server lost");
    server.wait_logged("connected to the NBD server again");
    assert!(server.stop(Signal::TERM).success());
}

#[test]
fn wrong_key_or_user_ends_the_start_with_its_reason() {
    let Some((export, folder, _)) = psk_server() else { return };
    let place = Place::new();
    let wrong = |keys: &str| refusal(serve(&place, &uri(&export, keys)));
    let other = keys(&folder, "other.psk", "ffff");
    let advice = ["no TLS connection with the NBD server at", "check the user name and the key"];
    assert_says(&wrong(&psk(&other)), &advice);
    let nobody = format!("tls-psk-file={}&tls-username=nobody", other.display());
    assert_says(&wrong(&nobody), &["other.psk has no key for the user 'nobody'"]);
    assert_says(&wrong(&psk(&folder.path().join("none"))), &["none cannot be read", "No such file"]);
    assert_says(&refusal(serve(&place, &export.uri())), &["demands TLS", "use nbds://"]);
}

#[test]
fn certificate_of_another_ca_or_host_ends_the_start_with_its_reason() {
    let (Some(pki), Some(other)) = (Pki::new(), Pki::new()) else { return };
    let Some(export) = pki.server(&[]) else { return };
    let place = Place::new();
    let wrong = |keys: &str| refusal(serve(&place, &uri(&export, keys)));
    assert_says(&wrong(&other.anonymous()), &["certificate is refused", "not signed by the CA"]);
    let host = format!("{}&tls-hostname=else.example", pki.client());
    assert_says(&wrong(&host), &["it is not for the host 'else.example'"]);
}

#[test]
fn server_without_tls_is_refused_and_never_gets_a_request_in_the_clear() {
    let Some(export) = NbdServer::file(16 * MIB, &["--tls=off"]) else { return };
    let folder = tempfile::tempdir().unwrap();
    let refused = refusal(serve(&Place::new(), &uri(&export, &psk(&keys(&folder, "keys.psk", KEY)))));
    assert_says(&refused, &["refuses TLS", "enable TLS there"]);
}

#[test]
fn disk_with_tls_cannot_be_added_to_a_sandboxed_server_that_started_without_one() {
    let folder = tempfile::tempdir().unwrap();
    let file = keys(&folder, "keys.psk", KEY);
    let option = format!("--tls-psk={}", file.display());
    let Some(export) = NbdServer::file(16 * MIB, &["--tls=on", &option]) else { return };
    let place = Place::new();
    let server = Server::start(serve(&place, &export.uri()));
    let words =
        [format!("image={}", uri(&export, &psk(&file))), format!("socket={}", place.socket("t").display())];
    let refused = refusal(ctl(&place, &["add", "name=other", &words[0], &words[1]]));
    assert_says(&refused, &["started without a disk that uses TLS", "restart the server"]);
    assert!(server.stop(Signal::TERM).success());
}

#[test]
fn sandbox_reads_only_credentials_of_the_configuration() {
    let Some((export, folder, file)) = psk_server() else { return };
    let place = Place::new();
    let server = Server::start(serve(&place, &uri(&export, &psk(&file))));
    let other = keys(&folder, "other.psk", KEY);
    let words =
        [format!("image={}", uri(&export, &psk(&other))), format!("socket={}", place.socket("t").display())];
    let refused = refusal(ctl(&place, &["add", "name=other", &words[0], &words[1]]));
    assert_says(&refused, &["other.psk cannot be read", "the sandbox does not allow this file"]);
    assert!(server.stop(Signal::TERM).success());
}
