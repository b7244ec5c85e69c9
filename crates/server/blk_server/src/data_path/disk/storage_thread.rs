//! One session's calls of storage that may not answer: on another machine, or behind the tables of a writable image.
//!
//! `session → begin | end → this thread, one call after another → the session, which waits only so long`
//!
//! The thread has rights that a session's thread lacks: to connect to another machine again, and to sync a file.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel, sync_channel};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sandbox::Role;

use crate::data_path::disk::Disk;
use crate::data_path::disk::session_link::SessionLink;
use crate::host::error_line::error_line;

/// The pause between two checks whether the session ends.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

type Call = Box<dyn FnOnce(&Disk) + Send>;

/// Why the storage cannot be used.
#[derive(Debug)]
pub(crate) enum StorageError {
    /// The session is ending, or its front-end has disconnected.
    Ending,
    Failed(String),
}

/// Makes the calls; ends when it is dropped and the last call is over.
#[derive(Debug)]
pub(crate) struct StorageThread {
    calls: Sender<Call>,
}

impl StorageThread {
    /// Starts the thread for a session of `disk`; `None`: the storage needs no such calls. To be called before the calling thread
    /// takes its role.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(disk: &Arc<Disk>) -> io::Result<Option<Arc<Self>>> {
        let backing = disk.image().backing();
        if !backing.waits_for_use() {
            return Ok(None);
        }
        let (calls, wanted) = channel::<Call>();
        let (weak, inherits) = (Arc::downgrade(disk), backing.has_threads_of_its_own());
        backing.start_thread(move || {
            if inherits || sandbox::enter(Role::Worker).is_ok() {
                run(&wanted, &weak);
            }
        })?;
        Ok(Some(Arc::new(Self { calls })))
    }

    /// Takes the storage's lock, and reads its tables. Waits as long as the session, its front-end and `limit` allow.
    pub fn begin(
        &self,
        session: &SessionLink,
        front_end: &OwnedFd,
        limit: Option<Duration>,
    ) -> Result<(), StorageError> {
        let given_up = Arc::new(AtomicBool::new(false));
        // Without room: the thread learns whether this session still waits.
        let (done, begun) = sync_channel(0);
        let own = Arc::clone(&given_up);
        self.call(move |disk| {
            let backing = disk.image().backing();
            // Relaxed: it orders no other data.
            let outcome = backing.begin_use(&|| !own.load(Ordering::Relaxed));
            let is_begun = outcome.is_ok();
            if done.send(outcome.map_err(|error| error_line(&error))).is_err() && is_begun {
                let _ = backing.end_use();
            }
        })?;
        let end = limit.map(|limit| Instant::now() + limit);
        loop {
            match begun.recv_timeout(LOOK_AGAIN) {
                Ok(outcome) => return outcome.map_err(StorageError::Failed),
                Err(RecvTimeoutError::Disconnected) => return Err(no_thread()),
                Err(RecvTimeoutError::Timeout) => {}
            }
            let is_late = end.is_some_and(|end| Instant::now() >= end);
            if is_late || session.end_reason().is_some() || is_gone(front_end) {
                given_up.store(true, Ordering::Relaxed);
                let late = || StorageError::Failed("it does not answer".to_owned());
                return Err(if is_late { late() } else { StorageError::Ending });
            }
        }
    }

    /// Makes all writes durable, closes the storage's tables, and releases its lock.
    pub fn end(&self, timeout: Duration) -> Result<(), StorageError> {
        let (done, ended) = sync_channel(1);
        self.call(move |disk| {
            let synced = disk.sync_for_others();
            // Also after a failed sync, so that another server can use the storage.
            let ended = disk.image().backing().end_use();
            let _ = done.send(synced.and(ended).map_err(|error| error_line(&error)));
        })?;
        match ended.recv_timeout(timeout) {
            Ok(outcome) => outcome.map_err(StorageError::Failed),
            Err(RecvTimeoutError::Disconnected) => Err(no_thread()),
            Err(RecvTimeoutError::Timeout) => {
                Err(StorageError::Failed(format!("it has not answered after {} s", timeout.as_secs_f64())))
            }
        }
    }

    fn call(&self, call: impl FnOnce(&Disk) + Send + 'static) -> Result<(), StorageError> {
        self.calls.send(Box::new(call)).map_err(|_| no_thread())
    }
}

fn is_gone(front_end: &OwnedFd) -> bool {
    let mut socket = [PollFd::new(front_end, PollFlags::RDHUP)];
    let polled = poll(&mut socket, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    polled.is_ok() && socket[0].revents().intersects(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR)
}

fn run(wanted: &Receiver<Call>, disk: &Weak<Disk>) {
    for call in wanted {
        let Some(disk) = disk.upgrade() else { return };
        call(&disk);
    }
}

fn no_thread() -> StorageError {
    StorageError::Failed("the thread that calls it could not be started".to_owned())
}
