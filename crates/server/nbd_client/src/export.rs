//! One export, as all workers of its disk share it: its properties, and the connections that no worker uses now.
//!
//! `connect → Export → attach (a Link per worker) … the link's connection is given back → the next link`
//!
//! - Only a server that promises it (`NBD_FLAG_CAN_MULTI_CONN`) gets several connections at a time. Otherwise a flush
//!   would cover only the writes of its own connection.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::dial::Dial;
use crate::error::NbdError;
use crate::handshake::{ExportInfo, ask, negotiate};
use crate::inbox::{Connection, Shared};
use crate::protocol::{CMD_DISC, REQUEST_MAGIC};
use crate::replies::{Replies, Step};
use crate::requests::{Command, HEADER_BYTES, Request, Requests};
use crate::uri::NbdUri;
use crate::wire::{Wire, send};

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
}

/// An export of an NBD server.
#[derive(Debug)]
pub struct Export {
    uri: NbdUri,
    options: ExportOptions,
    dial: Arc<dyn Dial>,
    info: ExportInfo,
    size_bytes: AtomicU64,
    state: Mutex<State>,
}

impl Export {
    /// Connects to the export. Blocks for up to twice `options.connect_timeout`, with TLS four times.
    ///
    /// # Errors
    /// [`NbdError`].
    pub fn connect(uri: &NbdUri, options: ExportOptions, dial: Arc<dyn Dial>) -> Result<Arc<Self>, NbdError> {
        let socket = connected(dial.as_ref(), uri, options.connect_timeout)?;
        let (socket, info) = negotiate(socket, uri, dial.as_ref(), options.connect_timeout)?;
        let spare = Some(Connection { socket, structured: info.structured });
        Ok(Arc::new(Self {
            uri: uri.clone(),
            options,
            dial,
            info,
            size_bytes: AtomicU64::new(info.size_bytes),
            state: Mutex::new(State { spare, links: Vec::new() }),
        }))
    }

    /// The export's properties when the disk was opened.
    #[must_use]
    pub fn info(&self) -> ExportInfo {
        self.info
    }

    /// The export's URI.
    #[must_use]
    pub fn uri(&self) -> &NbdUri {
        &self.uri
    }

    /// How long a request may stay without a reply.
    #[must_use]
    pub fn request_timeout(&self) -> Duration {
        self.options.request_timeout
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
        let socket = connected(self.dial.as_ref(), &self.uri, self.options.connect_timeout)?;
        let info = ask(socket, &self.uri, self.dial.as_ref(), self.options.connect_timeout)?;
        self.size_bytes.store(info.size_bytes, Ordering::Relaxed);
        Ok(info.size_bytes)
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
        if !self.info.can_flush() {
            return Ok(());
        }
        let busy = self.links().into_iter().find(|link| link.has_connection());
        if let Some(link) = busy {
            return link.flush(deadline);
        }
        let spare = self.state().spare.take();
        let connection = spare.map_or_else(|| self.open_connection().map_err(io::Error::other), Ok)?;
        let left = deadline.saturating_duration_since(Instant::now());
        let flushed = flush_on(&connection, left);
        if flushed.is_ok() {
            self.give_back(connection);
        }
        flushed
    }

    /// Keeps a connection for the next link.
    pub(crate) fn give_back(&self, connection: Connection) {
        let waiting = self.links().into_iter().find(|link| link.wants_connection());
        match waiting {
            Some(link) => link.deliver(connection),
            None => self.state().spare = Some(connection),
        }
    }

    /// Whether this link may have a connection now.
    pub(crate) fn may_connect(&self, shared: &Arc<Shared>) -> bool {
        let is_other = |link: &Arc<Shared>| !Arc::ptr_eq(link, shared) && link.has_connection();
        self.info.can_multi_conn() || !self.links().iter().any(is_other)
    }

    /// Opens one more connection. The export must still have the properties with which the disk was opened.
    pub(crate) fn open_connection(&self) -> Result<Connection, NbdError> {
        let socket = connected(self.dial.as_ref(), &self.uri, self.options.connect_timeout)?;
        let (socket, info) = negotiate(socket, &self.uri, self.dial.as_ref(), self.options.connect_timeout)?;
        match self.info.weakened_in(info) {
            Some(problem) => {
                let (address, export) = (self.uri.address.clone(), self.uri.export.clone());
                Err(NbdError::Unusable { address, export, problem })
            }
            None => Ok(Connection { socket, structured: info.structured }),
        }
    }

    fn links(&self) -> Vec<Arc<Shared>> {
        self.state().links.iter().filter_map(Weak::upgrade).collect()
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

fn connected(dial: &dyn Dial, uri: &NbdUri, timeout: Duration) -> Result<OwnedFd, NbdError> {
    let address = || uri.address.clone();
    dial.dial(&uri.address, timeout).map_err(|source| NbdError::Connect { address: address(), source })
}

/// A flush on a connection without other requests.
fn flush_on(connection: &Connection, timeout: Duration) -> io::Result<()> {
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
            (_, Step::Done { error: 0, .. }) => return Ok(()),
            (_, Step::Done { error, .. }) => {
                return Err(io::Error::other(format!("the NBD server cannot flush: error {error}")));
            }
            (_, step) => {
                return Err(io::Error::other(format!("the NBD server answers a flush with {step:?}")));
            }
        }
    }
}
