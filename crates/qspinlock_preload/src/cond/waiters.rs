//! The list of those who wait, oldest first, under a lock of its own.
//!
//! A forked child has its parent's lists, whose threads do not exist in it, and maybe their lock, held by nobody. So
//! lists carry the epoch in which they were begun, and are begun anew in a child; zeros are an epoch that never was.
//!
//! Not here: sleeping (`waiter.rs`).

use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{
    AtomicPtr, AtomicU32,
    Ordering::{Acquire, Relaxed, Release},
};

use qspinlock::{Hybrid, Linux, Platform, PvQSpinLock};

use super::waiter::Waiter;
use crate::thread::keeping_errno;

/// In what state a waiter was found that wanted to leave.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub(super) enum Found {
    /// In the list, and now out of it.
    Waiting = 0,
    /// Picked, and there was nobody else to pick.
    Picked = 1,
    /// Picked when others waited as well.
    PickedFromSeveral = 2,
}

impl Found {
    fn of(waiter: &Waiter) -> Self {
        match waiter.found.load(Relaxed) {
            0 => Self::Waiting,
            1 => Self::Picked,
            _ => Self::PickedFromSeveral,
        }
    }
}

/// See the file's head. Everything but the epoch belongs to who has the lock, but for looks at whether it is empty.
#[repr(C)]
pub(super) struct Waiters {
    lock: PvQSpinLock<Hybrid>,
    epoch: AtomicU32,
    oldest: AtomicPtr<Waiter>,
    newest: AtomicPtr<Waiter>,
}

/// With an epoch: its list is being begun.
const BEGINNING: u32 = 1 << 31;

impl Waiters {
    /// `waiter` stays where it is until it was removed, or was picked and took its post.
    pub(super) fn push(&self, waiter: &Waiter) {
        let this = std::ptr::from_ref(waiter).cast_mut();
        self.alone(|| {
            let newest = self.newest.load(Relaxed);
            waiter.older.store(newest, Relaxed);
            self.link_newer(newest, this);
            self.newest.store(this, Relaxed);
        });
    }

    /// The oldest, out of the list.
    pub(super) fn pick_oldest(&self) -> Option<&Waiter> {
        if self.is_empty() {
            return None;
        }
        self.alone(|| {
            // SAFETY: in the list, so it is alive.
            let picked = unsafe { self.oldest.load(Relaxed).as_ref() }?;
            self.unlink(picked);
            let found = if self.is_empty() { Found::Picked } else { Found::PickedFromSeveral };
            picked.found.store(found as u32, Relaxed);
            Some(picked)
        })
    }

    /// All, out of the list. Each of them stays alive only until it is posted.
    pub(super) fn pick_all<'a>(&'a self) -> impl Iterator<Item = &'a Waiter> + use<'a> {
        let first = if self.is_empty() { null_mut() } else { self.alone(|| self.empty()) };
        let mut next = NonNull::new(first);
        std::iter::from_fn(move || {
            // SAFETY: picked, and not yet posted, so it is alive; its links are nobody else's any more.
            let picked = unsafe { next?.as_ref() };
            next = NonNull::new(picked.newer.load(Relaxed)); // now, because a post may be its end
            Some(picked)
        })
    }

    /// The oldest; the others behind it stay linked.
    fn empty(&self) -> *mut Waiter {
        let first = self.oldest.load(Relaxed);
        let mut next = first;
        // SAFETY: in the list, so it is alive.
        while let Some(picked) = unsafe { next.as_ref() } {
            picked.found.store(Found::Picked as u32, Relaxed);
            next = picked.newer.load(Relaxed);
        }
        self.oldest.store(null_mut(), Relaxed);
        self.newest.store(null_mut(), Relaxed);
        first
    }

    /// Out of the list, if it is still there.
    pub(super) fn remove(&self, waiter: &Waiter) -> Found {
        self.alone(|| {
            let found = Found::of(waiter);
            if found == Found::Waiting {
                self.unlink(waiter);
            }
            found
        })
    }

    /// Whether anybody waits, when all calls that have begun are through with the list.
    pub(super) fn are_there(&self) -> bool {
        self.epoch.load(Relaxed) != 0 && self.alone(|| !self.is_empty())
    }

    /// A look without the lock is enough for who comes after a waiter: the insertion is then in its past.
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

    /// `newer` comes after `older`, or is the first if that is NULL.
    fn link_newer(&self, older: *mut Waiter, newer: *mut Waiter) {
        // SAFETY: in the list, so it is alive.
        match unsafe { older.as_ref() } {
            Some(neighbour) => neighbour.newer.store(newer, Relaxed),
            None => self.oldest.store(newer, Relaxed),
        }
    }

    /// `body`, with the list's lock. Nothing in it unwinds, waits or can be cancelled.
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

    /// One thread makes the list empty, and its lock free; the others wait for it.
    #[cold]
    fn begin(&self, epoch: u32) {
        let before = self.epoch.load(Acquire);
        let beginning = epoch | BEGINNING;
        let first = before != epoch && before != beginning;
        if first && self.epoch.compare_exchange(before, beginning, Acquire, Relaxed).is_ok() {
            let lock = (&raw const self.lock).cast_mut();
            // SAFETY: four bytes of an atomic; nobody uses the lock of a list before its epoch has begun, and threads of
            // the epoch before do not exist in this process.
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
