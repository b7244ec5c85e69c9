//! One session's calls of storage on another machine, which may not answer.
//!
//! `session → begin | end → this thread, one call after another → the session, which waits only so long`
//!
//! The thread has rights that a session's thread lacks: to connect to the other machine again.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel, sync_channel};
use std::sync::{Arc, Weak};
use std::time::Duration;

use sandbox::Role;

use crate::data_path::disk::Disk;
use crate::data_path::disk::session_link::SessionLink;
use crate::data_path::disk::storage_answer::{StorageError, no_thread, wait_begun, wait_ended};
use crate::host::error_line::error_line;

type Call = Box<dyn FnOnce(&Disk) + Send>;

/// Makes the calls; ends when it is dropped and the last call is over.
#[derive(Debug)]
pub(crate) struct StorageThread {
    calls: Sender<Call>,
}

impl StorageThread {
    /// Starts the thread for a session of `disk`; `None`: the disk is on this host. To be called before the calling thread
    /// takes its role.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(disk: &Arc<Disk>) -> io::Result<Option<Arc<Self>>> {
        let image = disk.image();
        let backing = image.backing();
        if !backing.is_remote() {
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

    /// Takes the storage's lock. Waits as long as the session, its front-end and `limit` allow.
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
            let image = disk.image();
            let backing = image.backing();
            // Relaxed: it orders no other data.
            let outcome = backing.begin_use(&|| !own.load(Ordering::Relaxed));
            let is_begun = outcome.is_ok();
            if done.send(outcome.map_err(|error| error_line(&error))).is_err() && is_begun {
                let _ = backing.end_use();
            }
        })?;
        wait_begun(&begun, session, front_end, limit, || given_up.store(true, Ordering::Relaxed))
    }

    /// Makes all writes durable, and releases the storage's lock.
    pub fn end(&self, timeout: Duration) -> Result<(), StorageError> {
        let (done, ended) = sync_channel(1);
        self.call(move |disk| {
            let synced = disk.sync_for_others();
            // Also after a failed sync, so that another server can use the storage.
            let ended = disk.image().backing().end_use();
            let _ = done.send(synced.and(ended).map_err(|error| error_line(&error)));
        })?;
        wait_ended(&ended, timeout)
    }

    fn call(&self, call: impl FnOnce(&Disk) + Send + 'static) -> Result<(), StorageError> {
        self.calls.send(Box::new(call)).map_err(|_| no_thread())
    }
}

fn run(wanted: &Receiver<Call>, disk: &Weak<Disk>) {
    for call in wanted {
        let Some(disk) = disk.upgrade() else { return };
        call(&disk);
    }
}
