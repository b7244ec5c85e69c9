//! Files with credentials: what is accepted, and errors that show no key.

use std::path::Path;

use super::pki::{CLIENT, Pki, VALID, library, psk_with};
use crate::{Credentials, PskKey, TlsError, X509Pem};

fn find(contents: &str, username: &str) -> Result<PskKey, TlsError> {
    PskKey::find(contents.as_bytes(), username, Path::new("keys.psk"))
}

#[test]
fn key_is_found_by_its_user_and_read_from_hexadecimal_digits() {
    let key = find("a:00\n\nb:01:0aFF\r\nb:99", "b:01").unwrap();
    assert_eq!(*key.key, [0x0a, 0xff]);
}

#[test]
fn file_without_the_user_is_an_error_that_names_both() {
    let error = find("vm10:00\n", "vm1").unwrap_err().to_string();
    assert_eq!(error, "keys.psk has no key for the user 'vm1': add a line 'vm1:KEY' (psktool)");
}

#[test]
fn malformed_keys_are_errors_that_name_the_line_and_not_the_key() {
    for key in ["", "abc", "secret", "0x12"] {
        let error = find(&format!("a:00\nvm1:{key}\n"), "vm1").unwrap_err();
        assert!(matches!(error, TlsError::BadPsk { line: 2, .. }), "{error:?}");
        assert!(key.is_empty() || !format!("{error} {error:?}").contains(key));
    }
}

#[test]
fn keys_are_not_in_the_debug_output() {
    let key = find("vm1:ffff", "vm1").unwrap();
    assert_eq!(format!("{key:?}"), r#"PskKey { username: "vm1", .. }"#);
    assert_eq!(format!("{:?}", Credentials::psk(library(), &key).unwrap()), "Credentials(Psk)");
}

#[test]
fn user_with_a_zero_byte_is_an_error() {
    assert!(matches!(psk_with("a\0b", &[1]), Err(TlsError::BadName { .. })));
}

#[test]
fn folder_without_the_cas_certificate_is_an_error_that_names_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let error = X509Pem::read(folder.path(), &|path| std::fs::read(path)).unwrap_err().to_string();
    assert!(error.contains("ca-cert.pem cannot be read"), "{error}");
}

#[test]
fn clients_key_without_its_certificate_is_an_error_that_names_both() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["ca-cert.pem", "client-key.pem"] {
        std::fs::write(folder.path().join(name), "").unwrap();
    }
    let error = X509Pem::read(folder.path(), &|path| std::fs::read(path)).unwrap_err().to_string();
    assert!(
        error.contains("client-key.pem exists, but ") && error.contains("client-cert.pem does not"),
        "{error}"
    );
}

#[test]
fn bytes_that_are_no_certificates_are_refused() {
    for text in ["", "nonsense", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"] {
        let pem = X509Pem { ca_cert: text.into(), client: None };
        let error = Credentials::x509(library(), &pem).unwrap_err();
        assert!(matches!(error, TlsError::BadCa { .. }), "{text}: {error:?}");
    }
}

#[test]
fn key_of_another_certificate_is_refused() {
    let Some(pki) = Pki::new("certtool") else { return };
    pki.issue("client", &format!("{CLIENT}\n{VALID}"));
    let mut pem = X509Pem::read(pki.folder.path(), &|path| std::fs::read(path)).unwrap();
    pem.client.as_mut().unwrap().key = pki.pem("server").key;
    let error = Credentials::x509(library(), &pem).unwrap_err();
    assert!(matches!(error, TlsError::BadClientCertificate { .. }), "{error:?}");
}
