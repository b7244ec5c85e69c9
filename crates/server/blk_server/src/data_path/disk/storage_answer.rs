//! How a session waits for its storage: only as long as the session, its front-end and a limit allow.

use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::data_path::disk::session_link::SessionLink;

/// The pause between two checks whether the session ends.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// Why the storage cannot be used.
#[derive(Debug)]
pub(crate) enum StorageError {
    /// The session is ending, or its front-end has disconnected.
    Ending,
    Failed(String),
}

/// What the storage's thread sends.
pub(crate) type Answer = Receiver<Result<(), String>>;

/// Waits until the storage can be used. Calls `give_up` if the session does not wait any longer.
pub(crate) fn wait_begun(
    begun: &Answer,
    session: &SessionLink,
    front_end: &OwnedFd,
    limit: Option<Duration>,
    give_up: impl FnOnce(),
) -> Result<(), StorageError> {
    let end = limit.map(|limit| Instant::now() + limit);
    loop {
        match begun.recv_timeout(LOOK_AGAIN) {
            Ok(outcome) => return outcome.map_err(StorageError::Failed),
            Err(RecvTimeoutError::Disconnected) => return Err(no_thread()),
            Err(RecvTimeoutError::Timeout) => {}
        }
        let is_late = end.is_some_and(|end| Instant::now() >= end);
        if is_late || session.end_reason().is_some() || is_gone(front_end) {
            give_up();
            let late = || StorageError::Failed("no answer within the limit".to_owned());
            return Err(if is_late { late() } else { StorageError::Ending });
        }
    }
}

/// Waits until the storage is not used any more.
pub(crate) fn wait_ended(ended: &Answer, timeout: Duration) -> Result<(), StorageError> {
    match ended.recv_timeout(timeout) {
        Ok(outcome) => outcome.map_err(StorageError::Failed),
        Err(RecvTimeoutError::Disconnected) => Err(no_thread()),
        Err(RecvTimeoutError::Timeout) => {
            Err(StorageError::Failed(format!("it has not answered after {} s", timeout.as_secs_f64())))
        }
    }
}

pub(crate) fn no_thread() -> StorageError {
    StorageError::Failed("its thread could not be started, or has ended".to_owned())
}

fn is_gone(front_end: &OwnedFd) -> bool {
    let mut socket = [PollFd::new(front_end, PollFlags::RDHUP)];
    let polled = poll(&mut socket, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    polled.is_ok() && socket[0].revents().intersects(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR)
}
