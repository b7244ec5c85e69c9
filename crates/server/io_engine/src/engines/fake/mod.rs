//! Test engine: real files, plain system calls, and injected faults.
//!
//! It runs under the same core as io_uring and replaces only the kernel: `submit` makes the calls one after the other,
//! and a script (`script.rs`) decides which of them fail, stop short, hang or return late.

mod script;

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use self::script::Verdict;
pub use self::script::{FakeHandle, Fault, Rule, When};
use crate::backend::{Buffers, Call, IoBackend, QueueFull, RawResult, Target};
use crate::config::EngineConfig;
use crate::core::Core;
use crate::engine::{Event, FileSpec, WatchId, WatchToken};
use crate::engines::epoll::EpollWatcher;
use crate::engines::plain;

/// The engine, not yet started.
pub type FakeEngine = Core<FakeBackend>;

impl FakeEngine {
    /// Makes an engine, and the handle that injects faults.
    ///
    /// # Errors
    /// Errors of the epoll set and the eventfd.
    pub fn new(config: EngineConfig) -> io::Result<(Self, FakeHandle)> {
        let handle = FakeHandle::new()?;
        let mut watcher = EpollWatcher::new()?;
        watcher.add_waker(handle.wake_fd())?;
        let backend = FakeBackend {
            handle: handle.clone(),
            watcher,
            queue: VecDeque::new(),
            hanging: Vec::new(),
            results: Vec::new(),
            budget: 0,
        };
        Ok((Self::over(backend, &config), handle))
    }
}

#[derive(Clone, Copy, Debug)]
struct Queued {
    user_data: u64,
    fd: i32,
    call: Call,
}

#[derive(Debug)]
struct Hanging {
    queued: Queued,
    /// Ignores cancellation, as a request in a dead device does.
    stuck: bool,
}

/// The backend.
#[derive(Debug)]
pub struct FakeBackend {
    handle: FakeHandle,
    watcher: EpollWatcher,
    queue: VecDeque<Queued>,
    hanging: Vec<Hanging>,
    results: Vec<RawResult>,
    budget: usize,
}

// SAFETY: 1. the pointers in queued calls belong to ops that the engine's core owns; the core moves between threads
// together with this value and only before it is started, when there are no ops.
unsafe impl Send for FakeBackend {}

impl FakeBackend {
    fn run(&mut self, queued: Queued) {
        let Queued { user_data, fd, call } = queued;
        let result = match self.handle.judge(&call) {
            Verdict::Hang { stuck } => {
                self.hanging.push(Hanging { queued, stuck });
                self.handle.set_hanging(self.hanging.len());
                return;
            }
            Verdict::Fail(errno) => -errno.raw_os_error(),
            Verdict::Run { at_most_bytes } => run_call(fd, &call, at_most_bytes),
        };
        self.results.push(RawResult { user_data, result });
    }

    fn run_released(&mut self) {
        if self.handle.take_release() {
            let hanging = std::mem::take(&mut self.hanging);
            self.handle.set_hanging(0);
            for hanging in hanging {
                let Queued { user_data, fd, call } = hanging.queued;
                self.results.push(RawResult { user_data, result: run_call(fd, &call, None) });
            }
        }
    }
}

impl IoBackend for FakeBackend {
    fn describe(&self) -> String {
        "fake: plain system calls with faults on request".to_owned()
    }

    fn check_shareable(&self) -> io::Result<()> {
        Ok(())
    }

    fn register_file(&mut self, _index: u32, spec: &FileSpec) -> io::Result<Target> {
        Ok(Target::Fd(spec.file()?.as_raw_fd()))
    }

    fn unregister_file(&mut self, _index: u32, _target: Target) {}

    unsafe fn queue(&mut self, user_data: u64, target: Target, call: &Call) -> Result<(), QueueFull> {
        let Target::Fd(fd) = target else { unreachable!("the fake registers no files") };
        self.queue.push_back(Queued { user_data, fd, call: *call });
        Ok(())
    }

    fn submit(&mut self) -> io::Result<()> {
        while let Some(queued) = self.queue.pop_front() {
            self.run(queued);
        }
        Ok(())
    }

    fn begin_reap(&mut self) {
        self.run_released();
        // If the error persists, `wait` reports it.
        let _ = self.watcher.wait(Some(Duration::ZERO));
        self.budget = self.results.len();
    }

    fn pop(&mut self) -> Option<RawResult> {
        self.budget = self.budget.checked_sub(1)?;
        let place = self.handle.pick(self.budget + 1);
        Some(self.results.remove(place))
    }

    fn take_ready(&mut self, events: &mut Vec<Event>) {
        self.watcher.take_ready(events);
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.submit()?;
        self.run_released();
        let timeout = if self.results.is_empty() { timeout } else { Some(Duration::ZERO) };
        self.watcher.wait(timeout)
    }

    fn arm(&mut self) -> io::Result<bool> {
        self.submit()?;
        self.run_released();
        Ok(self.results.is_empty())
    }

    fn disarm(&mut self) -> io::Result<()> {
        self.watcher.wait(Some(Duration::ZERO))
    }

    fn descriptor(&mut self) -> io::Result<BorrowedFd<'_>> {
        Ok(self.watcher.fd())
    }

    fn cancel(&mut self, user_data: u64) {
        let names = |queued: &Queued| queued.user_data == user_data;
        if let Some(place) = self.hanging.iter().position(|hanging| names(&hanging.queued) && !hanging.stuck)
        {
            self.hanging.remove(place);
            self.handle.set_hanging(self.hanging.len());
            self.results.push(RawResult { user_data, result: -libc::ECANCELED });
        }
    }

    fn watch(&mut self, fd: Arc<OwnedFd>, token: WatchToken) -> io::Result<WatchId> {
        self.watcher.watch(fd, token)
    }

    fn unwatch(&mut self, id: WatchId) {
        self.watcher.unwatch(id);
    }
}

/// Makes the call, shortened to `at_most_bytes`.
fn run_call(fd: RawFd, call: &Call, at_most_bytes: Option<u64>) -> i32 {
    let pieces = cut(call.buffers, at_most_bytes.unwrap_or(u64::MAX));
    #[allow(clippy::cast_possible_truncation)] // at most 1024
    let count = pieces.len() as u32;
    let call = Call { buffers: Buffers::Many { first: pieces.as_ptr(), count }, ..*call };
    // SAFETY: 1. the contract of `queue`: buffers and file stay valid until the result was popped.
    unsafe { plain::execute(fd, &call, 0) }
}

/// The first `left` bytes of `buffers`.
fn cut(buffers: Buffers, mut left: u64) -> Vec<libc::iovec> {
    let whole = match buffers {
        Buffers::None => Vec::new(),
        Buffers::One { base, len_bytes } => {
            vec![libc::iovec { iov_base: base.cast(), iov_len: len_bytes as usize }]
        }
        Buffers::Many { first, count } => {
            // SAFETY: 1. the contract of `queue`: the array stays valid until the result was popped.
            let array = unsafe { std::slice::from_raw_parts(first, count as usize) };
            array.to_vec()
        }
    };
    let mut pieces = Vec::with_capacity(whole.len());
    for piece in whole {
        let iov_len = usize::try_from(left).map_or(piece.iov_len, |left| piece.iov_len.min(left));
        left -= iov_len as u64;
        pieces.push(libc::iovec { iov_base: piece.iov_base, iov_len });
    }
    pieces.retain(|piece| piece.iov_len > 0);
    pieces
}
