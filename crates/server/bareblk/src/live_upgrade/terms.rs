//! What both servers of a live upgrade have in common: the version, the timeouts, and the advice in an error.

use std::time::Duration;

use anyhow::anyhow;
use blk_server::LiveUpgradeError;

/// The version of the frames and of what they hold.
///
/// 2: with half messages, dirty logs and the holder of the lease of a disk's rings; disks can be cut off.
pub const VERSION: u32 = 2;

/// For a message that the other server sends or reads at once.
pub const AT_ONCE: Duration = Duration::from_secs(5);
/// For a new server to open everything: it may wait for locks of disks that are new.
pub const READY_TIMEOUT: Duration = Duration::from_secs(120);
/// For requests of sessions that are cut off to complete, while all other guests run.
pub const CUT_TIMEOUT: Duration = Duration::from_secs(30);
/// For requests in flight to complete, while guests pause.
pub const DRAIN_TIMEOUT: Duration = Duration::from_secs(3);
/// For a new server to rebuild the sessions, while guests pause.
pub const PREPARE_TIMEOUT: Duration = Duration::from_secs(3);

/// Adds what an operator can do about a front-end that prevents the live upgrade.
pub fn with_cure(error: LiveUpgradeError) -> anyhow::Error {
    match &error {
        LiveUpgradeError::Stays { disk, .. } | LiveUpgradeError::Session { disk, .. } => {
            anyhow!("{error}; or cut its front-ends off: --take-over-cut {disk}")
        }
        _ => error.into(),
    }
}
