//! The address of an NBD server, as messages and the policy have it.

use std::ffi::OsString;

use nbd_client::Address;
use serde::{Deserialize, Serialize};

/// The address of an NBD server.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ServerAddress {
    Unix(OsString),
    Tcp { host: String, port: u16 },
}

impl From<&Address> for ServerAddress {
    fn from(address: &Address) -> Self {
        match address {
            Address::Unix(path) => Self::Unix(path.into()),
            Address::Tcp { host, port } => Self::Tcp { host: host.clone(), port: *port },
        }
    }
}

impl From<ServerAddress> for Address {
    fn from(server: ServerAddress) -> Self {
        match server {
            ServerAddress::Unix(path) => Self::Unix(path.into()),
            ServerAddress::Tcp { host, port } => Self::Tcp { host, port },
        }
    }
}
