//! Certificates for the tests, made by `certtool`, and a file of pre-shared keys.

use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;
use xtask::packages::find_program;
use xtask::skip::{Reason, skip};

use crate::{ClientPem, Credentials, Library, PskKey, TlsError, X509Pem};

pub(super) const HOST: &str = "storage.example";
pub(super) const USER: &str = "vm1";
const KEY: &str = "0123456789abcdef0123456789abcdef";
pub(super) const VALID: &str = "expiration_days = 10";
pub(super) const SERVER: &str = "dns_name = \"storage.example\"\nip_address = \"127.0.0.1\"\ntls_www_server";
pub(super) const CLIENT: &str = "tls_www_client";

/// A CA with the folder that servers read: `ca-cert.pem`, `server-cert.pem`, `server-key.pem`.
pub(super) struct Pki {
    pub folder: TempDir,
}

impl Pki {
    /// `None`: the test is skipped, because this machine lacks a program.
    pub fn new(program: &str) -> Option<Self> {
        Self::with_server(program, &format!("{SERVER}\n{VALID}"))
    }

    /// With these lines of certtool's template in the server's certificate.
    pub fn with_server(program: &str, lines: &str) -> Option<Self> {
        if !has(program) || !has("certtool") {
            return None;
        }
        let pki = Self { folder: tempfile::tempdir().unwrap() };
        pki.make_ca();
        pki.issue("server", lines);
        Some(pki)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn make_ca(&self) {
        self.make_key("ca");
        std::fs::write(self.path("ca.txt"), format!("cn = \"CA\"\nca\ncert_signing_key\n{VALID}\n")).unwrap();
        certtool(self.folder.path(), "--generate-self-signed --load-privkey ca-key.pem", "ca");
    }

    /// Makes `NAME-cert.pem` and `NAME-key.pem`.
    pub fn issue(&self, name: &str, lines: &str) {
        self.make_key(name);
        let text = format!("cn = \"{name}\"\nsigning_key\nencryption_key\n{lines}\n");
        std::fs::write(self.path(&format!("{name}.txt")), text).unwrap();
        let ca = "--load-ca-certificate ca-cert.pem --load-ca-privkey ca-key.pem";
        certtool(
            self.folder.path(),
            &format!("--generate-certificate --load-privkey {name}-key.pem {ca}"),
            name,
        );
    }

    fn make_key(&self, name: &str) {
        let options = format!("--generate-privkey --key-type=ecdsa --outfile {name}-key.pem");
        run_certtool(self.folder.path(), &options);
    }

    /// What a client reads; with its own certificate only if `issue("client", …)` was called.
    pub fn credentials(&self) -> Credentials {
        Credentials::x509(library(), &X509Pem::read(self.folder.path(), &|path| std::fs::read(path)).unwrap())
            .unwrap()
    }

    pub fn pem(&self, name: &str) -> ClientPem {
        let read = |kind| std::fs::read(self.path(&format!("{name}-{kind}.pem"))).unwrap();
        ClientPem { cert: read("cert"), key: read("key").into() }
    }
}

fn certtool(folder: &Path, options: &str, name: &str) {
    run_certtool(folder, &format!("{options} --template {name}.txt --outfile {name}-cert.pem"));
}

fn run_certtool(folder: &Path, options: &str) {
    let mut command = Command::new("certtool");
    let output = command.current_dir(folder).arg("--no-text").args(options.split(' ')).output().unwrap();
    assert!(output.status.success(), "{options}: {}", String::from_utf8_lossy(&output.stderr));
}

/// False: the test is skipped.
pub(super) fn has(program: &str) -> bool {
    let there = find_program(program).is_some();
    if !there {
        skip(Reason::NoProgram(program.to_owned()), "real TLS servers and certificates");
    }
    there
}

pub(super) fn library() -> &'static Library {
    Library::load().unwrap()
}

/// A folder with `keys.psk`, as servers read it.
pub(super) fn psk_folder() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("keys.psk"), format!("other:00ff\n{USER}:{KEY}\n")).unwrap();
    folder
}

pub(super) fn psk(folder: &TempDir) -> Credentials {
    let key = PskKey::read(&folder.path().join("keys.psk"), USER, &|path| std::fs::read(path)).unwrap();
    Credentials::psk(library(), &key).unwrap()
}

pub(super) fn psk_with(username: &str, key: &[u8]) -> Result<Credentials, TlsError> {
    Credentials::psk(library(), &PskKey { username: username.to_owned(), key: key.to_vec().into() })
}
