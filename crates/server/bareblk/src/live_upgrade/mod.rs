//! A server that takes over from a running one: `bareblk serve --take-over CONTROL_SOCKET`. No guest, no front-end notices.
//!
//! ```text
//! new                                     old
//! {"do":"take-over"} on the control socket → ok: from here on frames (wire.rs)
//! Begin                                  → Control, Disk …, OffersEnd (images, sockets: nothing has stopped)
//! all open, workers and sandbox: Ready   → sessions that are to be cut off end; queues drained; State, Session …, OffersEnd's sister StatesEnd
//! sessions rebuilt, no ring runs: Prepared → Yours, and it ends
//! rings run
//! ```
//!
//! - Until `Yours` the old server can go on as if nothing had been, and does if the new one says no, goes, or takes too long.
//!   The new one touches nothing before it, and waits for it without a limit: only the old one knows whose the disks are.
//! - Descriptors are the old server's own: images keep their locks, front-ends their connections.
//!
//! For users: docs/how-to/live-upgrade.md. Not here: sessions and queues (`blk_server`).

mod messages;

mod new;

mod old;

mod opener;

mod wire;

use std::time::Duration;

use anyhow::anyhow;
use blk_server::LiveUpgradeError;

pub use messages::Message;
pub use new::{Taker, Wanted};
pub use old::{Door, hand_over};
pub use wire::receive;

/// Of the frames and what they hold.
///
/// 2: half messages, dirty logs and who has the lease of a disk's rings go along; disks can be cut off.
pub const VERSION: u32 = 2;

/// For what is answered, or sent, at once.
pub const AT_ONCE: Duration = Duration::from_secs(5);
/// For a new server to open everything: it may wait for locks of disks that are new.
const READY_TIMEOUT: Duration = Duration::from_secs(120);
/// For requests of sessions that are cut off to complete, while all other guests run.
const CUT_TIMEOUT: Duration = Duration::from_secs(30);
/// For requests in flight to complete, while guests pause.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(3);
/// For a new server to rebuild the sessions, while guests pause.
const PREPARE_TIMEOUT: Duration = Duration::from_secs(3);

/// With what an operator can do about a front-end that is in the way.
fn with_cure(error: LiveUpgradeError) -> anyhow::Error {
    match &error {
        LiveUpgradeError::Stays { disk, .. } | LiveUpgradeError::Session { disk, .. } => {
            anyhow!("{error}; or cut its front-ends off: --take-over-cut {disk}")
        }
        _ => error.into(),
    }
}
