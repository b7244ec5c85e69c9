//! The server's answer to a request, and the errors in it.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The server's line after each request: `ok` or `error`.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub struct Answer<T = Value> {
    /// The request's `id`; null without a request, or if its `id` cannot be read.
    pub id: Option<u64>,
    #[serde(default = "none", skip_serializing_if = "Option::is_none")]
    pub ok: Option<T>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<Fault>,
}

fn none<T>() -> Option<T> {
    None
}

impl<T> Answer<T> {
    pub fn new(id: Option<u64>, outcome: Result<T, Fault>) -> Self {
        match outcome {
            Ok(ok) => Self { id, ok: Some(ok), error: None },
            Err(fault) => Self { id, ok: None, error: Some(fault) },
        }
    }
}

/// An error in an answer.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// The kind, for programs.
    pub kind: ErrorKind,
    /// One line for people, which says what to do.
    pub message: String,
}

impl Fault {
    /// Escapes control characters: a client's names may contain line breaks and terminal commands.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        let shown = |c: char| if c.is_control() { c.escape_default().to_string() } else { c.to_string() };
        Self { kind, message: message.into().chars().map(shown).collect() }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ErrorKind {
    // Errors of the connection.
    NotAllowed,
    TooManyClients,
    MadeRoom,
    Stopping,
    LineTooLong,
    LineTooSlow,
    // Errors of the request.
    NotJson,
    BadRequest,
    UnknownVerb,
    ReadOnly,
    BadSettings,
    // Errors of the server's state.
    NoDisk,
    DiskExists,
    NoWorker,
    NoQueue,
    NotPlaced,
    NoGroup,
    LastWorker,
    NotDrained,
    Unsuitable,
    InUse,
    WouldShrink,
    NotPaused,
    Failed,
    /// A kind that only a newer server knows.
    #[serde(other)]
    Other,
}

/// A time in an answer, in nanoseconds; `u64` holds 584 years.
pub fn ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_kind_of_a_newer_server_is_understood_as_another_one() {
        let fault: Fault = serde_json::from_str(r#"{"kind": "too-hot", "message": "m"}"#).unwrap();
        assert_eq!(fault.kind, ErrorKind::Other);
    }
}
