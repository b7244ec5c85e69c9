//! A server that takes over from a running one: `bareblk serve --take-over CONTROL_SOCKET`. No guest, no front-end notices.
//!
//! ```text
//! new                                     old
//! {"do":"take-over"} on the control socket → ok: from here on frames (wire.rs)
//! Begin                                  → Control, Disk …, OffersEnd (images, sockets: nothing has stopped)
//! all open, workers and sandbox: Ready   → queues drained; State, Session …, OffersEnd's sister StatesEnd
//! sessions rebuilt, no ring runs: Prepared → Yours, and it ends
//! rings run
//! ```
//!
//! - Until `Yours` the old server can go on as if nothing had been, and does if the new one says no, goes, or takes too long.
//!   The new one touches nothing before it, and waits for it without a limit: only the old one knows whose the disks are.
//! - Descriptors are the old server's own: images keep their locks, front-ends their connections.
//!
//! For users: docs/take-over.md. Not here: sessions and queues (`blk_server`).

mod messages;

mod new;

mod old;

mod opener;

mod wire;

use std::time::Duration;

pub use new::Taker;
pub use old::{Door, hand_over};

/// Of the frames and what they hold.
pub const VERSION: u32 = 1;

/// For what is answered, or sent, at once.
const AT_ONCE: Duration = Duration::from_secs(5);
/// For a new server to open everything: it may wait for locks of disks that are new.
const READY_TIMEOUT: Duration = Duration::from_secs(120);
/// For requests in flight to complete, while guests pause.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(3);
/// For a new server to rebuild the sessions, while guests pause.
const PREPARE_TIMEOUT: Duration = Duration::from_secs(3);
