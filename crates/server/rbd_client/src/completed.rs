//! The list of completed requests: librbd's threads push, one lane takes.
//!
//! `push: the entry joins the list; the first in an empty list also signals the lane … take: everything at once`
//!
//! - The list is a stack of which the lane takes everything at once, so no entry is taken twice.
//! - After `close`, `push` gives the entry back: no lane is left to take it.
//! - A loom model checks this: `RUSTFLAGS="--cfg loom" cargo test -p rbd_client --lib model --target-dir target/loom`.

use std::ptr::{null_mut, without_provenance_mut};

#[cfg(all(test, loom))]
use loom::sync::atomic::{AtomicPtr, Ordering};
#[cfg(not(all(test, loom)))]
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::in_flight_bytes::Signal;

/// A request, in flight or completed.
#[derive(Debug)]
pub(crate) struct Entry<T> {
    /// The entry below this one in the list.
    next: *mut Entry<T>,
    pub value: T,
}

/// The list. `S` ends the lane's sleep, including one that begins after the signal.
#[derive(Debug)]
pub(crate) struct CompletedList<T, S> {
    top: AtomicPtr<Entry<T>>,
    pub signal: S,
}

// SAFETY: 1. the thread that takes an entry from the list is its only user, so entries only move between threads.
unsafe impl<T: Send, S: Send> Send for CompletedList<T, S> {}
// SAFETY: as above.
unsafe impl<T: Send, S: Sync> Sync for CompletedList<T, S> {}

impl<T> Entry<T> {
    pub fn new(value: T) -> Box<Self> {
        Box::new(Self { next: null_mut(), value })
    }
}

/// The top of a closed list. No entry has an odd address.
fn closed<T>() -> *mut Entry<T> {
    without_provenance_mut(1)
}

impl<T, S: Signal> CompletedList<T, S> {
    pub fn new(signal: S) -> Self {
        Self { top: AtomicPtr::new(null_mut()), signal }
    }

    /// Adds an entry. If the list is closed, returns it.
    #[inline]
    pub fn push(&self, entry: Box<Entry<T>>) -> Option<Box<Entry<T>>> {
        let entry = Box::into_raw(entry);
        let mut top = self.top.load(Ordering::Relaxed);
        loop {
            if top == closed() {
                // SAFETY: 1. the pointer came from the box, and the list never had it.
                return Some(unsafe { Box::from_raw(entry) });
            }
            // SAFETY: 1. the entry is still this thread's.
            unsafe { (*entry).next = top };
            // Release: the lane that takes the entry sees its contents. From here on, the entry is the lane's.
            match self.top.compare_exchange_weak(top, entry, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => break,
                Err(now) => top = now,
            }
        }
        if top.is_null() {
            self.signal.signal();
        }
        None
    }

    /// Passes each entry to `each`. Called by the lane, which has not closed the list.
    #[inline]
    pub fn take(&self, each: impl FnMut(Box<Entry<T>>)) {
        // Relaxed: a look; the swap below orders the entries' contents. An entry that this misses comes with a signal.
        if !self.top.load(Ordering::Relaxed).is_null() {
            self.replace_top(null_mut(), each);
        }
    }

    /// Refuses entries from now on, and passes those that are there to `each`.
    pub fn close(&self, each: impl FnMut(Box<Entry<T>>)) {
        self.replace_top(closed(), each);
    }

    #[inline]
    fn replace_top(&self, new: *mut Entry<T>, mut each: impl FnMut(Box<Entry<T>>)) {
        // Acquire: pairs with the release of each `push`.
        let mut top = self.top.swap(new, Ordering::Acquire);
        while !top.is_null() {
            // SAFETY: 1. the pointer came from a box; 2. the swap gave the entry to this thread alone.
            let entry = unsafe { Box::from_raw(top) };
            top = entry.next;
            each(entry);
        }
    }
}

#[cfg(all(test, loom))]
#[path = "completed_model.rs"]
mod model;
