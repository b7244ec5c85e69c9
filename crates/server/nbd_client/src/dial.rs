//! Connects to NBD servers. A program with a sandbox, or with TLS, implements [`Dial`] itself.

use std::fmt::{self, Debug};
use std::io;
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::net::sockopt;

use crate::tls::Tls;
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
            Address::Unix(path) => Ok(UnixStream::connect(path)?.into()),
            Address::Tcp { host, port } => connect_tcp(host, *port, timeout).map(OwnedFd::from),
        }
    }
}

/// Tries all addresses of the host within `timeout`.
fn connect_tcp(host: &str, port: u16, timeout: Duration) -> io::Result<TcpStream> {
    let deadline = Instant::now() + timeout;
    let mut latest = io::Error::new(io::ErrorKind::NotFound, format!("host {host} has no address"));
    for address in (host, port).to_socket_addrs()? {
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
