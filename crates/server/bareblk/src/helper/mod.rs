//! The helper: a second process that keeps the server's rights to open things, so that the server can give them up.
//!
//! `server: RemoteOpener → message, with a socket to answer to → helper: policy → HostOpener → answer, descriptor`
//!
//! - It is this program once more, started before the server has read anything from a guest or a client. It has no
//!   other input than the server's messages, and ends with the server.
//! - A request has a thread and a socket of its own: a file system that hangs holds up nobody else's request.
//! - It keeps no descriptor that it has passed on: the answer counts as complete when its socket is closed, and that is
//!   after the helper's copy of an image is. An image's lock never outlives the server because of it.
//!
//! Not here: what the server itself may still do (crate `sandbox`), who calls the opener (`serving.rs`).

mod client;

mod messages;

mod policy;

mod server;

pub use client::{client, start};
pub use policy::Policy;
pub use server::run;

/// Its name on the command line, for nobody but us.
pub const SUBCOMMAND: &str = "sandbox-helper";
