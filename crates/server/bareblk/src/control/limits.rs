//! The limits for control clients, documented in docs/reference/control.md.

use std::time::Duration;

/// Maximum length of a request, without its line break: enough for a disk with two paths of 4 KiB.
pub const MAX_LINE_BYTES: usize = 64 << 10;
/// Maximum number of clients at once. At the limit, a client that never sent a request is disconnected to make room for
/// the next.
pub const MAX_CLIENTS: usize = 32;
/// Like [`MAX_CLIENTS`], for the monitor socket.
pub const MAX_MONITOR_CLIENTS: usize = 8;
/// Maximum number of clients that were disconnected to make room and have not ended yet.
pub const MAX_ENDING: usize = 32;
/// Maximum time from a line's first byte to its line break.
pub const LINE_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum time from an answer's first byte to its last.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// The highest `timeout_ms`. It is bounded because a stop of the server waits for running requests.
pub const MAX_TIMEOUT_MS: u64 = 60_000;
/// Maximum length of a disk's pause, after which the server ends the pause itself.
pub const MAX_PAUSE: Duration = Duration::from_secs(60);
/// The `timeout_ms` of a request that has none.
pub const DEFAULT_TIMEOUT_MS: u64 = 10_000;
