//! A client for exports of NBD servers (Network Block Device).
//!
//! ```text
//! uri.rs, tls.rs → dial.rs (a socket) → handshake.rs (what the export is) → Export, shared by a disk's workers
//!                                                                      └ Link: one worker's connection
//! transmission/: bytes of requests and replies, without I/O; the engine `nbd` (io_engine) moves the bytes
//! ```
//!
//! - The server is not trusted: each number that it sends is checked, and a reply that breaks the protocol ends the
//!   connection.
//! - A lost connection is replaced by a new one, and requests without a reply are sent again.
//!
//! Source: the NBD protocol and the NBD URI specification (github.com/NetworkBlockDevice/nbd, `doc/proto.md`,
//! `doc/uri.md`).
#![forbid(unsafe_code)]

mod connector;
mod dial;
mod error;
mod export;
mod inbox;
mod link;
mod look_up;
mod negotiation;
mod pause;
mod protocol;
mod server;
mod transmission;
mod uri;

pub use dial::{Dial, HostDialer, Secured};
pub use error::{FlushRefused, NbdError};
pub use export::{Export, ExportOptions};
pub use inbox::FlushRequest;
pub use link::Link;
pub use negotiation::handshake::{ExportInfo, negotiate};
pub use negotiation::tls::Tls;
pub use transmission::replies::{Replies, ReplyError, Step};
pub use transmission::requests::{Command, HEADER_BYTES, Request, Requests};
pub use uri::{Address, NbdUri, UriError};
