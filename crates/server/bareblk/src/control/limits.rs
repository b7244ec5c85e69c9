//! The limits for clients, as docs/reference/control.md states them.
//!
//! Not here: who keeps to them (`line_reader.rs`, `session.rs`, `clients.rs`).

use std::time::Duration;

/// Longest request, without its line break. A disk with two paths of 4 KiB fits.
pub const MAX_LINE_BYTES: usize = 64 << 10;
/// Most clients at once. A client that never sent a request makes room for the next.
pub const MAX_CLIENTS: usize = 32;
/// Most clients that are about to end, to make room.
pub const MAX_ENDING: usize = 32;
/// From a line's first byte to its line break.
pub const LINE_TIMEOUT: Duration = Duration::from_secs(5);
/// From an answer's first byte to its last.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// What `timeout_ms` may be at most: a stop waits for requests that run.
pub const MAX_TIMEOUT_MS: u64 = 60_000;
/// `timeout_ms` where a request has none.
pub const DEFAULT_TIMEOUT_MS: u64 = 10_000;
