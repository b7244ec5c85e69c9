//! One worker's connection to an export.
//!
//! `attach → the engine loses its connection → reconnect (a thread) → an eventfd → take_connection`

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use crate::connector;
use crate::export::Export;
use crate::inbox::{Connection, FlushRequest, Shared};

/// One worker's access to an export.
#[derive(Debug)]
pub struct Link {
    export: Arc<Export>,
    shared: Arc<Shared>,
}

impl Link {
    /// A link for one more worker. It has a connection at once if no other link uses the export's first one.
    ///
    /// # Errors
    /// No free descriptor.
    pub fn attach(export: &Arc<Export>) -> io::Result<Self> {
        let shared = Arc::new(Shared::new()?);
        export.attach(&shared);
        Ok(Self { export: Arc::clone(export), shared })
    }

    /// The export.
    #[must_use]
    pub fn export(&self) -> &Export {
        &self.export
    }

    /// Becomes readable, edge by edge, when [`Link::has_news`] turns true.
    #[must_use]
    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.shared.wake_fd()
    }

    /// Whether there is a connection or a flush to take; true once per time.
    #[inline]
    #[must_use]
    pub fn has_news(&self) -> bool {
        self.shared.has_news()
    }

    /// The new connection, and whether its replies are structured.
    #[must_use]
    pub fn take_connection(&self) -> Option<(OwnedFd, bool)> {
        self.shared.take_connection().map(|connection| (connection.socket, connection.structured))
    }

    /// The flushes that other threads wait for.
    #[must_use]
    pub fn take_flushes(&self) -> Vec<FlushRequest> {
        self.shared.take_flushes()
    }

    /// Asks for a new connection, because there is none, or `lost` ended it. Returns at once; a thread connects. Does
    /// nothing more if a thread connects already.
    pub fn reconnect(&self, lost: Option<&str>) {
        self.shared.disconnected();
        if let Some(why) = lost {
            tracing::warn!(export = %self.export.uri(), "connection to the NBD server lost: {why}; reconnecting");
        }
        let Some(pause) = self.shared.begin_connecting() else { return };
        if let Err(error) = connector::start(&self.export, &self.shared, pause, lost.is_some()) {
            self.shared.not_connecting();
            tracing::error!(export = %self.export.uri(), "cannot start the thread that reconnects: {error}");
        }
    }

    /// Gives a connection without requests in flight back, for other links of the export.
    pub fn give_back(&self, socket: OwnedFd, structured: bool) {
        self.export.give_back(Connection { socket, structured });
        // Afterwards: until then, no other link may open a connection to an export that has only one.
        self.shared.disconnected();
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.shared.disconnected();
        if let Some(connection) = self.shared.take_connection() {
            self.export.give_back(connection);
        }
        for flush in self.shared.take_flushes() {
            flush.end(Err(io::Error::other("the disk's queues have stopped meanwhile: try again")));
        }
    }
}
