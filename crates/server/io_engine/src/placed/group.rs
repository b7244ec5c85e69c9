//! State that all participants of a placement share: the registry, and the counter that announces its changes.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::counters::Counters;
use super::epoll_wait::WorkerWaker;
use super::limits::EngineMaker;

/// The list of participating workers.
pub(super) trait Registry {
    fn participants(&self) -> usize;

    fn wakers(&self) -> impl Iterator<Item = &Arc<WorkerWaker>>;
}

/// The shared state. `X` holds what only one kind of placement needs.
pub(super) struct Group<R, X> {
    pub make: EngineMaker,
    pub depth: u32,
    /// Maximum number of ops in flight per participant.
    share: AtomicUsize,
    pub counters: Counters,
    registry: Mutex<R>,
    changes: AtomicU64,
    pub own: X,
}

impl<R: Registry, X> Group<R, X> {
    pub fn new(make: EngineMaker, depth: u32, registry: R, own: X) -> Self {
        Self {
            make,
            depth,
            share: AtomicUsize::new(depth as usize),
            counters: Counters::default(),
            registry: Mutex::new(registry),
            changes: AtomicU64::new(1),
            own,
        }
    }

    pub fn registry(&self) -> MutexGuard<'_, R> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    pub fn share(&self) -> usize {
        // Relaxed: see `changed`.
        self.share.load(Ordering::Relaxed)
    }

    /// Counts changes of the registry. A participant reads the registry only after a change.
    #[inline]
    pub fn changes(&self) -> u64 {
        // Acquire: pairs with `changed`.
        self.changes.load(Ordering::Acquire)
    }

    /// Makes all participants read the registry. The caller holds the registry's lock.
    pub fn changed(&self, registry: &R) {
        // Relaxed: a participant above its new share takes no more ops.
        self.share.store(self.depth as usize / registry.participants().max(1), Ordering::Relaxed);
        // Release: pairs with `changes`.
        self.changes.fetch_add(1, Ordering::Release);
        registry.wakers().for_each(|waker| {
            waker.wake();
        });
    }
}

impl<R, X> std::fmt::Debug for Group<R, X> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Group").field("depth", &self.depth).finish_non_exhaustive()
    }
}
