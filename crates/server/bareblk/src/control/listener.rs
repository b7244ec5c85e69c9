//! The control socket: decides who may connect, and starts a thread for each client.
//!
//! - `blk_server::Socket` creates it as it creates disks' sockets, with mode 0600.
//! - The kernel names the client's user (`SO_PEERCRED`, unix(7)). Root and the server's own user may connect; other
//!   users are refused, even if an operator widens the socket's mode.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use blk_server::{Allowed, LogLimit, Socket, SocketConfig, SocketError};
use disk_image::Opener;
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use rustix::process::geteuid;
use tracing::{error, warn};

use super::Control;
use super::clients::{Client, Clients};
use super::limits::MAX_CLIENTS;
use super::protocol::{ErrorKind, Fault};
use super::session;
use crate::live_upgrade;

/// Stack size of a client's thread: enough to parse the deepest JSON that the parser accepts, and to open a disk.
const CLIENT_STACK_BYTES: usize = 1 << 20;
/// root's user id.
const ROOT: u32 = 0;
/// The pause after an `accept` that failed for lack of resources.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Why there is no control socket.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// See [`SocketError`].
    #[error("control socket")]
    Socket(#[from] SocketError),
    /// There are no more threads or descriptors.
    #[error("cannot start the control socket's thread")]
    Thread(#[source] std::io::Error),
}

/// A control socket that accepts no clients yet. The server binds it early, so that a wrong path fails at once.
#[derive(Debug)]
pub struct ControlSocket {
    socket: Arc<Socket>,
    path: PathBuf,
}

impl ControlSocket {
    /// Binds the socket.
    ///
    /// # Errors
    /// [`ControlError::Socket`].
    pub fn bind(opener: &Arc<dyn Opener>, path: &Path) -> Result<Self, ControlError> {
        let config = SocketConfig { path: path.to_owned(), mode: 0o600, uid: None, gid: None };
        Ok(Self { socket: Arc::new(Socket::bind(opener, &config)?), path: path.to_owned() })
    }

    /// The part of the socket that a live upgrade hands over.
    pub fn listener(&self) -> live_upgrade::ControlListener {
        live_upgrade::ControlListener { socket: Arc::clone(&self.socket), path: self.path.clone() }
    }

    /// Serves clients until dropped.
    ///
    /// # Errors
    /// [`ControlError::Thread`].
    pub fn serve(self, control: Arc<dyn Control>) -> Result<ControlServer, ControlError> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let quit = eventfd(0, flags).map_err(|errno| ControlError::Thread(errno.into()))?;
        let quit = Arc::new(quit);
        let clients = Arc::new(Clients::default());
        let acceptor = Acceptor {
            socket: self,
            quit: Arc::clone(&quit),
            clients: Arc::clone(&clients),
            control,
            limit: LogLimit::new(Instant::now()),
        };
        let thread = std::thread::Builder::new().name("bareblk-control".into());
        let thread = thread.spawn(move || acceptor.run()).map_err(ControlError::Thread)?;
        Ok(ControlServer { quit, clients, thread: Some(thread) })
    }
}

/// A control socket that accepts clients. Dropping it ends all connections, even those that wait for the server's end.
#[derive(Debug)]
pub struct ControlServer {
    quit: Arc<OwnedFd>,
    clients: Arc<Clients>,
    thread: Option<JoinHandle<()>>,
}

impl ControlServer {
    /// Removes the socket and ends all connections except those of clients that asked for the stop. Waits up to
    /// `timeout` for running requests. Returns false if some still run: they may use the [`Control`].
    pub fn close(&mut self, timeout: Duration) -> bool {
        // The write fails only if the counter is full, because the event was signalled before.
        let _ = rustix::io::write(&self.quit, &1_u64.to_ne_bytes());
        let _ = self.thread.take().map(JoinHandle::join);
        self.clients.end_all(timeout)
    }
}

impl Drop for ControlServer {
    fn drop(&mut self) {
        self.close(Duration::ZERO);
    }
}

/// The state of the accepting thread.
struct Acceptor {
    socket: ControlSocket,
    quit: Arc<OwnedFd>,
    clients: Arc<Clients>,
    control: Arc<dyn Control>,
    limit: LogLimit,
}

impl Acceptor {
    /// Sleeps until a client connects or `quit` is signalled.
    fn run(mut self) {
        loop {
            let mut fds =
                [PollFd::new(&*self.socket.socket, PollFlags::IN), PollFd::new(&self.quit, PollFlags::IN)];
            match poll(&mut fds, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return error!("cannot accept control clients any more: {errno}"),
            }
            if !fds[1].revents().is_empty() {
                return;
            }
            match accept_with(&*self.socket.socket, SocketFlags::CLOEXEC) {
                Ok(stream) => self.accept(stream.into()),
                Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => {}
                Err(errno) => {
                    self.warn(&format!("cannot accept a control client: {errno}"));
                    std::thread::sleep(ACCEPT_PAUSE);
                }
            }
        }
    }

    fn accept(&mut self, stream: UnixStream) {
        if let Err(fault) = check_peer(&stream) {
            self.warn(&fault.message);
            return refuse(&stream, fault);
        }
        match self.clients.add(stream) {
            Ok(client) => self.start(client),
            Err(stream) => {
                let message = format!(
                    "{MAX_CLIENTS} clients are connected, which is the limit: disconnect one, or try again later"
                );
                self.warn(&message);
                refuse(&stream, Fault::new(ErrorKind::TooManyClients, message));
            }
        }
    }

    fn start(&mut self, client: Arc<Client>) {
        let (clients, control) = (Arc::clone(&self.clients), Arc::clone(&self.control));
        let presence = Presence { client, clients };
        let thread = std::thread::Builder::new().name("bareblk-ctl".into()).stack_size(CLIENT_STACK_BYTES);
        let started = thread.spawn(move || {
            session::run(&presence.client, &presence.clients, control.as_ref());
            // `Clients::end_all` waits for this client; its caller may then dismantle the server.
            drop(control);
            drop(presence);
        });
        if let Err(error) = started {
            self.warn(&format!("cannot serve a control client: {error}"));
        }
    }

    fn warn(&mut self, why: &str) {
        if let Some(Allowed { suppressed }) = self.limit.allow(Instant::now()) {
            warn!(socket = %self.socket.path.display(), suppressed, "control client refused: {why}");
        }
    }
}

/// Counts as a client until dropped, however its thread ends.
struct Presence {
    client: Arc<Client>,
    clients: Arc<Clients>,
}

impl Drop for Presence {
    fn drop(&mut self) {
        self.clients.forget(&self.client);
    }
}

fn check_peer(stream: &UnixStream) -> Result<(), Fault> {
    let own = geteuid().as_raw();
    // rustix's function cannot be used: it assumes that no peer has process number 0, as a peer in another PID
    // namespace has.
    match getsockopt(stream, PeerCredentials).map(|peer| peer.uid()) {
        Ok(peer) if peer == ROOT || peer == own => Ok(()),
        Ok(peer) => {
            let message = format!(
                "user {peer} may not control this server: connect as root or as user {own}, who runs the server"
            );
            Err(Fault::new(ErrorKind::NotAllowed, message))
        }
        Err(errno) => {
            Err(Fault::new(ErrorKind::NotAllowed, format!("cannot find out which user connects: {errno}")))
        }
    }
}

/// Sends the greeting and the reason, and never waits: two lines fit into the buffer of a new connection.
fn refuse(stream: &UnixStream, fault: Fault) {
    session::greet(stream);
    session::say_last(stream, fault);
}
