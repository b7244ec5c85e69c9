//! Requests and replies as bytes, without I/O.

pub(crate) mod replies;
pub(crate) mod requests;
