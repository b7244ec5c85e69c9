//! The limits for clients, which docs/reference/control.md states.

use std::time::Duration;

/// Longest request, without its line break. It has room for a disk with two paths of 4 KiB.
pub const MAX_LINE_BYTES: usize = 64 << 10;
/// Maximum number of clients at once. At the limit, a client that never sent a request makes room for the next.
pub const MAX_CLIENTS: usize = 32;
/// Maximum number of clients that are ending to make room.
pub const MAX_ENDING: usize = 32;
/// The time from a line's first byte to its line break.
pub const LINE_TIMEOUT: Duration = Duration::from_secs(5);
/// The time from an answer's first byte to its last.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// The highest `timeout_ms`: a stop waits for running requests.
pub const MAX_TIMEOUT_MS: u64 = 60_000;
/// Longest pause of a disk: after this time the disk continues by itself.
pub const MAX_PAUSE: Duration = Duration::from_secs(60);
/// The `timeout_ms` of a request that has none.
pub const DEFAULT_TIMEOUT_MS: u64 = 10_000;
