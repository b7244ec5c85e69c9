//! A client for exports of NBD servers (Network Block Device).
//!
//! ```text
//! uri.rs → dial.rs (a socket) → handshake.rs (what the export is) → Export, shared by a disk's workers
//!                                                                      └ Link: one worker's connection
//! requests.rs, replies.rs: bytes of requests and replies, without I/O; the engine `nbd` (io_engine) moves the bytes
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
mod handshake;
mod inbox;
mod link;
mod pause;
mod protocol;
mod replies;
mod requests;
mod server;
mod uri;
mod wire;

pub use dial::{Dial, HostDialer};
pub use error::NbdError;
pub use export::{Export, ExportOptions};
pub use handshake::{ExportInfo, negotiate};
pub use inbox::FlushRequest;
pub use link::Link;
pub use replies::{Replies, ReplyError, Step};
pub use requests::{Command, HEADER_BYTES, Request, Requests};
pub use uri::{Address, NbdUri, UriError};
