//! One export, as all workers of its disk share it: its properties, and the connections that no worker uses now.
//!
//! `connect → Export → attach (a Link per worker) … the link's connection is given back → the next link`
//!
//! - Only a server that promises it (`NBD_FLAG_CAN_MULTI_CONN`) gets several connections at a time. Otherwise a flush
//!   would cover only the writes of its own connection.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::dial::Dial;
use crate::error::{FlushRefused, NbdError};
use crate::inbox::{Connection, Shared};
use crate::negotiation::handshake::ExportInfo;
use crate::negotiation::wire::{Wire, send};
use crate::protocol::{CMD_DISC, REQUEST_MAGIC};
use crate::server::Server;
use crate::transmission::replies::{Replies, Step};
use crate::transmission::requests::{Command, HEADER_BYTES, Request, Requests};
use crate::uri::NbdUri;

/// How to use an export.
#[derive(Clone, Copy, Debug)]
pub struct ExportOptions {
    /// How long connecting and negotiating may take, each. The TLS handshake, and the negotiation after it, may take as
    /// long again.
    pub connect_timeout: Duration,
    /// How long a request may stay without a reply, including the time without a connection.
    pub request_timeout: Duration,
}

impl Default for ExportOptions {
    fn default() -> Self {
        Self { connect_timeout: Duration::from_secs(5), request_timeout: Duration::from_secs(30) }
    }
}

#[derive(Debug, Default)]
struct State {
    /// A connection that no link uses.
    spare: Option<Connection>,
    links: Vec<Weak<Shared>>,
    /// A connection is being opened to an export that has only one at a time.
    opening: bool,
}

impl State {
    fn links(&self) -> impl Iterator<Item = Arc<Shared>> {
        self.links.iter().filter_map(Weak::upgrade)
    }
}

/// What the thread that connects a link has to do.
#[derive(Debug)]
pub(crate) enum Turn {
    /// Nothing: the link has a connection.
    Done,
    /// Another link has the only connection.
    Wait,
    /// Open a connection, and then call [`Export::end_opening`].
    Open(Arc<Server>),
}

/// An export of an NBD server.
#[derive(Debug)]
pub struct Export {
    server: Arc<Server>,
    request_timeout: Duration,
    size_bytes: AtomicU64,
    state: Mutex<State>,
    /// `State::opening` has become false.
    opened: Condvar,
}

impl Export {
    /// Connects to the export. Blocks for up to twice `options.connect_timeout`, with TLS four times.
    ///
    /// # Errors
    /// [`NbdError`].
    pub fn connect(uri: &NbdUri, options: ExportOptions, dial: Arc<dyn Dial>) -> Result<Arc<Self>, NbdError> {
        let (server, connection) = Server::connect(uri, options.connect_timeout, dial)?;
        let size_bytes = AtomicU64::new(server.info.size_bytes);
        Ok(Arc::new(Self {
            server: Arc::new(server),
            request_timeout: options.request_timeout,
            size_bytes,
            state: Mutex::new(State { spare: Some(connection), ..State::default() }),
            opened: Condvar::new(),
        }))
    }

    /// The export's properties when the disk was opened.
    #[must_use]
    pub fn info(&self) -> ExportInfo {
        self.server.info
    }

    /// The export's URI.
    #[must_use]
    pub fn uri(&self) -> &NbdUri {
        &self.server.uri
    }

    /// How long a request may stay without a reply.
    #[must_use]
    pub fn request_timeout(&self) -> Duration {
        self.request_timeout
    }

    /// The latest size that the server has stated.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        // Relaxed: no other data depends on it.
        self.size_bytes.load(Ordering::Relaxed)
    }

    /// Asks the server for the size again, on a connection of its own. Blocks as [`Export::connect`] does.
    ///
    /// # Errors
    /// [`NbdError`].
    pub fn refresh_size(&self) -> Result<u64, NbdError> {
        let size_bytes = self.server.ask()?.size_bytes;
        self.size_bytes.store(size_bytes, Ordering::Relaxed);
        Ok(size_bytes)
    }

    /// Adds a link. Gives it the spare connection, if there is one.
    pub(crate) fn attach(&self, link: &Arc<Shared>) {
        let mut state = self.state();
        state.links.retain(|link| link.strong_count() > 0);
        state.links.push(Arc::downgrade(link));
        if let Some(spare) = state.spare.take() {
            link.deliver(spare);
        }
    }

    /// Makes all writes durable whose replies have arrived. Blocks until `deadline`.
    ///
    /// # Errors
    /// Errors of the connection, and the server's.
    pub fn flush(&self, deadline: Instant) -> io::Result<()> {
        if !self.info().can_flush() {
            return Ok(());
        }
        let mut state = self.state();
        loop {
            let busy = state.links().find(|link| link.has_connection());
            if let Some(link) = busy {
                drop(state);
                return link.flush(deadline);
            }
            if !state.opening {
                break;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            (state, _) = self.opened.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner);
        }
        state.opening = !self.info().can_multi_conn();
        let spare = state.spare.take();
        drop(state);
        let flushed = self.flush_on_spare(spare, deadline);
        self.end_opening();
        flushed
    }

    /// Flushes on a connection that no link uses, and keeps it.
    fn flush_on_spare(&self, mut spare: Option<Connection>, deadline: Instant) -> io::Result<()> {
        loop {
            let is_old = spare.is_some();
            let open = || self.server.open_connection().map_err(io::Error::other);
            let connection = spare.take().map_or_else(open, Ok)?;
            match flush_on(&connection, deadline.saturating_duration_since(Instant::now())) {
                Ok(error) => {
                    self.give_back(connection);
                    let refused = || io::Error::other(FlushRefused(error));
                    return if error == 0 { Ok(()) } else { Err(refused()) };
                }
                // The server may have been restarted since the connection was last used.
                Err(source) if is_old && source.kind() != io::ErrorKind::TimedOut => {}
                Err(source) => return Err(source),
            }
        }
    }

    /// Keeps a connection for the next link, or gives it to one that waits.
    pub(crate) fn give_back(&self, mut connection: Connection) {
        let mut state = self.state();
        for link in state.links() {
            match link.offer(connection) {
                Ok(()) => return,
                Err(refused) => connection = refused,
            }
        }
        state.spare = Some(connection);
    }

    /// Begins to connect a link. Two threads must not both find that an export with only one connection has none.
    pub(crate) fn begin_opening(&self, shared: &Arc<Shared>) -> Turn {
        let mut state = self.state();
        if !shared.wants_connection() {
            return Turn::Done;
        }
        let only_one = !self.info().can_multi_conn();
        let has_another = |link: Arc<Shared>| !Arc::ptr_eq(&link, shared) && link.has_connection();
        if only_one && (state.opening || state.links().any(has_another)) {
            return Turn::Wait;
        }
        if let Some(spare) = state.spare.take() {
            state.spare = shared.offer(spare).err();
            return Turn::Done;
        }
        state.opening = only_one;
        Turn::Open(Arc::clone(&self.server))
    }

    /// Ends what [`Export::begin_opening`] began, after the connection was handed over.
    pub(crate) fn end_opening(&self) {
        self.state().opening = false;
        self.opened.notify_all();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Export {
    /// Tells the server that the spare connection ends on purpose.
    fn drop(&mut self) {
        if let Some(Connection { socket, .. }) = self.state().spare.take() {
            let mut header = [0; HEADER_BYTES];
            header[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
            header[6..8].copy_from_slice(&CMD_DISC.to_be_bytes());
            let _ = send(&socket, &header);
        }
    }
}

/// A flush on a connection without other requests. Returns the server's error number; 0: it has flushed.
fn flush_on(connection: &Connection, timeout: Duration) -> io::Result<u32> {
    let wire = Wire::new(&connection.socket, timeout);
    let mut requests = Requests::new(1);
    let flush = Request { command: Command::Flush, offset_bytes: 0, len_bytes: 0 };
    let Some(slot) = requests.insert(flush) else { return Err(io::ErrorKind::OutOfMemory.into()) };
    wire.send(&requests.header(slot))?;
    requests.mark_sent(slot);
    let mut replies = Replies::new(connection.structured);
    loop {
        // A reply has a few bytes: what follows it stays in the socket.
        let byte = wire.receive_array::<1>()?;
        match replies.step(&mut requests, &byte).map_err(io::Error::other)? {
            (_, Step::NeedsBytes) => {}
            (_, Step::Done { error, .. }) => return Ok(error),
            (_, step) => {
                return Err(io::Error::other(format!("the NBD server answers a flush with {step:?}")));
            }
        }
    }
}

#[cfg(test)]
#[path = "export_tests.rs"]
mod tests;
