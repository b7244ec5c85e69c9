//! Signals an eventfd that is shared with another process, without ever waiting.
//!
//! `write(2)` waits while the counter is full, unless the open file has `O_NONBLOCK`. The other process can clear that
//! flag at any time, and eventfds refuse `RWF_NOWAIT`. A completed Linux AIO call adds one to the eventfd in its block
//! (`IOCB_FLAG_RESFD`) and never waits; a full counter stays full.
//!
//! - The call reads nothing from an empty memfd, so it has completed when `io_submit` returns.
//! - Each thread has a context. When the thread ends, another thread reuses the context, because destroying it could
//!   block.
//! - Without Linux AIO, signalling falls back to `write(2)`, and [`prepare_signals`] reports that.
//!
//! Interface: io_submit(2).

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Mutex, OnceLock, PoisonError};

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::Errno;

use super::RESFD;
use super::context::{Command, Context, IoEvent, Iocb, cannot_set_up};

/// Capacity of a context. Each call occupies an entry until its result is read.
const PLACES: u32 = 32;

/// Contexts of threads that have ended.
static IDLE: Mutex<Vec<Context>> = Mutex::new(Vec::new());
/// The file that all calls read from.
static EMPTY: OnceLock<OwnedFd> = OnceLock::new();

thread_local! {
    static SIGNALLER: RefCell<Signaller> = const { RefCell::new(Signaller::NotMade) };
}

#[derive(Debug)]
enum Signaller {
    NotMade,
    Made {
        context: Option<Context>,
        taken: u32,
    },
    /// The kernel or a limit refuses a context.
    Impossible,
}

impl Drop for Signaller {
    fn drop(&mut self) {
        if let Self::Made { context, .. } = self
            && let Some(context) = context.take()
        {
            IDLE.lock().unwrap_or_else(PoisonError::into_inner).push(context);
        }
    }
}

/// Prepares this thread to signal without waiting, if it is not prepared yet.
///
/// # Errors
/// Why the context cannot be made. [`signal_shared`] then uses `write(2)`, and the other process can make it wait.
pub fn prepare_signals() -> io::Result<()> {
    SIGNALLER.with(|signaller| match &mut *signaller.borrow_mut() {
        Signaller::Made { .. } => Ok(()),
        not_made => match make() {
            Ok(made) => {
                *not_made = made;
                Ok(())
            }
            Err(errno) => {
                // This state is final. Another attempt would make system calls that the worker's sandbox forbids, and
                // the kernel would kill the worker.
                *not_made = Signaller::Impossible;
                Err(cannot_set_up(errno, PLACES))
            }
        },
    })
}

/// Adds one to an eventfd that is shared with another process. A full counter stays full.
#[inline]
pub fn signal_shared(eventfd: impl AsFd) {
    let eventfd = eventfd.as_fd();
    // A thread that is about to end has already released its context.
    let done = SIGNALLER.try_with(|signaller| signaller.borrow_mut().signal(eventfd.as_raw_fd()));
    if done != Ok(true) {
        let _ = rustix::io::write(eventfd, &1u64.to_ne_bytes());
    }
}

fn make() -> Result<Signaller, Errno> {
    if EMPTY.get().is_none() {
        // If another thread has set its memfd meanwhile, this thread uses that one.
        let _ = EMPTY.set(memfd_create("bareblk-empty", MemfdFlags::CLOEXEC)?);
    }
    let idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner).pop();
    let context = idle.map_or_else(|| Context::without_waiting(PLACES), Ok)?;
    // Assumes that the context is full, because a context from another thread may be full.
    Ok(Signaller::Made { context: Some(context), taken: PLACES })
}

impl Signaller {
    /// Returns false if the eventfd was not signalled.
    #[inline]
    fn signal(&mut self, eventfd: i32) -> bool {
        if matches!(self, Self::NotMade) {
            *self = make().unwrap_or(Self::Impossible);
        }
        let (Self::Made { context: Some(context), taken }, Some(empty)) = (self, EMPTY.get()) else {
            return false;
        };
        if *taken == PLACES {
            empty_out(context);
            *taken = 0;
        }
        let mut call = Iocb {
            command: Command::Pread as u16,
            fd: empty.as_raw_fd().cast_unsigned(),
            flags: RESFD,
            resfd: eventfd.cast_unsigned(),
            ..Iocb::default()
        };
        *taken += 1;
        // SAFETY: 1. `call` is on our stack, and the kernel uses it only during this call; 2. the call reads no bytes,
        // and has no buffer.
        unsafe { context.submit(&[&raw mut call]) }.is_ok()
    }
}

/// Reads and discards all results.
fn empty_out(context: &Context) {
    let mut events = [IoEvent::default(); PLACES as usize];
    while context
        .take(0, &mut events, Some(std::time::Duration::ZERO))
        .is_ok_and(|count| count == events.len())
    {}
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    fn counter(fd: &OwnedFd) -> u64 {
        let mut bytes = [0; 8];
        rustix::io::read(fd, &mut bytes).unwrap();
        u64::from_ne_bytes(bytes)
    }

    #[test]
    fn each_signal_adds_one_also_beyond_the_places_of_a_context() {
        let fd = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        (0..1000).for_each(|_| signal_shared(&fd));
        assert_eq!(counter(&fd), 1000);
    }

    #[test]
    fn full_counter_that_blocks_its_writers_is_not_waited_for() {
        let fd = eventfd(0, EventfdFlags::empty()).unwrap();
        rustix::io::write(&fd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        (0..100).for_each(|_| signal_shared(&fd));
        assert_eq!(counter(&fd), u64::MAX);
    }

    #[test]
    fn threads_that_come_and_go_share_a_context() {
        let fd = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        for _ in 0..100 {
            std::thread::scope(|threads| threads.spawn(|| signal_shared(&fd)).join().unwrap());
        }
        assert_eq!(counter(&fd), 100);
    }
}
