//! The part of a session that workers and the disk use: its id, its cache mode, and how to end it.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::event::{EventfdFlags, eventfd};
use virtio_blk::WriteCache;

use crate::host::signal::signal;

/// Why a session must end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum EndReason {
    /// The server stops, or the disk is removed.
    Stop,
    /// Another front-end needs a session, and this session's front-end has sent nothing.
    MadeRoom,
    /// The front-end truncated the memory that it shares.
    MemoryFault(String),
}

/// A session as workers and its disk see it.
#[derive(Debug)]
pub(crate) struct SessionLink {
    id: u64,
    /// Whether writes may complete before they are durable. The session sets it; workers read it.
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
        // Relaxed: the guest relies on a new mode only after the answer, which is sent after the store.
        if self.writeback.load(Ordering::Relaxed) { WriteCache::Writeback } else { WriteCache::Writethrough }
    }

    pub(crate) fn set_write_cache(&self, cache: WriteCache) {
        self.writeback.store(cache == WriteCache::Writeback, Ordering::Relaxed);
    }

    /// Makes the session's thread end the session. If this is called again, the first reason remains.
    pub(crate) fn end(&self, reason: EndReason) {
        self.note_end(reason);
        signal(&self.wake);
    }

    /// Like `end`, but does not wake the thread.
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
