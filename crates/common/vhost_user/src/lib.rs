//! Frames vhost-user messages and passes file descriptors over Unix sockets.
//!
//! - [`Header`], [`message_bytes`]: one message as bytes. [`body`]: the contents of messages.
//! - [`PartialMessage`]: receives a message in any number of pieces, with its descriptors. [`Outgoing`] sends one.
//! - [`send`], [`receive`]: one `sendmsg` or `recvmsg` call with descriptors, for other protocols too.
//! - [`FrontEnd`]: a connection that sends arbitrary bytes, for tests, fuzzers and experiments (feature `test-util`).
//!
//! The request numbers, feature bits and body structs are those of the `vhost` crate
//! (docs/decisions/0051-one-framer.md).
//!
//! Spec: vhost-user, "Message structure". See also: what a message does (`blk_server`), the order of messages
//! (`blk_driver`).
#![forbid(unsafe_code)]

pub mod body;
pub mod code;

mod descriptors;
mod error;
#[cfg(any(test, feature = "test-util"))]
mod front_end;
mod header;
mod outgoing;
mod partial;
mod wait;

pub use descriptors::{Received, SCM_MAX_FD, receive, send};
pub use error::FrameError;
#[cfg(any(test, feature = "test-util"))]
pub use front_end::{FrontEnd, Reply};
pub use header::{HEADER_BYTES, Header, MAX_BODY_BYTES, message_bytes};
pub use outgoing::Outgoing;
pub use partial::PartialMessage;
pub use wait::wait;

/// The example in README.md compiles and runs.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
