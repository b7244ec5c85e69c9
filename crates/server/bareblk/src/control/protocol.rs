//! The protocol: lines of JSON, their fields, and the errors about wrong lines.
//!
//! `greeting ← | request → answer ← | request → answer ← | …`, one object per line.
//!
//! - An unknown field is refused by name: the server must not ignore a misspelt `force`.
//! - `PROTOCOL` grows when an old client would misunderstand an answer. New verbs, and new fields in answers, do not
//!   change it.

pub mod answer;
pub mod request;
pub mod verbs;

use serde::{Deserialize, Serialize};

/// The version of the protocol.
pub const PROTOCOL: u32 = 1;

/// The server's first line.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Greeting {
    /// The server's version.
    pub bareblk: String,
    /// [`PROTOCOL`].
    pub protocol: u32,
}

impl Greeting {
    pub fn ours() -> Self {
        Self { bareblk: env!("CARGO_PKG_VERSION").into(), protocol: PROTOCOL }
    }
}
