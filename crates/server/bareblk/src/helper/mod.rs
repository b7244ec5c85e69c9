//! The helper: a second process that keeps the server's rights to open things, so that the server can give them up.
//!
//! `server: RemoteOpener → message, with a socket for the answer → helper: policy → HostOpener → answer, descriptor`
//!
//! - It runs this program again. The server starts it before it reads anything from a guest or a client. Its only input
//!   is the server's messages, and it ends with the server.
//! - Each request has its own thread and socket: a file system that hangs delays no other request.
//! - It keeps no descriptor that it has passed on: an answer is complete when its socket is closed, and the helper
//!   closes it after its copy of an image. So an image's lock never outlives the server.
//!
//! Not here: what the server itself may still do (crate `sandbox`), who calls the opener (`serving.rs`).

pub mod accounts;

pub mod client;

mod messages;

pub mod policy;

pub mod server;
