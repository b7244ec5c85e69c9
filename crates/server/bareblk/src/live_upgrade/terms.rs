//! What both servers of a live upgrade have in common: the version, the extras, the timeouts, and the advice in an error.

use std::time::Duration;

use anyhow::anyhow;
use blk_server::LiveUpgradeError;

/// The version of the frames and their contents.
///
/// Version 2 also hands over half-received messages, dirty logs and the holder of a disk's ring lease; disks can be cut
/// off.
pub const VERSION: u32 = 2;

/// Data that an old server also sends if the new one knows it and asks for it. Either server may have a version
/// without it.
pub const EXTRAS: [&str; 7] = [TOTALS, MONITOR, REMOTE, QCOW2, QCOW2_WRITTEN, JOBS, RECLAIM];
/// The disks' totals.
pub const TOTALS: &str = "totals";
/// The monitor socket, if both servers have one.
pub const MONITOR: &str = "monitor";
/// Disks on other machines, which both servers open. Their messages carry no image.
pub const REMOTE: &str = "remote";
/// Disks with qcow2 images, which both servers open. Their messages carry no image, unless the guest may write.
pub const QCOW2: &str = "qcow2";
/// Disks with qcow2 images that the guest may write. Their messages carry the image with its lock.
pub const QCOW2_WRITTEN: &str = "qcow2-written";
/// Jobs that merge the layers of disks. The new server starts them again.
pub const JOBS: &str = "jobs";
/// The same for jobs that free leaked clusters.
pub const RECLAIM: &str = "jobs-reclaim";

/// Time limit for a message that the other server sends or reads at once.
pub const AT_ONCE: Duration = Duration::from_secs(5);
/// Time limit for the new server to open everything: it may wait for the locks of newly added disks.
pub const READY_TIMEOUT: Duration = Duration::from_secs(120);
/// Time limit for the requests of sessions that are cut off. All other guests run meanwhile.
pub const CUT_TIMEOUT: Duration = Duration::from_secs(30);
/// Time limit for requests in flight. Guests pause meanwhile.
pub const DRAIN_TIMEOUT: Duration = Duration::from_secs(3);
/// Time limit for the new server to rebuild the sessions. Guests pause meanwhile.
pub const PREPARE_TIMEOUT: Duration = Duration::from_secs(3);
/// Time limit for the old server to close disks on other machines. Their guests run in the new server meanwhile.
pub const CLOSE_TIMEOUT: Duration = Duration::from_secs(3);

/// Adds what an operator can do about a front-end that prevents the live upgrade.
pub fn with_cure(error: LiveUpgradeError) -> anyhow::Error {
    match &error {
        LiveUpgradeError::Stays { disk, .. } | LiveUpgradeError::Session { disk, .. } => {
            anyhow!("{error}; or disconnect its front-ends: --take-over-cut {disk}")
        }
        _ => error.into(),
    }
}
