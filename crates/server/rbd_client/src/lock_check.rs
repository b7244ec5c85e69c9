//! Asks the cluster, while a guest uses the image, whether this client still has the image's lock.
//!
//! Another client can remove the lock without blocklisting its owner, who could then go on writing beside the next owner
//! (`rbd lock rm` with `rbd_blocklist_on_break_lock=false`, `rados lock break`). librbd notices that only when it has lost its
//! watch.

use std::thread::sleep;
use std::time::Duration;

use crate::lock::Answer;

/// The pause between two questions.
const INTERVAL: Duration = Duration::from_secs(1);
/// The pause before "no" is believed: librbd may just be renaming its lock, after it has opened its watch again.
const CONFIRM_AFTER: Duration = Duration::from_millis(200);

/// Asks until the lock was released or lost. Returns whether it was lost.
pub(crate) fn is_lost(ask: impl Fn() -> Answer) -> bool {
    loop {
        sleep(INTERVAL);
        match ask() {
            Answer::Yes => {}
            Answer::Released => return false,
            Answer::No => {
                sleep(CONFIRM_AFTER);
                if ask() == Answer::No {
                    return true;
                }
            }
        }
    }
}
