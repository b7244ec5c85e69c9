//! Test engine that completes every op at once and moves no data, to measure the cost of the other layers.
//!
//! It makes no system call while ops are in flight, except for occasional checks of the watched fds in `reap`, which
//! let a worker that never sleeps see kicks. Reads leave the buffers unchanged.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use crate::config::EngineConfig;
use crate::engine::{Completion, Engine, Event, FileId, FileSpec, Op, OpKind, Stats, WatchId, WatchToken};
use crate::engines::epoll::EpollWatcher;

/// Calls of `reap` between two checks of the watched fds.
const LOOK_EVERY: u32 = 256;

/// The engine. See the module documentation.
#[derive(Debug)]
pub struct NullEngine {
    depth: usize,
    /// Completions that `reap` passes on as they are.
    done: Vec<Event>,
    watcher: EpollWatcher,
    files: Vec<Option<FileSpec>>,
    reaps: u32,
}

impl NullEngine {
    /// Makes an engine of `config.depth`.
    ///
    /// # Errors
    /// Errors of `epoll_create1`.
    pub fn new(config: &EngineConfig) -> io::Result<Self> {
        let depth = config.depth as usize;
        let watcher = EpollWatcher::new()?;
        Ok(Self { depth, done: Vec::with_capacity(depth), watcher, files: Vec::new(), reaps: 0 })
    }
}

impl Engine for NullEngine {
    fn describe(&self) -> String {
        "null: every request succeeds, no data moves".to_owned()
    }

    fn room(&self) -> usize {
        self.depth - self.done.len()
    }

    #[inline]
    fn push(&mut self, op: Op) -> Result<(), Op> {
        if self.done.len() == self.depth {
            return Err(op);
        }
        assert!(self.files.get(op.file.0 as usize).is_some_and(Option::is_some), "not attached");
        let Op { token, kind, buffers, .. } = op;
        let stored_bytes = if let OpKind::Read { range } = kind { range.len_bytes() } else { 0 };
        let (result, sync_failed) = (Ok(()), false);
        self.done.push(Event::Completed(Completion { token, result, sync_failed, stored_bytes, buffers }));
        Ok(())
    }

    fn submit(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn in_flight(&self) -> usize {
        self.done.len()
    }

    fn attach_file(&mut self, spec: FileSpec) -> io::Result<FileId> {
        let id = u32::try_from(self.files.len()).map_err(|_| io::ErrorKind::QuotaExceeded)?;
        self.files.push(Some(spec));
        Ok(FileId(id))
    }

    fn detach_file(&mut self, file: FileId) {
        let taken = self.files.get_mut(file.0 as usize).and_then(Option::take);
        assert!(taken.is_some(), "{file:?} is not attached");
    }

    fn stats(&self) -> Stats {
        Stats::default()
    }

    fn watch(&mut self, fd: Arc<OwnedFd>, token: WatchToken) -> io::Result<WatchId> {
        self.watcher.watch(fd, token)
    }

    fn unwatch(&mut self, id: WatchId) {
        self.watcher.unwatch(id);
    }

    #[inline]
    fn reap(&mut self, events: &mut Vec<Event>) {
        if events.is_empty() {
            std::mem::swap(events, &mut self.done);
        } else {
            events.append(&mut self.done);
        }
        self.reaps = self.reaps.wrapping_add(1);
        if self.reaps.is_multiple_of(LOOK_EVERY) && !self.watcher.is_idle() {
            // If the error persists, `wait` reports it.
            let _ = self.watcher.wait(Some(Duration::ZERO));
        }
        self.watcher.take_ready(events);
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        let timeout = if self.done.is_empty() { timeout } else { Some(Duration::ZERO) };
        self.watcher.wait(timeout)
    }

    fn arm(&mut self) -> io::Result<bool> {
        Ok(self.done.is_empty())
    }

    fn disarm(&mut self) -> io::Result<()> {
        self.watcher.wait(Some(Duration::ZERO))
    }

    fn descriptor(&mut self) -> io::Result<OwnedFd> {
        self.watcher.fd().try_clone_to_owned()
    }

    fn cancel_all(&mut self) {}

    fn cancel_file(&mut self, _file: FileId) {}
}
