//! The control socket and the monitor socket: decides who may connect, and starts a thread for each client.
//!
//! - `blk_server::Socket` creates them as it creates disks' sockets.
//! - The control socket has mode 0600. The kernel names the client's user (`SO_PEERCRED`, unix(7)). Root and the server's
//!   own user may connect; other users are refused, even if an operator widens the socket's mode.
//! - The monitor socket has mode 0660: its group may query the server. All its clients together get a part of one
//!   processor (`pace.rs`).

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use blk_server::{Allowed, LogLimit, Socket, SocketConfig, SocketError};
use disk_image::Opener;
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use rustix::process::geteuid;
use tracing::{error, warn};

use super::Control;
use super::clients::{Client, Clients};
use super::limits::{MAX_CLIENTS, MAX_MONITOR_CLIENTS};
use super::pace::Pace;
use super::protocol::answer::{ErrorKind, Fault};
use super::session;
use crate::live_upgrade;

/// Stack size of a client's thread: enough to parse the deepest JSON that the parser accepts, and to open a disk.
const CLIENT_STACK_BYTES: usize = 1 << 20;
/// root's user id.
const ROOT: u32 = 0;
/// The pause after an `accept` that failed for lack of resources.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What the clients of a socket may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rights {
    /// Everything.
    Control,
    /// Query the server, but change nothing.
    Monitor,
}

impl Rights {
    /// The word for the socket, in errors and in the log.
    fn word(self) -> &'static str {
        match self {
            Self::Control => "control",
            Self::Monitor => "monitor",
        }
    }

    fn max_clients(self) -> usize {
        match self {
            Self::Control => MAX_CLIENTS,
            Self::Monitor => MAX_MONITOR_CLIENTS,
        }
    }
}

/// Why there is no control socket, or no monitor socket.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// See [`SocketError`].
    #[error("{0} socket")]
    Socket(&'static str, #[source] SocketError),
    /// The kernel refuses a thread or a descriptor.
    #[error("cannot start the {0} socket's thread")]
    Thread(&'static str, #[source] std::io::Error),
}

/// A socket that accepts no clients yet. The server binds it early, so that a wrong path fails at once.
#[derive(Debug)]
pub struct ControlSocket {
    socket: Arc<Socket>,
    path: PathBuf,
    rights: Rights,
}

impl ControlSocket {
    /// Binds the socket.
    ///
    /// # Errors
    /// [`ControlError::Socket`].
    pub fn bind(
        opener: &Arc<dyn Opener>,
        config: SocketConfig,
        rights: Rights,
    ) -> Result<Self, ControlError> {
        let socket =
            Socket::bind(opener, &config).map_err(|error| ControlError::Socket(rights.word(), error))?;
        Ok(Self { socket: Arc::new(socket), path: config.path, rights })
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
        let rights = self.rights;
        let failed = |error| ControlError::Thread(rights.word(), error);
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let quit = Arc::new(eventfd(0, flags).map_err(|errno| failed(errno.into()))?);
        let clients = Arc::new(Clients::new(rights.max_clients()));
        let pace = (rights == Rights::Monitor).then(|| Arc::new(Pace::new()));
        let acceptor = Acceptor {
            socket: self,
            pace,
            quit: Arc::clone(&quit),
            clients: Arc::clone(&clients),
            control,
            limit: LogLimit::new(Instant::now()),
        };
        let thread = std::thread::Builder::new().name(format!("bareblk-{}", rights.word()));
        let thread = thread.spawn(move || acceptor.run()).map_err(failed)?;
        Ok(ControlServer { quit, clients, thread: Some(thread) })
    }
}

/// A socket that accepts clients. Dropping it ends all connections, even those that wait for the server's end.
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
    /// Only the monitor socket has one.
    pace: Option<Arc<Pace>>,
    limit: LogLimit,
}

impl Acceptor {
    /// Sleeps until a client connects or `quit` is signalled.
    fn run(mut self) {
        loop {
            match self.wait() {
                Ok(true) => {}
                Ok(false) => return,
                Err(errno) => {
                    return error!("cannot accept {} clients any more: {errno}", self.socket.rights.word());
                }
            }
            match accept_with(&*self.socket.socket, SocketFlags::CLOEXEC) {
                Ok(stream) => match self.pace.clone() {
                    Some(pace) => pace.charge(|| self.accept(stream.into())),
                    None => self.accept(stream.into()),
                },
                Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => {}
                Err(errno) => {
                    self.warn(&format!("cannot accept a client: {errno}"));
                    std::thread::sleep(ACCEPT_PAUSE);
                }
            }
        }
    }

    /// False: `quit` was signalled.
    fn wait(&self) -> Result<bool, Errno> {
        let mut quit = [PollFd::new(&self.quit, PollFlags::IN)];
        let pause = self.pace.as_ref().map(|pace| pace.wait()).filter(|pause| !pause.is_zero());
        if let Some(pause) = pause.and_then(|pause| pause.try_into().ok())
            && poll_again(&mut quit, Some(&pause))? > 0
        {
            return Ok(false);
        }
        let [quit] = quit;
        let mut fds = [PollFd::new(&*self.socket.socket, PollFlags::IN), quit];
        poll_again(&mut fds, None)?;
        Ok(fds[1].revents().is_empty())
    }

    fn accept(&mut self, stream: UnixStream) {
        let checked = if self.socket.rights == Rights::Control { check_peer(&stream) } else { Ok(()) };
        if let Err(fault) = checked {
            self.warn(&fault.message);
            return refuse(&stream, fault);
        }
        match self.clients.add(stream) {
            Ok(client) => self.start(client),
            Err(stream) => {
                let max = self.socket.rights.max_clients();
                let message = format!(
                    "{max} clients are connected, which is the limit: disconnect one, or try again later"
                );
                self.warn(&message);
                refuse(&stream, Fault::new(ErrorKind::TooManyClients, message));
            }
        }
    }

    fn start(&mut self, client: Arc<Client>) {
        let (clients, control, pace) =
            (Arc::clone(&self.clients), Arc::clone(&self.control), self.pace.clone());
        let presence = Presence { client, clients };
        let thread = std::thread::Builder::new().name("bareblk-ctl".into()).stack_size(CLIENT_STACK_BYTES);
        let started = thread.spawn(move || {
            session::run(&presence.client, &presence.clients, control.as_ref(), pace.as_deref());
            // `Clients::end_all` waits for this client; its caller may then dismantle the server.
            drop(control);
            drop(presence);
        });
        if let Err(error) = started {
            self.warn(&format!("cannot serve a client: {error}"));
        }
    }

    fn warn(&mut self, why: &str) {
        if let Some(Allowed { suppressed }) = self.limit.allow(Instant::now()) {
            let what = self.socket.rights.word();
            warn!(socket = %self.socket.path.display(), suppressed, "{what} client refused: {why}");
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

/// Does not end early when a signal arrives.
fn poll_again(fds: &mut [PollFd<'_>], timeout: Option<&Timespec>) -> Result<usize, Errno> {
    loop {
        match poll(fds, timeout) {
            Err(Errno::INTR) => {}
            polled => return polled,
        }
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
