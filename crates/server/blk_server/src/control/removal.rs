//! Removes a disk from a running server: ends its sessions in order, then flushes and releases its image.
//!
//! `in use? → no further session or ring → sessions told to end → (time is over: cancel) → flush → socket, image`
//!
//! - In use is a disk while a front-end is connected that has started rings, even if they are stopped just now (its
//!   guest may be starting again). One that only looked, or waits for its guest, loses nothing that it would miss.
//! - Until the end the socket stays and refuses front-ends at once: a front-end without an answer might wait for ever.
//! - What cannot be given up (a device that never answers) keeps the disk in the list, without its front-ends, until
//!   it is removed once more.
//!
//! Not here: ending all of them (`server.rs`).

use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::{info, warn};

use crate::control::exports::{Export, Exports, Turn};
use crate::data_path::assignment::WorkerSet;
use crate::data_path::assignment::deadline::deadline_in;
use crate::data_path::disk::flush::flush;
use crate::data_path::disk::session_link::EndReason;
use crate::error::AdminError;
use crate::session::shared::SessionShared;

/// What requests that were given up have left to end.
const AFTER_CANCEL: Duration = Duration::from_secs(3);
/// How long the image's lock may still be held by what is just going away.
const LET_GO: Duration = Duration::from_secs(1);
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// # Errors
/// [`AdminError`]; the disk is as before, but for [`AdminError::StillInFlight`] and [`AdminError::NotFlushed`].
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
    // Somebody else may have removed it while we waited for our turn.
    if !exports.all().iter().any(|known| Arc::ptr_eq(known, export)) {
        return Err(AdminError::NoDisk { name: name.to_owned() });
    }
    if !disk.retire(force) {
        return Err(AdminError::InUse { disk: name.to_owned() });
    }
    end_sessions(export, workers, deadline)
        .map_err(|()| AdminError::StillInFlight { disk: name.to_owned(), timeout })?;
    let flushed = if disk.ignores_flushes() { Ok(()) } else { flush(disk, deadline) };
    exports.take_out(export);
    workers.forget_disk(disk.id());
    let file = Arc::downgrade(disk.image().file());
    drop(turn);
    let deadline = Instant::now() + LET_GO;
    while file.strong_count() > 0 && Instant::now() < deadline {
        std::thread::sleep(LOOK_AGAIN);
    }
    if file.strong_count() > 0 {
        warn!(disk = name, "the image is still open somewhere, and locked for as long");
    }
    info!(disk = name, "disk removed");
    flushed.map_err(|source| AdminError::NotFlushed { disk: name.to_owned(), source })
}

/// `Err`: one of them has requests that cannot be given up.
fn end_sessions(export: &Export, workers: &WorkerSet, deadline: Instant) -> Result<(), ()> {
    let sessions = export.sessions.close();
    tell_to_end(export, &sessions);
    wait_ended(export, workers, &sessions, deadline)
}

pub(crate) fn tell_to_end(export: &Export, sessions: &[Arc<SessionShared>]) {
    // All know before the first one acts: see `Server::stop`.
    sessions.iter().for_each(|session| session.note_end(EndReason::Stop));
    sessions.iter().for_each(|session| session.end(EndReason::Stop));
    export.disk.wake_waiters();
}

/// What is in flight is given up when the time is over. `Err`: one of the sessions has requests that cannot be given up.
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
    warn!(disk, "requests are still in flight: they are given up, and answered with an error");
    workers.cancel(Some(export.disk.id()));
    if all_ended(sessions, Instant::now() + AFTER_CANCEL) { Ok(()) } else { Err(()) }
}

fn all_ended(sessions: &[Arc<SessionShared>], deadline: Instant) -> bool {
    sessions.iter().all(|session| session.wait_ended(deadline))
}
