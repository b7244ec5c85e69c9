//! Threads that block in `aio_suspend` while the worker sleeps, and wake it.
//!
//! `send (oldest request of a descriptor) → start → waiter: aio_suspend → release → eventfd, if the worker sleeps`
//!
//! - Each busy descriptor has one waiter. Requests end in order, so the oldest ends first, and later ones need no
//!   waiter. One list for all descriptors would be outdated with the next request, and a running `aio_suspend` cannot
//!   be updated.
//! - No wake-up is lost. The worker first records that it sleeps, then checks that each oldest request is pending or
//!   has a waiter. A waiter first releases its request, then checks whether the worker sleeps. All accesses are
//!   sequentially consistent, so one of the two sees the other.
//! - A waiter without work ends after [`IDLE`].
//!
//! Why not the library's notifications (glibc 2.36): `SIGEV_THREAD` starts a thread per request under the library's one
//! lock, drops the notification if that fails, and is slower (docs/decisions/0014). `SIGEV_SIGNAL` signals the process,
//! not a thread: one worker's signalfd would consume another's signals, and every thread would have to block the
//! signal. At the user's limit on queued signals, `EAGAIN` replaces the request's result. glibc does not support
//! `SIGEV_THREAD_ID`.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use sandbox::{Entry, Role};

use super::requests::ControlBlocks;

/// How long a waiter waits for work before it ends.
const IDLE: Duration = Duration::from_secs(10);
/// Stack size of a waiter, enough for `aio_suspend`.
const STACK_BYTES: usize = 64 << 10;

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<u32>,
    threads: usize,
    idle: usize,
    ending: bool,
}

#[derive(Debug)]
struct Shared {
    blocks: Arc<ControlBlocks>,
    state: Mutex<State>,
    work: Condvar,
    sleeping: AtomicBool,
    wake: OwnedFd,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the next request to wait for; `None`: the thread ends.
    fn next(&self) -> Option<u32> {
        let mut state = self.state();
        loop {
            if let Some(slot) = state.queue.pop_front() {
                return Some(slot);
            }
            if state.ending {
                state.threads -= 1;
                return None;
            }
            state.idle += 1;
            let waited = self.work.wait_timeout(state, IDLE);
            let timeout;
            (state, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            state.idle -= 1;
            if timeout.timed_out() && state.queue.is_empty() {
                state.threads -= 1;
                return None;
            }
        }
    }

    fn run(&self) {
        while let Some(slot) = self.next() {
            self.wait_for(slot);
            self.blocks.release(slot);
            // After the release of the request: see the module documentation.
            if self.sleeping.swap(false, Ordering::SeqCst) {
                let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
            }
        }
    }

    fn wait_for(&self, slot: u32) {
        let list = [self.blocks.at(slot).cast_const()];
        loop {
            // SAFETY: 1. list: one entry, as passed; 2. block: `self` keeps all blocks alive, and this one is reused
            // only after its release.
            let ended = unsafe { libc::aio_suspend(list.as_ptr(), 1, std::ptr::null()) };
            if ended == 0 || io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
                return;
            }
        }
    }
}

/// The waiters. Dropping this waits for no thread: a waiter keeps what it needs alive.
#[derive(Debug)]
pub(super) struct Waiters {
    shared: Arc<Shared>,
    /// Requests that `start` will hand to waiters.
    sent: Vec<u32>,
    last_ticket: u64,
    /// A request has no waiter, because no thread could be started.
    short: bool,
}

impl Waiters {
    pub fn new(blocks: Arc<ControlBlocks>) -> io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let (state, work, sleeping) = (Mutex::default(), Condvar::new(), AtomicBool::new(false));
        let shared = Arc::new(Shared { blocks, state, work, sleeping, wake });
        Ok(Self { shared, sent: Vec::new(), last_ticket: 0, short: false })
    }

    /// A waiter that returns while the worker sleeps writes to this descriptor. The worker never reads it.
    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.shared.wake.as_fd()
    }

    /// Makes the first waiter that returns from now on write to the eventfd.
    pub fn say_sleeping(&self) {
        self.shared.sleeping.store(true, Ordering::SeqCst);
    }

    /// Records that the worker is awake.
    pub fn disarm(&self) {
        self.shared.sleeping.store(false, Ordering::SeqCst);
    }

    /// Requests a waiter for this request; `start` starts it. Returns the ticket that marks the block until the waiter
    /// returns.
    pub fn send(&mut self, slot: u32) -> u64 {
        self.last_ticket += 1;
        self.shared.blocks.hold(slot, self.last_ticket);
        self.sent.push(slot);
        self.last_ticket
    }

    /// Starts waiters for the requests passed to `send`. Returns false if threads are missing for some of them.
    pub fn start(&mut self) -> bool {
        if self.sent.is_empty() && !self.short {
            return true;
        }
        let mut state = self.shared.state();
        let count = self.sent.len();
        state.queue.extend(self.sent.drain(..));
        let wanted = state.queue.len().saturating_sub(state.idle);
        state.threads += wanted;
        drop(state);
        (0..count).for_each(|_| self.shared.work.notify_one());
        let started = (0..wanted).take_while(|_| self.start_thread()).count();
        self.shared.state().threads -= wanted - started;
        self.short = started < wanted;
        !self.short
    }

    fn start_thread(&self) -> bool {
        let shared = Arc::clone(&self.shared);
        let builder = std::thread::Builder::new().name("bareblk-aio".into()).stack_size(STACK_BYTES);
        let entry = Entry::of(Role::EngineThread);
        let spawned = builder.spawn(move || {
            entry.enter_or_end();
            shared.run();
        });
        if let Err(error) = &spawned {
            tracing::debug!(%error, "cannot start a thread that waits for a request");
        }
        spawned.is_ok()
    }
}

impl Drop for Waiters {
    fn drop(&mut self) {
        self.shared.state().ending = true;
        self.shared.work.notify_all();
    }
}
