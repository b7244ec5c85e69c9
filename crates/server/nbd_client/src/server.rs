//! The server of one export: how to connect to it, and what the export was when the disk was opened.
//!
//! A thread that connects owns only this, so a server that does not answer keeps no removed disk open.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use crate::dial::Dial;
use crate::error::NbdError;
use crate::inbox::Connection;
use crate::negotiation::handshake::{ExportInfo, ask, negotiate};
use crate::uri::NbdUri;

/// An export's server.
#[derive(Debug)]
pub(crate) struct Server {
    pub uri: NbdUri,
    pub info: ExportInfo,
    connect_timeout: Duration,
    dial: Arc<dyn Dial>,
}

impl Server {
    /// Connects for the first time.
    pub fn connect(
        uri: &NbdUri,
        connect_timeout: Duration,
        dial: Arc<dyn Dial>,
    ) -> Result<(Self, Connection), NbdError> {
        let socket = connected(dial.as_ref(), uri, connect_timeout)?;
        let (socket, info) = negotiate(socket, uri, dial.as_ref(), connect_timeout)?;
        let server = Self { uri: uri.clone(), info, connect_timeout, dial };
        Ok((server, Connection { socket, structured: info.structured }))
    }

    /// Opens one more connection. The export must still have the properties with which the disk was opened.
    pub fn open_connection(&self) -> Result<Connection, NbdError> {
        let socket = connected(self.dial.as_ref(), &self.uri, self.connect_timeout)?;
        let (socket, info) = negotiate(socket, &self.uri, self.dial.as_ref(), self.connect_timeout)?;
        match self.info.weakened_in(info) {
            Some(problem) => {
                let (address, export) = (self.uri.address.clone(), self.uri.export.clone());
                Err(NbdError::Unusable { address, export, problem })
            }
            None => Ok(Connection { socket, structured: info.structured }),
        }
    }

    /// Asks for the export's properties, on a connection of its own.
    pub fn ask(&self) -> Result<ExportInfo, NbdError> {
        let socket = connected(self.dial.as_ref(), &self.uri, self.connect_timeout)?;
        ask(socket, &self.uri, self.dial.as_ref(), self.connect_timeout)
    }
}

fn connected(dial: &dyn Dial, uri: &NbdUri, timeout: Duration) -> Result<OwnedFd, NbdError> {
    let address = || uri.address.clone();
    dial.dial(&uri.address, timeout).map_err(|source| NbdError::Connect { address: address(), source })
}
