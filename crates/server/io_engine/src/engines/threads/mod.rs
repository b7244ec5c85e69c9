//! A pool of threads that make blocking calls. Works with any file and any kernel.
//!
//! `queue → batch → pool: preadv2, pwritev2, fdatasync, fallocate → results → pop`
//!
//! - Each call in flight has a thread, up to [`EngineConfig::threads`], of which each file has a share. Further calls
//!   wait in order.
//! - The worker makes I/O calls itself only if the host refuses to start any thread.

pub(crate) mod pool_client;

pub(crate) mod pool;

mod schedule;

use std::fs::File;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;

use self::pool_client::{Files, PoolClient};
use crate::backend::{Call, IoBackend, QueueFull, RawResult, Target};
use crate::config::EngineConfig;
use crate::core::Core;
use crate::engine::{Event, FileSpec, WatchId, WatchToken};

/// The engine, not yet started.
pub type ThreadsEngine = Core<ThreadsBackend>;

impl ThreadsEngine {
    /// Makes the engine. It starts threads only when there are calls for them.
    ///
    /// # Errors
    /// Errors of the epoll set and the eventfd.
    pub fn new(config: EngineConfig) -> io::Result<Self> {
        let threads = config.threads.max(1);
        let backend = ThreadsBackend { files: Files::new(), pool: PoolClient::new(&config)?, threads };
        Ok(Self::over(backend, &config))
    }
}

/// The backend.
#[derive(Debug)]
pub struct ThreadsBackend {
    files: Files<Arc<File>>,
    pool: PoolClient,
    /// Maximum number of threads.
    threads: u32,
}

impl IoBackend for ThreadsBackend {
    fn describe(&self) -> String {
        format!("threads: at most {}, started when calls wait", self.threads)
    }

    fn serve_one_disk(&mut self) {
        self.pool.serve_one_disk();
    }

    fn register_file(&mut self, index: u32, spec: &FileSpec) -> io::Result<Target> {
        self.pool.attach(index);
        Ok(self.files.put(index, Arc::clone(spec.file()?)))
    }

    fn unregister_file(&mut self, index: u32, _target: Target) {
        self.files.remove(index);
        self.pool.detach(index);
    }

    unsafe fn queue(&mut self, user_data: u64, target: Target, call: &Call) -> Result<(), QueueFull> {
        match self.files.get_mut(target) {
            Some(file) => self.pool.hand_over(user_data, target, file, call),
            None => self.pool.finished(user_data, -Errno::BADF.raw_os_error()),
        }
        Ok(())
    }

    fn submit(&mut self) -> io::Result<()> {
        self.pool.start();
        Ok(())
    }

    fn begin_reap(&mut self) {
        self.pool.collect();
    }

    fn pop(&mut self) -> Option<RawResult> {
        self.pool.pop()
    }

    fn take_ready(&mut self, events: &mut Vec<Event>) {
        self.pool.take_ready(events);
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.submit()?;
        self.pool.sleep(timeout)
    }

    fn arm(&mut self) -> io::Result<bool> {
        self.submit()?;
        Ok(self.pool.arm())
    }

    fn disarm(&mut self) -> io::Result<()> {
        self.pool.disarm()
    }

    fn descriptor(&mut self) -> io::Result<BorrowedFd<'_>> {
        Ok(self.pool.descriptor())
    }

    fn cancel(&mut self, user_data: u64) {
        self.pool.cancel(user_data);
    }

    fn watch(&mut self, fd: Arc<OwnedFd>, token: WatchToken) -> io::Result<WatchId> {
        self.pool.watch(fd, token)
    }

    fn unwatch(&mut self, id: WatchId) {
        self.pool.unwatch(id);
    }
}
