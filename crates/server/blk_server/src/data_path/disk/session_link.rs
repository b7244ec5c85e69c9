//! What workers and a disk know of a session: its id, its cache mode, and how to end it.
//!
//! Not here: what only sessions and the server share (`session/shared.rs`).

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::event::{EventfdFlags, eventfd};
use virtio_blk::WriteCache;

use crate::host::signal::signal;

/// Why a session is told to end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum EndReason {
    /// The server stops, or the disk is removed.
    Stop,
    /// Another front-end needs the place, and this one never said anything.
    MadeRoom,
    /// The front-end truncated the memory it shares.
    MemoryFault(String),
}

/// One per session.
#[derive(Debug)]
pub(crate) struct SessionLink {
    id: u64,
    /// Whether writes may complete before they are durable; set by the session, read by workers.
    writeback: AtomicBool,
    /// Wakes the session's thread.
    wake: Arc<OwnedFd>,
    end: Mutex<Option<EndReason>>,
}

impl SessionLink {
    pub(crate) fn new(id: u64) -> std::io::Result<Arc<Self>> {
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        Ok(Arc::new(Self { id, writeback: AtomicBool::new(true), wake, end: Mutex::default() }))
    }

    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    pub(crate) fn wake_fd(&self) -> &Arc<OwnedFd> {
        &self.wake
    }

    pub(crate) fn write_cache(&self) -> WriteCache {
        // Relaxed: a guest that changes the mode waits for the answer before it relies on it, and the
        // answer is sent after the store.
        if self.writeback.load(Ordering::Relaxed) { WriteCache::Writeback } else { WriteCache::Writethrough }
    }

    pub(crate) fn set_write_cache(&self, cache: WriteCache) {
        self.writeback.store(cache == WriteCache::Writeback, Ordering::Relaxed);
    }

    /// Asks the session's thread to end it. The first reason stays.
    pub(crate) fn end(&self, reason: EndReason) {
        self.note_end(reason);
        signal(&self.wake);
    }

    /// As `end`, but the thread is not woken: it sees the reason when something else wakes it.
    pub(crate) fn note_end(&self, reason: EndReason) {
        self.lock().get_or_insert(reason);
    }

    pub(crate) fn end_reason(&self) -> Option<EndReason> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Option<EndReason>> {
        self.end.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
