//! Connects to NBD servers. A program with a sandbox, or with TLS, implements [`Dial`] itself.

use std::fmt::{self, Debug};
use std::io;
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use crate::look_up;
use crate::negotiation::tls::Tls;
use crate::uri::Address;

/// Opens connections to NBD servers.
pub trait Dial: Send + Sync + Debug {
    /// Connects a stream socket. Returns within about `timeout`.
    ///
    /// # Errors
    /// Errors of `connect` and of the look-up of the host's name; `PermissionDenied` without an error number if the
    /// server may not connect to this address.
    fn dial(&self, address: &Address, timeout: Duration) -> io::Result<OwnedFd>;

    /// Does the TLS handshake on a connection whose server has agreed to it. Returns within about `timeout`.
    ///
    /// # Errors
    /// The handshake failed, and why. `TimedOut`: a later attempt may succeed.
    fn start_tls(&self, socket: OwnedFd, tls: &Tls, timeout: Duration) -> io::Result<Secured> {
        let _ = (socket, tls, timeout);
        Err(io::Error::new(io::ErrorKind::Unsupported, "this program has no TLS"))
    }
}

/// A connection after the TLS handshake.
pub struct Secured {
    /// A stream socket that carries the decrypted bytes.
    pub socket: OwnedFd,
    /// Why the connection has ended, if TLS knows: a server may refuse a client's certificate after the handshake.
    pub end: Box<dyn Fn() -> Option<String> + Send>,
}

impl fmt::Debug for Secured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Secured").field("socket", &self.socket).finish_non_exhaustive()
    }
}

/// Connects with the rights of this process.
#[derive(Clone, Copy, Debug)]
pub struct HostDialer;

impl Dial for HostDialer {
    fn dial(&self, address: &Address, timeout: Duration) -> io::Result<OwnedFd> {
        match address {
            Address::Unix(path) => connect_unix(path, timeout),
            Address::Tcp { host, port } => connect_tcp(host, *port, timeout).map(OwnedFd::from),
        }
    }
}

/// Waits at most `timeout` for a server that accepts no connections: its queue of connections is short, and full after
/// a few attempts.
fn connect_unix(path: &Path, timeout: Duration) -> io::Result<OwnedFd> {
    let address = SocketAddrUnix::new(path)?;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // `connect` waits as long as a send would (unix(7)).
    sockopt::set_socket_timeout(&socket, Timeout::Send, Some(timeout))?;
    loop {
        match connect(&socket, &address) {
            Ok(()) => break,
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Err(io::ErrorKind::TimedOut.into()),
            Err(errno) => return Err(errno.into()),
        }
    }
    sockopt::set_socket_timeout(&socket, Timeout::Send, None)?;
    Ok(socket)
}

/// Looks the host up, and tries all its addresses, within `timeout`.
fn connect_tcp(host: &str, port: u16, timeout: Duration) -> io::Result<TcpStream> {
    let deadline = Instant::now() + timeout;
    let mut latest = io::Error::new(io::ErrorKind::NotFound, format!("host {host} has no address"));
    for address in look_up::addresses(host, port, timeout)? {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        match TcpStream::connect_timeout(&address, left) {
            Ok(stream) => {
                stream.set_nodelay(true)?;
                // Without it, a server that lost its power would never be noticed while no request is in flight.
                sockopt::set_socket_keepalive(&stream, true)?;
                return Ok(stream);
            }
            Err(error) => latest = error,
        }
    }
    Err(latest)
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket};

    use super::*;

    /// A socket that listens, and accepts nothing.
    fn listener(backlog: i32) -> (tempfile::TempDir, Address, OwnedFd) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("nbd.sock");
        let listener = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        listen(&listener, backlog).unwrap();
        (folder, Address::Unix(path), listener)
    }

    /// A server that was stopped, with `SIGSTOP` for example, has such a socket after a few attempts.
    #[test]
    fn unix_server_that_accepts_nothing_is_given_up_after_the_timeout() {
        let (_folder, address, _listener) = listener(0);
        let timeout = Duration::from_millis(20);
        let attempts: Vec<_> = (0..4).map(|_| HostDialer.dial(&address, timeout)).collect();
        let latest = attempts.last().unwrap().as_ref().unwrap_err();
        assert!(attempts[0].is_ok());
        assert_eq!(latest.kind(), io::ErrorKind::TimedOut);
    }

    #[test]
    fn unix_server_that_is_away_is_an_error_at_once_and_a_connection_carries_bytes() {
        let (folder, address, listener) = listener(1);
        let away = Address::Unix(folder.path().join("other.sock"));
        let error = HostDialer.dial(&away, Duration::from_secs(300)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        let socket = HostDialer.dial(&address, Duration::from_secs(300)).unwrap();
        let accepted = rustix::net::accept(&listener).unwrap();
        rustix::io::write(&socket, b"x").unwrap();
        assert_eq!(rustix::io::read(&accepted, &mut [0; 4]), Ok(1));
    }
}
