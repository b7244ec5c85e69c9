//! What happens on a new connection before requests may be sent: the handshake, with TLS if the URI asks for it.

pub(crate) mod handshake;
pub(crate) mod tls;
pub(crate) mod wire;
