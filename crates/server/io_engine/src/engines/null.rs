//! An engine that completes every op at once and touches no data: what is left is everybody else's time.
//!
//! No system calls while ops flow; watched fds are looked at in `wait`, and now and then in `reap`, so that
//! a worker that never sleeps hears of them too.
//!
//! Not here: being right. Reads leave the buffers as they were.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use crate::engine::{
    Completion, Engine, EngineConfig, Event, FileId, FileSpec, Handles, Op, OpKind, Reap, Stats, Submit,
    WatchId, WatchToken,
};
use crate::engines::epoll::EpollWatcher;

/// Calls of `reap` between two looks at the watched fds.
const LOOK_EVERY: u32 = 256;

/// The engine, not yet started.
#[derive(Debug)]
pub struct NullEngine {
    core: NullCore,
}

impl NullEngine {
    /// An engine of `config.depth`.
    ///
    /// # Errors
    /// `epoll_create1`'s.
    pub fn new(config: &EngineConfig) -> io::Result<Self> {
        let depth = config.depth as usize;
        let watcher = EpollWatcher::new()?;
        let done = VecDeque::with_capacity(depth);
        Ok(Self { core: NullCore { depth, done, watcher, files: Vec::new(), reaps: 0 } })
    }
}

impl Engine for NullEngine {
    fn start(self: Box<Self>) -> io::Result<Handles> {
        let core = Rc::new(RefCell::new(self.core));
        Ok(Handles { submit: Box::new(NullSubmit(Rc::clone(&core))), reap: Box::new(NullReap(core)) })
    }

    fn describe(&self) -> String {
        "null: every request succeeds, no data moves".to_owned()
    }
}

#[derive(Debug)]
struct NullCore {
    depth: usize,
    done: VecDeque<Completion>,
    watcher: EpollWatcher,
    files: Vec<Option<FileSpec>>,
    reaps: u32,
}

struct NullSubmit(Rc<RefCell<NullCore>>);

impl Submit for NullSubmit {
    fn room(&self) -> usize {
        let core = self.0.borrow();
        core.depth - core.done.len()
    }

    #[inline]
    fn push(&mut self, op: Op) -> Result<(), Op> {
        let mut core = self.0.borrow_mut();
        if core.done.len() == core.depth {
            return Err(op);
        }
        assert!(core.files.get(op.file.0 as usize).is_some_and(Option::is_some), "not attached");
        let Op { token, kind, buffers, .. } = op;
        let stored_bytes = if let OpKind::Read { range } = kind { range.len_bytes() } else { 0 };
        let (result, sync_failed) = (Ok(()), false);
        core.done.push_back(Completion { token, result, sync_failed, stored_bytes, buffers });
        Ok(())
    }

    fn submit(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn in_flight(&self) -> usize {
        self.0.borrow().done.len()
    }

    fn attach_file(&mut self, spec: FileSpec) -> io::Result<FileId> {
        let files = &mut self.0.borrow_mut().files;
        let id = u32::try_from(files.len()).map_err(|_| io::ErrorKind::QuotaExceeded)?;
        files.push(Some(spec));
        Ok(FileId(id))
    }

    fn detach_file(&mut self, file: FileId) {
        let taken = self.0.borrow_mut().files.get_mut(file.0 as usize).and_then(Option::take);
        assert!(taken.is_some(), "{file:?} is not attached");
    }

    fn stats(&self) -> Stats {
        Stats::default()
    }
}

struct NullReap(Rc<RefCell<NullCore>>);

impl Reap for NullReap {
    fn watch(&mut self, fd: Arc<OwnedFd>, token: WatchToken) -> io::Result<WatchId> {
        self.0.borrow_mut().watcher.watch(fd, token)
    }

    fn unwatch(&mut self, id: WatchId) {
        self.0.borrow_mut().watcher.unwatch(id);
    }

    #[inline]
    fn reap(&mut self, events: &mut Vec<Event>) {
        let core = &mut *self.0.borrow_mut();
        events.extend(core.done.drain(..).map(Event::Completed));
        core.reaps = core.reaps.wrapping_add(1);
        if core.reaps.is_multiple_of(LOOK_EVERY) && !core.watcher.is_idle() {
            // What went wrong here goes wrong again in `wait`, which reports it.
            let _ = core.watcher.wait(Some(Duration::ZERO));
        }
        core.watcher.take_ready(events);
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        let core = &mut *self.0.borrow_mut();
        let timeout = if core.done.is_empty() { timeout } else { Some(Duration::ZERO) };
        core.watcher.wait(timeout)
    }

    fn arm(&mut self) -> io::Result<bool> {
        Ok(self.0.borrow().done.is_empty())
    }

    fn disarm(&mut self) -> io::Result<()> {
        self.0.borrow_mut().watcher.wait(Some(Duration::ZERO))
    }

    fn descriptor(&mut self) -> io::Result<OwnedFd> {
        self.0.borrow().watcher.fd().try_clone_to_owned()
    }

    fn cancel_all(&mut self) {}

    fn cancel_file(&mut self, _file: FileId) {}
}
