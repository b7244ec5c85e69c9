//! The client's end of TLS for a connected socket: PSK or X.509, through GnuTLS.
//!
//! ```text
//! library.rs (loads GnuTLS) → files.rs (PEM, PSK file) → credentials.rs
//! connect: caller ─ socket pair ─ thread: handshake.rs, then relay.rs ─ session.rs (GnuTLS) ─ socket ─ server
//! ```
//!
//! - The caller gets an ordinary Unix stream socket, so the code that uses it does not know about TLS.
//! - One thread for each connection does the handshake and copies afterwards. It runs with the role
//!   [`Role::TlsRelay`], so code that parses the server's bytes may make the fewest system calls.
//! - GnuTLS reads and writes only memory; all system calls on sockets are in this crate.
//! - Only `library.rs`, `credentials.rs` and `session.rs` contain `unsafe`.
//!
//! Why GnuTLS, and why not kernel TLS: docs/decisions/0062-tls-through-gnutls.md.

mod credentials;
mod error;
mod files;
mod handshake;
mod library;
mod queue;
mod relay;
mod session;
mod wire;

#[cfg(test)]
mod tests;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

pub use credentials::Credentials;
pub use error::{CertificateFault, TlsError};
pub use files::{ClientPem, PskKey, ReadFile, X509Pem};
pub use library::Library;
use relay::Relay;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use sandbox::{Entry, Role};
use session::Session;

/// Stack size of a connection's thread. GnuTLS needs much of it only for the largest keys, which a server may choose.
const STACK_BYTES: usize = 1 << 20;

/// A TLS connection. It ends when the caller closes `socket`, or when the server ends it. After the server's last bytes,
/// `socket` then reports the end of the stream, or `ECONNRESET` if bytes that the caller has written are lost.
#[derive(Debug)]
pub struct Connection {
    /// A blocking Unix stream socket that carries the decrypted bytes.
    pub socket: OwnedFd,
    /// Why the connection has ended.
    pub end: End,
}

/// Tells why a connection has ended.
#[derive(Debug, Clone, Default)]
pub struct End(Arc<OnceLock<TlsError>>);

impl End {
    /// The error that ended the connection. It is known before the socket reports the end of the stream. `None`: the
    /// connection has not ended, or one side has closed it in the orderly way.
    #[must_use]
    pub fn error(&self) -> Option<&TlsError> {
        self.0.get()
    }
}

/// Does the TLS handshake on a connected stream socket, within `timeout`.
///
/// With X.509 credentials, the server's certificate must be valid for `host` (a name or an IP address). Without `host`,
/// any certificate of the CA is accepted.
///
/// The server may refuse a client's certificate after the handshake (TLS 1.3); [`End::error`] then reports it.
///
/// # Errors
/// [`TlsError`]: the socket is closed.
pub fn connect(
    socket: OwnedFd,
    host: Option<&str>,
    credentials: &Credentials,
    timeout: Duration,
) -> Result<Connection, TlsError> {
    let deadline = Instant::now() + timeout;
    let pair = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
    let (ours, plain) = pair.map_err(|errno| TlsError::system("make a pair of sockets", errno))?;
    let end = End::default();
    let (done, outcome) = sync_channel(1);
    let (credentials, host) = (credentials.clone(), host.map(str::to_owned));
    let relayed = end.clone();
    let body = move || {
        let shaken = Session::new(&credentials, host.as_deref())
            .and_then(|session| handshake::perform(session, &socket, deadline, timeout));
        let Some(session) = tell(&done, shaken) else { return };
        let mut relay = Relay::new(session, socket, plain);
        if let Err(error) = relay.run() {
            // Set once: only this thread sets it. The relay's sockets close afterwards.
            let _ = relayed.0.set(error);
        }
    };
    start(body).map_err(|source| TlsError::system("start a thread for TLS", source))?;
    // The thread sends its result or panics.
    outcome.recv().unwrap_or(Err(TlsError::Failed { reason: "the thread has panicked".to_owned() }))?;
    Ok(Connection { socket: ours, end })
}

/// Tells the caller the handshake's result. `None`: the thread ends.
fn tell(done: &SyncSender<Result<(), TlsError>>, shaken: Result<Session, TlsError>) -> Option<Session> {
    let (result, session) = match shaken {
        Ok(session) => (Ok(()), Some(session)),
        Err(error) => (Err(error), None),
    };
    // The caller waits for it, so that this cannot fail.
    let _ = done.send(result);
    session
}

fn start(body: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let entry = Entry::of(Role::TlsRelay);
    let builder = std::thread::Builder::new().name("bareblk-tls".into()).stack_size(STACK_BYTES);
    let body = move || {
        entry.enter_or_end();
        body();
    };
    builder.spawn(body).map(drop)
}
