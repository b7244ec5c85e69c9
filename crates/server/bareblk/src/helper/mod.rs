//! The helper: a second process that keeps the server's rights to open files, so that the server can give them up.
//!
//! `server: RemoteOpener → message, with a socket for the answer → helper: policy → HostOpener → answer, descriptor`
//!
//! - It runs this same program, and is started before the server reads anything from a guest or a client. Its only
//!   input is the server's messages, and it ends with the server.
//! - Each request has its own thread and socket: a file system that hangs delays no other request.
//! - It keeps no descriptor that it has passed on. For the server, an answer is complete when the helper has closed the
//!   answer's socket, which it does after closing its copy of the image. So the helper never keeps an image locked
//!   after the server's end.
//!
//! The crate `sandbox` limits the server itself.

pub mod accounts;

pub mod client;

mod credentials;

pub mod dialer;

mod messages;

pub mod policy;

pub mod process_records;

pub mod server;

pub mod server_address;

pub use credentials::files_of;
