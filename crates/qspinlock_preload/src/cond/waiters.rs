//! The list of those who wait, oldest first, under a lock of its own.
//!
//! A forked child has its parent's lists, whose threads do not exist in it, and maybe their lock, held by nobody. So
//! lists carry the epoch in which they were begun, and are begun anew in a child; zeros are an epoch that never was.
//!
//! A waiter that gives up decides that on its own word, without the lock (`Waiter::leave`), and takes itself out of the list
//! only if it won. Until then it is in the list and passed over by those who pick: [`Waiters::settle`] waits for it.
//!
//! Not here: sleeping (`waiter.rs`).

use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{
    AtomicPtr, AtomicU32,
    Ordering::{Acquire, Relaxed, Release},
};

use qspinlock::{Hybrid, Linux, Platform, PvQSpinLock};

use super::owing::Patience;
use super::waiter::{Picked, Waiter};
use crate::thread::keeping_errno;

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

    /// The oldest that has not given up, out of the list. `on_several`: what to do, with the lock, if there are others.
    pub(super) fn pick_oldest(&self, on_several: impl FnOnce(u32)) -> Option<&Waiter> {
        if self.is_empty() {
            return None;
        }
        self.alone(|| {
            let mut next = self.oldest.load(Relaxed);
            // SAFETY: in the list, so it is alive.
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

    /// All that have not given up, out of the list. Each of them stays alive only until it is posted.
    pub(super) fn pick_all<'a>(&'a self) -> impl Iterator<Item = &'a Waiter> + use<'a> {
        let first = if self.is_empty() { null_mut() } else { self.alone(|| self.take_all()) };
        let mut next = NonNull::new(first);
        std::iter::from_fn(move || {
            // SAFETY: picked, and not yet posted, so it is alive; no other thread follows its links.
            let picked = unsafe { next?.as_ref() };
            next = NonNull::new(picked.newer.load(Relaxed)); // now, because a post may be its end
            Some(picked)
        })
    }

    /// The oldest that was picked; the others behind it are linked to it.
    fn take_all(&self) -> *mut Waiter {
        let (mut first, mut last) = (null_mut(), None::<&Waiter>);
        let mut next = self.oldest.load(Relaxed);
        // SAFETY: in the list, so it is alive.
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

    /// Out of the list, which `waiter` has left: no other thread takes it out.
    pub(super) fn remove(&self, waiter: &Waiter) {
        self.alone(|| self.unlink(waiter));
    }

    /// Waits until all calls that have begun are through with the list. False: threads wait, and nothing is waited for.
    pub(super) fn settle(&self) -> bool {
        if self.epoch.load(Relaxed) == 0 {
            return true;
        }
        let mut patience = Patience::new();
        loop {
            match self.alone(|| (self.is_empty(), self.are_waiting())) {
                (true, _) => return true,
                (_, true) => return false,
                // Those that are left have given up, and are about to ask for the lock.
                _ => patience.wait(),
            }
        }
    }

    fn are_waiting(&self) -> bool {
        let mut next = self.oldest.load(Relaxed);
        // SAFETY: in the list, so it is alive.
        while let Some(waiter) = unsafe { next.as_ref() } {
            if waiter.is_waiting() {
                return true;
            }
            next = waiter.newer.load(Relaxed);
        }
        false
    }

    /// Of the lists of this process's threads.
    pub(super) fn epoch() -> u32 {
        Linux::epoch()
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
