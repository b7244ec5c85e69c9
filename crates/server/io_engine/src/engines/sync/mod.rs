//! Makes calls in the worker itself if they do not block. A pool of threads makes the others.
//!
//! `queue → submit: the call → results → pop`, or `… → pool (threads/pool.rs) → results → pop`
//!
//! The kind of the file decides which thread makes its calls (`policy.rs`):
//!
//! | file | reads, writes | durable writes, `fdatasync` | `fallocate` |
//! |---|---|---|---|
//! | in memory | worker | worker: nothing to write out | worker if short |
//! | `O_DIRECT` | worker, which waits | pool | pool |
//! | page cache | worker with `RWF_NOWAIT`; `EAGAIN`: pool | pool | pool |
//!
//! - With `O_DIRECT` the worker blocks in one call after the other, as the user of this engine requested. Flushes use
//!   the pool, because they would delay the reads of the worker's other disks.
//! - A call in the worker has ended when `submit` returns. Only calls in the pool can be cancelled.

mod policy;

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;

use self::policy::{Attempt, Policy};
use crate::backend::{Call, IoBackend, QueueFull, RawResult, Target};
use crate::choose::storage::Storage;
use crate::config::EngineConfig;
use crate::core::Core;
use crate::engine::{Event, FileSpec, WatchId, WatchToken};
use crate::engines::plain;
use crate::engines::threads::pool_client::{Files, PoolClient};

/// The engine, not yet started.
pub type SyncEngine = Core<SyncBackend>;

impl SyncEngine {
    /// Makes the engine. It starts threads only when there are calls for them.
    ///
    /// # Errors
    /// Errors of the epoll set and the eventfd.
    pub fn new(config: EngineConfig) -> io::Result<Self> {
        Ok(Self::over(SyncBackend::new(&config)?, &config))
    }
}

#[derive(Debug)]
struct SyncFile {
    file: Arc<File>,
    policy: Policy,
}

#[derive(Clone, Copy, Debug)]
struct Queued {
    user_data: u64,
    target: Target,
    call: Call,
}

/// The backend.
#[derive(Debug)]
pub struct SyncBackend {
    files: Files<SyncFile>,
    queue: VecDeque<Queued>,
    pool: PoolClient,
    /// Maximum number of threads.
    threads: u32,
}

// SAFETY: 1. the pointers in queued calls belong to ops that the engine's core owns; the core moves between threads
// together with this value and only before it is started, when there are no ops.
unsafe impl Send for SyncBackend {}

impl SyncBackend {
    fn new(config: &EngineConfig) -> io::Result<Self> {
        let queue = VecDeque::with_capacity(config.depth as usize);
        let (files, threads) = (Files::new(), config.threads.max(1));
        Ok(Self { files, queue, pool: PoolClient::new(config)?, threads })
    }

    #[inline]
    fn make(&mut self, queued: &Queued) {
        let Queued { user_data, target, call } = queued;
        let Some(SyncFile { file, policy }) = self.files.get_mut(*target) else {
            return self.pool.finished(*user_data, -Errno::BADF.raw_os_error());
        };
        let (flags, waits) = match policy.attempt(call) {
            Attempt::Never => return self.pool.hand_over(*user_data, *target, file, call),
            Attempt::Here => (0, false),
            Attempt::HereAndWait => (0, true),
            Attempt::WithoutWaiting => (libc::RWF_NOWAIT, false),
        };
        // SAFETY: 1. the contract of `queue`: the buffers stay valid until the result was popped.
        let result = unsafe { plain::execute(file.as_raw_fd(), call, flags) };
        if flags != 0 && !policy.is_answer(call, result) {
            return self.pool.hand_over(*user_data, *target, file, call);
        }
        self.pool.finished(*user_data, result);
        if waits {
            self.pool.waited();
        }
    }
}

impl IoBackend for SyncBackend {
    fn describe(&self) -> String {
        let threads = self.threads;
        format!(
            "sync: in the worker; flushes, and calls that would wait for a page, on at most {threads} threads"
        )
    }

    fn serve_one_disk(&mut self) {
        self.pool.serve_one_disk();
    }

    fn register_file(&mut self, index: u32, spec: &FileSpec) -> io::Result<Target> {
        let storage = Storage::probe(spec.file()?)?;
        let policy = Policy::of(&storage);
        tracing::debug!(index, %storage, %policy, "file of the sync engine");
        self.pool.attach(index);
        Ok(self.files.put(index, SyncFile { file: Arc::clone(spec.file()?), policy }))
    }

    fn unregister_file(&mut self, index: u32, _target: Target) {
        self.files.remove(index);
        self.pool.detach(index);
    }

    unsafe fn queue(&mut self, user_data: u64, target: Target, call: &Call) -> Result<(), QueueFull> {
        self.queue.push_back(Queued { user_data, target, call: *call });
        Ok(())
    }

    fn submit(&mut self) -> io::Result<()> {
        while let Some(queued) = self.queue.pop_front() {
            self.make(&queued);
        }
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
        let place = self.queue.iter().position(|queued| queued.user_data == user_data);
        match place.and_then(|place| self.queue.remove(place)) {
            Some(_) => self.pool.finished(user_data, -Errno::CANCELED.raw_os_error()),
            None => self.pool.cancel(user_data),
        }
    }

    fn watch(&mut self, fd: Arc<OwnedFd>, token: WatchToken) -> io::Result<WatchId> {
        self.pool.watch(fd, token)
    }

    fn unwatch(&mut self, id: WatchId) {
        self.pool.unwatch(id);
    }
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation)]
mod tests {
    use disk_image::Alignment;
    use rustix::fs::{Advice, fadvise};

    use super::*;
    use crate::backend::Buffers;
    use crate::backend::Verb;

    const LEN_BYTES: usize = 64 << 10;

    fn kernel() -> SyncBackend {
        SyncBackend::new(&EngineConfig { depth: 8, ..EngineConfig::default() }).unwrap()
    }

    fn spec(file: File) -> FileSpec {
        FileSpec::of_file(Arc::new(file), Alignment { memory_bytes: 1, offset_bytes: 1 })
    }

    fn result_of(kernel: &mut SyncBackend, target: Target, call: &Call) -> i32 {
        // SAFETY: 1. the callers' buffers live until the result is popped below.
        assert!(unsafe { kernel.queue(7, target, call) }.is_ok());
        loop {
            kernel.wait(None).unwrap();
            kernel.begin_reap();
            if let Some(result) = kernel.pop() {
                return result.result;
            }
        }
    }

    fn whole(verb: Verb, bytes: &mut [u8]) -> Call {
        let buffers = Buffers::One { base: bytes.as_mut_ptr(), len_bytes: LEN_BYTES as u32 };
        Call { verb, flags: 0, offset_bytes: 0, len_bytes: LEN_BYTES as u64, buffers }
    }

    #[test]
    fn pages_that_are_not_cached_are_read_all_the_same() {
        let program = std::env::current_exe().unwrap();
        let file = tempfile::tempfile_in(program.parent().unwrap()).unwrap();
        let (mut kernel, spec) = (kernel(), spec(file));
        let target = kernel.register_file(0, &spec).unwrap();
        let (mut written, mut read) = (vec![7; LEN_BYTES], vec![0; LEN_BYTES]);
        for round in 0..20 {
            written.fill(round);
            let wrote = result_of(&mut kernel, target, &whole(Verb::Write, &mut written));
            assert_eq!(wrote, LEN_BYTES as i32);
            spec.file().unwrap().sync_all().unwrap();
            fadvise(&**spec.file().unwrap(), 0, None, Advice::DontNeed).unwrap();
            let mut done = 0;
            while done < LEN_BYTES {
                let mut call = whole(Verb::Read, &mut read);
                call.offset_bytes = done as u64;
                let rest = &mut read[done..];
                call.buffers = Buffers::One { base: rest.as_mut_ptr(), len_bytes: rest.len() as u32 };
                let result = result_of(&mut kernel, target, &call);
                assert!(result > 0, "{result} at byte {done}");
                done += result as usize;
            }
            assert!(read == written, "round {round}");
        }
    }

    #[test]
    fn call_on_a_file_that_is_gone_fails_instead_of_meeting_another_file() {
        let mut kernel = kernel();
        let target = kernel.register_file(0, &spec(tempfile::tempfile().unwrap())).unwrap();
        kernel.unregister_file(0, target);
        let mut bytes = vec![0; LEN_BYTES];
        let result = result_of(&mut kernel, target, &whole(Verb::Read, &mut bytes));
        assert_eq!(result, -libc::EBADF);
    }
}
