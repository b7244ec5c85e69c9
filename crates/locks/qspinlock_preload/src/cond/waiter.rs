//! One waiting thread: a semaphore on its stack, because threads can be cancelled in the C library's
//! semaphore calls.
//!
//! Cancellation unwinds the thread from inside `sem_wait`. When it reaches a frame, the C library calls what
//! the frame pushed with `_pthread_cleanup_push`, before the handlers of outer frames. No frame in between may
//! have a destructor, because the C library's unwinding must not meet one in Rust.
//!
//! One compare-exchange on the waiter's own word decides how a wait ends: `waiting → picked` by the
//! signalling thread (with the list's lock) or `waiting → left` by the waiter itself (without it).
//!
//! See also: the list of waiters (`waiters.rs`).

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering::Relaxed};

use libc::{EINTR, clockid_t, sem_t, timespec};

use crate::patience::Time;
use crate::thread::{errno, keeping_errno};

unsafe extern "C-unwind" {
    fn sem_wait(sem: *mut sem_t) -> c_int;
    fn sem_clockwait(sem: *mut sem_t, clock: clockid_t, at: *const timespec) -> c_int;
    fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
    fn pthread_setcanceltype(kind: c_int, before: *mut c_int) -> c_int;
    fn _pthread_cleanup_push(cleanup: *mut Cleanup, handler: Handler, argument: *mut c_void);
    fn _pthread_cleanup_pop(cleanup: *mut Cleanup, execute: c_int);
}

/// `PTHREAD_CANCEL_DISABLE`.
const CANCEL_DISABLE: c_int = 1;
/// `PTHREAD_CANCEL_DEFERRED`.
const CANCEL_DEFERRED: c_int = 0;

/// Runs `body` so that the thread can be cancelled only where it sleeps, even if its cancellation is
/// asynchronous: its node must not stay in a list.
pub(super) fn cancelled_only_asleep(body: impl FnOnce() -> c_int) -> c_int {
    let mut before = CANCEL_DEFERRED;
    // SAFETY: an integer that the call may write to.
    unsafe { pthread_setcanceltype(CANCEL_DEFERRED, &raw mut before) };
    let result = body();
    if before != CANCEL_DEFERRED {
        // SAFETY: restores the type that was set before. The thread may end in this call, and nothing here
        // has a destructor.
        unsafe { pthread_setcanceltype(before, null_mut()) };
    }
    result
}

/// How a waiter was picked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub(super) enum Picked {
    /// Picked by a signal as the only waiter, or picked by a broadcast: no other waiter needs the signal.
    Alone = 1,
    /// By a signal when other waiters were in the list.
    FromSeveral = 2,
}

/// Values of a waiter's word; the other values are a [`Picked`].
const WAITING: u32 = 0;
const LEFT: u32 = 3;

/// See the file's head. The links belong to the list.
pub(super) struct Waiter {
    sem: UnsafeCell<sem_t>,
    pub(super) older: AtomicPtr<Waiter>,
    pub(super) newer: AtomicPtr<Waiter>,
    /// How its wait ended.
    end: AtomicU32,
}

impl Waiter {
    pub(super) fn new() -> Self {
        let mut sem = MaybeUninit::<sem_t>::zeroed();
        // SAFETY: memory for a semaphore. Nothing stores its address, so it may be moved before it is used.
        unsafe { libc::sem_init(sem.as_mut_ptr(), 0, 0) };
        Self {
            // SAFETY: `sem_init` initialised it; the call cannot fail with these arguments.
            sem: UnsafeCell::new(unsafe { sem.assume_init() }),
            older: AtomicPtr::new(null_mut()),
            newer: AtomicPtr::new(null_mut()),
            end: AtomicU32::new(WAITING),
        }
    }

    /// Called with the list's lock held. Returns false if the waiter has left; it then removes itself from the list.
    pub(super) fn pick(&self, how: Picked) -> bool {
        self.decide(how as u32).is_ok()
    }

    /// Called by the waiter's own thread. Returns an error if the waiter was picked before; its post then follows.
    pub(super) fn leave(&self) -> Result<(), Picked> {
        self.decide(LEFT).map_err(Self::picked)
    }

    /// Called by the waiter's own thread after it was posted.
    pub(super) fn how_picked(&self) -> Picked {
        Self::picked(self.end.load(Relaxed))
    }

    pub(super) fn is_waiting(&self) -> bool {
        self.end.load(Relaxed) == WAITING
    }

    /// Relaxed: the list's lock orders what is in the list; the semaphore orders what follows a pick.
    fn decide(&self, end: u32) -> Result<(), u32> {
        self.end.compare_exchange(WAITING, end, Relaxed, Relaxed).map(drop)
    }

    fn picked(end: u32) -> Picked {
        if end == Picked::FromSeveral as u32 { Picked::FromSeveral } else { Picked::Alone }
    }

    /// Wakes the waiter: once, after it was picked. The waiter may no longer exist when this returns.
    pub(super) fn post(&self) {
        // SAFETY: a picked waiter waits for this, so the semaphore is alive. `sem_post` allows the semaphore
        // to be destroyed as soon as the post is taken.
        unsafe { libc::sem_post(self.sem.get()) };
    }

    /// Sleeps until posted, or until `until`; returns true if posted. A cancellation point.
    pub(super) fn sleep(&self, until: Option<Time>) -> bool {
        keeping_errno(|| {
            while self.sleep_once(until) != 0 {
                if errno() != EINTR {
                    return false; // timed out; any other error is a spurious wake, which callers expect
                }
            }
            true
        })
    }

    fn sleep_once(&self, until: Option<Time>) -> c_int {
        match until {
            // SAFETY: an initialised semaphore that lives on this thread's stack.
            None => unsafe { sem_wait(self.sem.get()) },
            // SAFETY: as above; the time is on the stack as well.
            Some(time) => unsafe { sem_clockwait(self.sem.get(), time.clock_id(), &raw const time.at) },
        }
    }

    /// Takes the post that the picking thread is about to make. Not a cancellation point.
    pub(super) fn take_post(&self) {
        let mut before = 0;
        // SAFETY: an integer that the call may write to.
        unsafe { pthread_setcancelstate(CANCEL_DISABLE, &raw mut before) };
        while !self.sleep(None) {}
        // SAFETY: restores the state that was set before.
        unsafe { pthread_setcancelstate(before, null_mut()) };
    }
}

/// The function that is called when the thread is cancelled.
pub(super) type Handler = unsafe extern "C-unwind" fn(*mut c_void);

/// glibc's `struct _pthread_cleanup_buffer`. It is in the thread's list while pushed.
#[repr(C)]
pub(super) struct Cleanup {
    handler: Option<Handler>,
    argument: *mut c_void,
    cancel_type: c_int,
    previous: *mut Cleanup,
}

impl Cleanup {
    pub(super) fn new() -> Self {
        Self { handler: None, argument: null_mut(), cancel_type: 0, previous: null_mut() }
    }

    /// The handler stays pushed until [`pop`](Self::pop), which must follow in the same frame.
    pub(super) fn push(&mut self, handler: Handler, argument: *mut c_void) {
        // SAFETY: this stays in place until the caller pops it, or until the thread is cancelled.
        unsafe { _pthread_cleanup_push(self, handler, argument) };
    }

    pub(super) fn pop(&mut self) {
        // SAFETY: it is the last one that was pushed.
        unsafe { _pthread_cleanup_pop(self, 0) };
    }
}
