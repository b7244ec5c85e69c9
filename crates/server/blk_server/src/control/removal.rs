//! Removes a disk from a running server: ends its sessions cleanly, then flushes and releases its image.
//!
//! `in use? → no further session or ring → sessions ordered to end → (at the deadline: cancel) → flush → socket, image`
//!
//! - A disk is in use while a front-end that has started rings is connected, even if the rings are stopped now: the
//!   guest may be restarting. A front-end that has started no ring loses nothing.
//! - The socket is removed last. Until then it refuses front-ends at once, because a front-end that gets no answer
//!   might wait forever.
//! - If requests cannot be cancelled because a device never answers, the disk stays in the list without front-ends
//!   until the operator removes it again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::{info, warn};

use crate::control::exports::{Export, Exports, Turn};
use crate::data_path::assignment::WorkerSet;
use crate::data_path::assignment::deadline::deadline_in;
use crate::data_path::disk::flush::last_flush;
use crate::data_path::disk::session_link::EndReason;
use crate::error::AdminError;
use crate::session::shared::SessionShared;

/// Time limit for cancelled requests to end.
const AFTER_CANCEL: Duration = Duration::from_secs(3);
/// How long to wait for ending threads that still hold the image's lock.
const LET_GO: Duration = Duration::from_secs(1);
/// The pause between two looks at an image that is about to be closed.
pub(crate) const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// # Errors
/// [`AdminError`]. The disk is unchanged, except after [`AdminError::StillInFlight`] and [`AdminError::NotFlushed`].
pub(crate) fn remove(
    exports: &Exports,
    workers: &WorkerSet,
    name: &str,
    force: bool,
    timeout: Duration,
) -> Result<(), AdminError> {
    let deadline = deadline_in(timeout);
    let turn = Export::take_turn(&exports.find(name)?)?;
    let Turn(export) = &turn;
    let disk = &export.disk;
    // Another thread may have removed the disk while this one waited for its turn.
    if !exports.all().iter().any(|known| Arc::ptr_eq(known, export)) {
        return Err(AdminError::NoDisk { name: name.to_owned() });
    }
    if !disk.retire(force) {
        return Err(AdminError::InUse { disk: name.to_owned() });
    }
    end_sessions(export, workers, deadline)
        .map_err(|()| AdminError::StillInFlight { disk: name.to_owned(), timeout })?;
    let flushed = if disk.ignores_flushes() { Ok(()) } else { last_flush(disk, deadline) };
    disk.close_tables(deadline);
    exports.take_out(export);
    let shared = exports.throttling.forget(name);
    exports.apply_limits(workers, &shared);
    workers.forget_disk(disk.id());
    let image = disk.image().backing().downgrade();
    drop(turn);
    let deadline = Instant::now() + LET_GO;
    while image.is_open() && Instant::now() < deadline {
        std::thread::sleep(LOOK_AGAIN);
    }
    if image.is_open() {
        warn!(disk = name, "the image is still open in this server, so it stays locked");
    }
    info!(disk = name, "disk removed");
    flushed.map_err(|source| AdminError::NotFlushed { disk: name.to_owned(), source })
}

/// Returns `Err` if a session has requests that cannot be cancelled.
fn end_sessions(export: &Export, workers: &WorkerSet, deadline: Instant) -> Result<(), ()> {
    let sessions = export.sessions.close();
    tell_to_end(export, &sessions);
    wait_ended(export, workers, &sessions, deadline)
}

pub(crate) fn tell_to_end(export: &Export, sessions: &[Arc<SessionShared>]) {
    // Orders all sessions to end before the first one acts: see `Server::stop`.
    sessions.iter().for_each(|session| session.note_end(EndReason::Stop));
    sessions.iter().for_each(|session| session.end(EndReason::Stop));
    export.disk.wake_waiters();
}

/// Cancels requests that are still in flight at the deadline. Returns `Err` if a session has requests that cannot be
/// cancelled.
pub(crate) fn wait_ended(
    export: &Export,
    workers: &WorkerSet,
    sessions: &[Arc<SessionShared>],
    deadline: Instant,
) -> Result<(), ()> {
    if all_ended(sessions, deadline) {
        return Ok(());
    }
    let disk = export.disk.name();
    warn!(disk, "requests are still in flight: the server cancels them, and they fail with an error");
    workers.cancel(Some(export.disk.id()));
    if all_ended(sessions, Instant::now() + AFTER_CANCEL) { Ok(()) } else { Err(()) }
}

/// Waits for the sessions' ends. Returns `false` if one has not ended at the deadline.
pub(crate) fn all_ended(sessions: &[Arc<SessionShared>], deadline: Instant) -> bool {
    sessions.iter().all(|session| session.wait_ended(deadline))
}
