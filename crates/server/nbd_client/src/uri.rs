//! NBD URIs: which server, which export.
//!
//! `nbd://HOST[:PORT]/EXPORT`, `nbd+unix:///EXPORT?socket=PATH`; with TLS `nbds://…`, `nbds+unix://…` (`tls.rs`)

use std::borrow::Cow;
use std::ffi::OsString;
use std::fmt;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::str::FromStr;

use percent_encoding::percent_decode_str;

use crate::negotiation::tls::{Tls, TlsKeys};

/// The port that IANA has assigned to NBD.
const DEFAULT_PORT: u16 = 10809;
/// Maximum length of an export's name: "a string", proto.md, "Values".
const MAX_NAME_BYTES: usize = 4096;
/// Longest path of a Unix socket (unix(7)).
const MAX_SOCKET_PATH_BYTES: usize = 107;

/// Where an NBD server listens.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Address {
    /// A stream socket at this path.
    Unix(PathBuf),
    /// TCP.
    Tcp {
        /** A name or a numeric address. */
        host: String,
        /** The port. */
        port: u16,
    },
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "{}", path.display()),
            Self::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "{host}:{port}"),
        }
    }
}

/// An export of an NBD server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdUri {
    /// The URI as it was given.
    text: String,
    /// Where the server listens.
    pub address: Address,
    /// The export's name; empty: the server's default export.
    pub export: String,
    /// How to encrypt the connections. `None`: they are not encrypted.
    pub tls: Option<Tls>,
}

/// Why a text is no NBD URI that can be served.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UriError {
    /// The scheme is not one of NBD's.
    #[error(
        "'{uri}' is no NBD URI: write nbd://HOST[:PORT]/EXPORT or nbd+unix:///EXPORT?socket=PATH, with TLS nbds://… \
         or nbds+unix://…"
    )]
    Scheme {
        /** The text. */
        uri: String,
    },
    /// What the URI says about TLS contradicts itself, or is missing.
    #[error("'{uri}': {problem}")]
    Tls {
        /** The text. */
        uri: String,
        /** What is wrong, and what to write. */
        problem: &'static str,
    },
    /// A Unix URI with a host, or a TCP URI without one.
    #[error("'{uri}': {problem}")]
    Host {
        /** The text. */
        uri: String,
        /** What is wrong, and what to write. */
        problem: &'static str,
    },
    /// The port is no number from 1 to 65535.
    #[error("'{uri}': '{port}' is no port: give a number from 1 to 65535")]
    Port {
        /** The text. */
        uri: String,
        /** The part that should be a port. */
        port: String,
    },
    /// `socket=` is missing, empty, relative or too long.
    #[error("'{uri}': {problem} (at most {MAX_SOCKET_PATH_BYTES} bytes)")]
    Socket {
        /** The text. */
        uri: String,
        /** What is wrong, and what to write. */
        problem: &'static str,
    },
    /// The query has a key that is not known, or twice.
    #[error(
        "'{uri}': the key '{key}' is not supported here: socket= is, with nbd+unix, and with TLS tls-certificates=, \
         tls-psk-file=, tls-username= and tls-hostname=, each once"
    )]
    Key {
        /** The text. */
        uri: String,
        /** The key. */
        key: String,
    },
    /// The export's name is too long, or not UTF-8 after decoding.
    #[error("'{uri}': the export's name must be UTF-8 of at most {MAX_NAME_BYTES} bytes")]
    Export {
        /** The text. */
        uri: String,
    },
}

impl NbdUri {
    /// Whether a text begins like an NBD URI. Such a text is not taken for a path.
    #[must_use]
    pub fn is_meant(text: &str) -> bool {
        ["nbd://", "nbds://", "nbd+unix://", "nbds+unix://"].iter().any(|start| text.starts_with(start))
    }
}

impl FromStr for NbdUri {
    type Err = UriError;

    fn from_str(text: &str) -> Result<Self, UriError> {
        let uri = || text.to_owned();
        let (scheme, rest) = text.split_once("://").ok_or_else(|| UriError::Scheme { uri: uri() })?;
        let (unix, encrypted) = match scheme {
            "nbd" => (false, false),
            "nbds" => (false, true),
            "nbd+unix" => (true, false),
            "nbds+unix" => (true, true),
            _ => return Err(UriError::Scheme { uri: uri() }),
        };
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, export) = rest.split_once('/').unwrap_or((rest, ""));
        let export = percent_decode_str(export).decode_utf8();
        let export = export.ok().filter(|name| name.len() <= MAX_NAME_BYTES);
        let export = export.ok_or_else(|| UriError::Export { uri: uri() })?.into_owned();
        let Query { socket, tls } = Query::parse(query).map_err(|key| UriError::Key { uri: uri(), key })?;
        let (user, server) = user_of(text, authority)?;
        let address = match (unix, socket) {
            (true, socket) => unix_address(text, server, socket)?,
            (false, None) => tcp_address(text, server)?,
            (false, Some(_)) => return Err(UriError::Key { uri: uri(), key: "socket".to_owned() }),
        };
        let tls = tls_of(text, encrypted, tls, user, &address)?;
        Ok(Self { text: uri(), address, export, tls })
    }
}

/// The keys of a URI's query.
#[derive(Debug, Default)]
struct Query {
    socket: Option<PathBuf>,
    tls: TlsKeys,
}

impl Query {
    /// Returns a key that is not known, is repeated, or whose value should be UTF-8 and is not, as the error.
    fn parse(query: &str) -> Result<Self, String> {
        let mut found = Self::default();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            let refused = || key.to_owned();
            let path = || PathBuf::from(OsString::from_vec(percent_decode_str(value).collect()));
            let name = || percent_decode_str(value).decode_utf8().map(Cow::into_owned).map_err(|_| refused());
            let repeated = match key {
                "socket" => found.socket.replace(path()).is_some(),
                "tls-certificates" => found.tls.certificates.replace(path()).is_some(),
                "tls-psk-file" => found.tls.psk_file.replace(path()).is_some(),
                "tls-username" => found.tls.username.replace(name()?).is_some(),
                "tls-hostname" => found.tls.hostname.replace(name()?).is_some(),
                _ => return Err(refused()),
            };
            if repeated {
                return Err(refused());
            }
        }
        Ok(found)
    }
}

/// The user and the rest of an authority.
fn user_of<'a>(uri: &str, authority: &'a str) -> Result<(Option<String>, &'a str), UriError> {
    let Some((user, server)) = authority.rsplit_once('@') else { return Ok((None, authority)) };
    let wrong = |problem| UriError::Host { uri: uri.to_owned(), problem };
    if user.contains(':') {
        return Err(wrong("a password in a URI is not supported: remove it, and use tls-psk-file=PATH"));
    }
    let user = percent_decode_str(user).decode_utf8().map_err(|_| wrong("the user is not UTF-8"))?;
    Ok((Some(user.into_owned()), server))
}

/// What the URI says about TLS: nothing, unless its scheme asks for TLS.
fn tls_of(
    uri: &str,
    encrypted: bool,
    keys: TlsKeys,
    user: Option<String>,
    address: &Address,
) -> Result<Option<Tls>, UriError> {
    let wrong = |problem| UriError::Tls { uri: uri.to_owned(), problem };
    if !encrypted {
        return match (keys.is_empty(), user) {
            (false, _) => Err(wrong("the tls- keys need TLS: write nbds:// or nbds+unix://")),
            (true, Some(_)) => Err(wrong("a user in a URI means nothing without TLS: remove USER@")),
            (true, None) => Ok(None),
        };
    }
    let host = match address {
        Address::Tcp { host, .. } => Some(host.as_str()),
        Address::Unix(_) => None,
    };
    keys.tls(user, host).map(Some).map_err(wrong)
}

fn unix_address(uri: &str, authority: &str, socket: Option<PathBuf>) -> Result<Address, UriError> {
    if !authority.is_empty() {
        let problem = "a Unix socket has no host: write nbd+unix:///EXPORT?socket=PATH, with three slashes";
        return Err(UriError::Host { uri: uri.to_owned(), problem });
    }
    let wrong = |problem| UriError::Socket { uri: uri.to_owned(), problem };
    let path = socket.ok_or_else(|| wrong("the socket is missing: add ?socket=PATH"))?;
    if !path.is_absolute() {
        return Err(wrong("the path of the socket must begin with /"));
    }
    if path.as_os_str().len() > MAX_SOCKET_PATH_BYTES || path.as_os_str().as_encoded_bytes().contains(&0) {
        return Err(wrong("the path of the socket is too long or has a zero byte"));
    }
    Ok(Address::Unix(path))
}

fn tcp_address(uri: &str, authority: &str) -> Result<Address, UriError> {
    let wrong = |problem| UriError::Host { uri: uri.to_owned(), problem };
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (host, rest) = rest.split_once(']').ok_or_else(|| wrong("the address in [ has no ]"))?;
            let port = rest.strip_prefix(':');
            if port.is_none() && !rest.is_empty() {
                return Err(wrong("after ] only :PORT may follow"));
            }
            (host, port)
        }
        None => match authority.split_once(':') {
            Some((_, port)) if port.contains(':') => return Err(wrong("write an IPv6 address as [ADDRESS]")),
            Some((host, port)) => (host, Some(port)),
            None => (authority, None),
        },
    };
    if host.is_empty() {
        return Err(wrong("the host is missing: write nbd://HOST[:PORT]/EXPORT"));
    }
    let port = match port {
        None => DEFAULT_PORT,
        Some(text) => text
            .parse()
            .ok()
            .filter(|port| *port > 0 && text.bytes().all(|byte| byte.is_ascii_digit()))
            .ok_or_else(|| UriError::Port { uri: uri.to_owned(), port: text.to_owned() })?,
    };
    let host = percent_decode_str(host).decode_utf8().map_err(|_| wrong("the host is not UTF-8"))?;
    Ok(Address::Tcp { host: host.into_owned(), port })
}

impl fmt::Display for NbdUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn tcp(host: &str, port: u16) -> Address {
        Address::Tcp { host: host.to_owned(), port }
    }

    fn parts(uri: &str) -> (Address, String) {
        let NbdUri { address, export, .. } = uri.parse().unwrap();
        (address, export)
    }

    #[test]
    fn uri_is_split_into_server_and_export() {
        let unix = Address::Unix("/run/nbd.sock".into());
        assert_eq!(parts("nbd+unix:///?socket=/run/nbd.sock"), (unix.clone(), String::new()));
        assert_eq!(parts("nbd+unix:///a/b%20c?socket=%2frun/nbd.sock"), (unix, "a/b c".to_owned()));
        assert_eq!(parts("nbd://storage"), (tcp("storage", 10809), String::new()));
        assert_eq!(parts("nbd://storage:1/vm"), (tcp("storage", 1), "vm".to_owned()));
        assert_eq!(parts("nbd://[fe80::1]:9//vm"), (tcp("fe80::1", 9), "/vm".to_owned()));
    }

    #[test]
    fn uri_with_tls_says_how_both_sides_prove_who_they_are() {
        let tls = |uri: &str| uri.parse::<NbdUri>().unwrap().tls;
        let certificates = |host: Option<&str>| {
            Some(Tls::Certificates { folder: "/d e".into(), host: host.map(str::to_owned) })
        };
        let psk = || Some(Tls::Psk { file: "/f".into(), username: "vm 1".to_owned() });
        assert_eq!(tls("nbd://storage/x"), None);
        assert_eq!(tls("nbds://storage:1/x?tls-certificates=/d%20e"), certificates(Some("storage")));
        assert_eq!(tls("nbds://[::1]/x?tls-certificates=/d%20e"), certificates(Some("::1")));
        assert_eq!(tls("nbds://10.0.0.1?tls-certificates=/d%20e&tls-hostname=h"), certificates(Some("h")));
        assert_eq!(tls("nbds+unix:///x?socket=/s&tls-certificates=/d%20e"), certificates(None));
        assert_eq!(tls("nbds+unix:///x?tls-psk-file=/f&socket=/s&tls-username=vm%201"), psk());
        assert_eq!(tls("nbds+unix://vm%201@/x?tls-psk-file=/f&socket=/s"), psk());
        assert_eq!(tls("nbds://vm%201@storage:9/x?tls-psk-file=/f"), psk());
    }

    #[test]
    fn mistake_is_named_with_what_to_write() {
        let wrong = [
            ("nbd+unix:///x", "add ?socket=PATH"),
            ("nbd+unix://host/x?socket=/s", "three slashes"),
            ("nbd+unix:///x?socket=s", "must begin with /"),
            ("nbd+unix:///x?socket=/s&socket=/t", "key 'socket'"),
            ("nbd+unix:///x?socket=/s&tls-hostname=h", "need TLS: write nbds://"),
            ("nbd+unix:///x?socket=/s&tls-priority=h", "key 'tls-priority'"),
            ("nbd://h/x?socket=/s", "key 'socket'"),
            ("nbd:///x", "the host is missing"),
            ("nbd://h:0/x", "'0' is no port"),
            ("nbd://h:+1/x", "'+1' is no port"),
            ("nbd://h:65536/x", "'65536' is no port"),
            ("nbd://fe80::1/x", "[ADDRESS]"),
            ("nbd://[fe80::1/x", "has no ]"),
            ("nbd://u@h/x", "remove USER@"),
            ("nbd://h/%ff", "must be UTF-8"),
            ("nbd://u:p@h/x", "a password in a URI"),
            ("nbds://h/x", "add tls-certificates=DIR"),
            ("nbds://h/x?tls-certificates=/d&tls-psk-file=/f", "contradict each other"),
            ("nbds://h/x?tls-certificates=d", "tls-certificates= must begin with /"),
            ("nbds://u@h/x?tls-certificates=/d", "a user means nothing with tls-certificates="),
            ("nbds://h/x?tls-psk-file=/f", "add tls-username=NAME"),
            ("nbds://u@h/x?tls-psk-file=f", "tls-psk-file= must begin with /"),
            ("nbds://u@h/x?tls-psk-file=/f&tls-username=v", "different users"),
            ("nbds://u@h/x?tls-psk-file=/f&tls-hostname=h", "tls-hostname= means nothing"),
            ("nbds://u@h/x?tls-psk-file=/f&tls-psk-file=/f", "key 'tls-psk-file'"),
            ("nbds://h/x?tls-certificates=/d&tls-hostname=%ff", "key 'tls-hostname'"),
            ("http://h/x", "no NBD URI"),
        ];
        for (uri, part) in wrong {
            let error = uri.parse::<NbdUri>().unwrap_err().to_string();
            assert!(error.contains(part), "{uri}: {error}");
        }
        let long = format!("nbd+unix:///x?socket=/{}", "s".repeat(107));
        assert!(matches!(long.parse::<NbdUri>(), Err(UriError::Socket { .. })));
    }

    proptest! {
        #[test]
        fn any_text_is_a_uri_or_an_error_and_a_uri_stays_as_it_was(text in "(nbds?|nbds?\\+unix)://.{0,60}") {
            if let Ok(uri) = text.parse::<NbdUri>() {
                prop_assert_eq!(uri.to_string(), text);
            }
        }
    }
}
