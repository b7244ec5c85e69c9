//! The list of waiters, oldest first, under its own lock.
//!
//! A forked child inherits its parent's lists, whose threads do not exist in the child, and maybe their locks in
//! the locked state. So each list carries the epoch in which it was begun, and a child begins it anew. Epoch zero
//! never exists.
//!
//! A waiter that times out or is cancelled marks its own word as left, without the lock (`Waiter::leave`). If it
//! succeeds, it removes itself from the list. Until then it is in the list and signals skip it:
//! [`Waiters::settle`] waits for it.
//!
//! See also: sleeping (`waiter.rs`).

use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{
    AtomicPtr, AtomicU32,
    Ordering::{Acquire, Relaxed, Release},
};

use qspinlock::{Hybrid, Linux, Platform, PvQSpinLock};

use super::owing::Patience;
use super::waiter::{Picked, Waiter};
use crate::thread::keeping_errno;

/// See the file's head. Only the thread that holds the lock uses the fields, except for the epoch and checks
/// whether the list is empty.
#[repr(C)]
pub(super) struct Waiters {
    lock: PvQSpinLock<Hybrid>,
    epoch: AtomicU32,
    oldest: AtomicPtr<Waiter>,
    newest: AtomicPtr<Waiter>,
}

/// Set with an epoch: a thread is beginning that epoch's list.
const BEGINNING: u32 = 1 << 31;

impl Waiters {
    /// `waiter` must stay in place until it has been removed, or has been picked and has taken its post.
    pub(super) fn push(&self, waiter: &Waiter) {
        let this = std::ptr::from_ref(waiter).cast_mut();
        self.alone(|| {
            let newest = self.newest.load(Relaxed);
            waiter.older.store(newest, Relaxed);
            self.link_newer(newest, this);
            self.newest.store(this, Relaxed);
        });
    }

    /// Removes and returns the oldest waiter that has not left. If there are others, calls `on_several` with
    /// the lock held.
    pub(super) fn pick_oldest(&self, on_several: impl FnOnce(u32)) -> Option<&Waiter> {
        if self.is_empty() {
            return None;
        }
        self.alone(|| {
            let mut next = self.oldest.load(Relaxed);
            // SAFETY: it is in the list, so it is alive.
            while let Some(waiter) = unsafe { next.as_ref() } {
                next = waiter.newer.load(Relaxed);
                let is_only = next.is_null() && waiter.older.load(Relaxed).is_null();
                let how = if is_only { Picked::Alone } else { Picked::FromSeveral };
                if !waiter.pick(how) {
                    continue;
                }
                self.unlink(waiter);
                if how == Picked::FromSeveral {
                    on_several(self.epoch.load(Relaxed));
                }
                return Some(waiter);
            }
            None
        })
    }

    /// Removes and returns all waiters that have not left. Each stays alive only until it is posted.
    pub(super) fn pick_all<'a>(&'a self) -> impl Iterator<Item = &'a Waiter> + use<'a> {
        let first = if self.is_empty() { null_mut() } else { self.alone(|| self.take_all()) };
        let mut next = NonNull::new(first);
        std::iter::from_fn(move || {
            // SAFETY: picked and not yet posted, so it is alive; no other thread follows its links.
            let picked = unsafe { next?.as_ref() };
            next = NonNull::new(picked.newer.load(Relaxed)); // read before the post: it may end the lifetime of the waiter
            Some(picked)
        })
    }

    /// Returns the oldest picked waiter; the other picked ones are linked behind it.
    fn take_all(&self) -> *mut Waiter {
        let (mut first, mut last) = (null_mut(), None::<&Waiter>);
        let mut next = self.oldest.load(Relaxed);
        // SAFETY: it is in the list, so it is alive.
        while let Some(waiter) = unsafe { next.as_ref() } {
            let this = next;
            next = waiter.newer.load(Relaxed);
            if !waiter.pick(Picked::Alone) {
                continue;
            }
            self.unlink(waiter);
            waiter.newer.store(null_mut(), Relaxed);
            match last {
                Some(last) => last.newer.store(this, Relaxed),
                None => first = this,
            }
            last = Some(waiter);
        }
        first
    }

    /// Removes `waiter`, which has left: no other thread removes it.
    pub(super) fn remove(&self, waiter: &Waiter) {
        self.alone(|| self.unlink(waiter));
    }

    /// Waits until no call in progress uses the list any more. Returns false at once if threads still wait.
    pub(super) fn settle(&self) -> bool {
        if self.epoch.load(Relaxed) == 0 {
            return true;
        }
        let mut patience = Patience::new();
        loop {
            match self.alone(|| (self.is_empty(), self.are_waiting())) {
                (true, _) => return true,
                (_, true) => return false,
                // The remaining ones have left, and are about to take the lock.
                _ => patience.wait(),
            }
        }
    }

    fn are_waiting(&self) -> bool {
        let mut next = self.oldest.load(Relaxed);
        // SAFETY: it is in the list, so it is alive.
        while let Some(waiter) = unsafe { next.as_ref() } {
            if waiter.is_waiting() {
                return true;
            }
            next = waiter.newer.load(Relaxed);
        }
        false
    }

    /// The epoch of lists that hold this process's threads.
    pub(super) fn epoch() -> u32 {
        Linux::epoch()
    }

    /// A read without the lock is enough: a thread that comes after a waiter sees the waiter's insertion.
    #[inline]
    fn is_empty(&self) -> bool {
        self.oldest.load(Relaxed).is_null()
    }

    fn unlink(&self, waiter: &Waiter) {
        let older = waiter.older.load(Relaxed);
        let newer = waiter.newer.load(Relaxed);
        self.link_newer(older, newer);
        // SAFETY: a neighbour in the list, so it is alive.
        match unsafe { newer.as_ref() } {
            Some(neighbour) => neighbour.older.store(older, Relaxed),
            None => self.newest.store(older, Relaxed),
        }
    }

    /// `newer` comes after `older`, or is the first if `older` is NULL.
    fn link_newer(&self, older: *mut Waiter, newer: *mut Waiter) {
        // SAFETY: it is in the list, so it is alive.
        match unsafe { older.as_ref() } {
            Some(neighbour) => neighbour.newer.store(newer, Relaxed),
            None => self.oldest.store(newer, Relaxed),
        }
    }

    /// Runs `body` with the list's lock held. Nothing in `body` unwinds, waits or can be cancelled.
    #[inline]
    fn alone<R>(&self, body: impl FnOnce() -> R) -> R {
        let epoch = Linux::epoch();
        if self.epoch.load(Acquire) != epoch {
            self.begin(epoch);
        }
        if !self.lock.try_acquire() {
            keeping_errno(|| self.lock.acquire());
        }
        let result = body();
        // SAFETY: acquired above.
        unsafe { self.lock.release() };
        result
    }

    /// Resets the list and its lock for a new epoch, on first use. One thread does this; the others wait until it is done.
    #[cold]
    fn begin(&self, epoch: u32) {
        let before = self.epoch.load(Acquire);
        let beginning = epoch | BEGINNING;
        let first = before != epoch && before != beginning;
        if first && self.epoch.compare_exchange(before, beginning, Acquire, Relaxed).is_ok() {
            let lock = (&raw const self.lock).cast_mut();
            // SAFETY: four bytes of an atomic; no thread uses a list's lock before the list's epoch has
            // begun, and threads of the epoch before do not exist in this process.
            unsafe { lock.write(PvQSpinLock::new()) };
            self.oldest.store(null_mut(), Relaxed);
            self.newest.store(null_mut(), Relaxed);
            // Release pairs with the acquires in `alone` and below.
            self.epoch.store(epoch, Release);
        }
        while self.epoch.load(Acquire) != epoch {
            std::thread::yield_now();
        }
    }
}
