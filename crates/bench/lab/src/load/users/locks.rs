//! The locks that a run of users shares: each family has a lock for short sections, and one for a table that is mostly
//! read.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};

use lock_api::{Mutex, MutexGuard, RawMutex, RawRwLock};

/// Locks of one kind.
pub(crate) trait Family: 'static {
    /// The lock for sections well under a microsecond.
    type Lock: RawMutex + Send + Sync;
    /// The lock for data that many threads read and few change.
    type Table<T: Send + Sync>: ReadMostly<T>;
}

/// A reader/writer lock, or a lock that treats readers and writers alike.
pub(crate) trait ReadMostly<T>: Send + Sync {
    type Read<'l>: Deref<Target = T>
    where
        Self: 'l;
    type Write<'l>: DerefMut<Target = T>
    where
        Self: 'l;

    fn around(value: T) -> Self;
    fn read(&self) -> Self::Read<'_>;
    fn try_read(&self) -> Option<Self::Read<'_>>;
    fn write(&self) -> Self::Write<'_>;
    fn try_write(&self) -> Option<Self::Write<'_>>;
}

/// Spins during a sample, and yields between two polls after it: a queue of hundreds of threads that only spin on a few
/// cores takes minutes to empty.
#[derive(Debug)]
pub(crate) struct SpinUntilOver;

/// All samples of this process share this flag, because only one sample is measured at a time.
static IS_OVER: AtomicBool = AtomicBool::new(false);

impl SpinUntilOver {
    /// Tells all waiting threads whether the sample is over. No other data depends on this flag.
    pub fn set_over(is_over: bool) {
        IS_OVER.store(is_over, Relaxed);
    }
}

impl spin::RelaxStrategy for SpinUntilOver {
    #[inline]
    fn relax() {
        if IS_OVER.load(Relaxed) {
            std::thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
    }
}

/// A lock with one holder at a time, whether reader or writer.
pub(crate) struct Exclusive<L, T>(Mutex<L, T>);

impl<L: RawMutex + Send + Sync, T: Send + Sync> ReadMostly<T> for Exclusive<L, T> {
    type Read<'l>
        = MutexGuard<'l, L, T>
    where
        Self: 'l;
    type Write<'l>
        = MutexGuard<'l, L, T>
    where
        Self: 'l;

    fn around(value: T) -> Self {
        Self(Mutex::new(value))
    }

    #[inline]
    #[track_caller]
    fn read(&self) -> Self::Read<'_> {
        self.0.lock()
    }

    #[inline]
    #[track_caller]
    fn try_read(&self) -> Option<Self::Read<'_>> {
        self.0.try_lock()
    }

    #[inline]
    #[track_caller]
    fn write(&self) -> Self::Write<'_> {
        self.0.lock()
    }

    #[inline]
    #[track_caller]
    fn try_write(&self) -> Option<Self::Write<'_>> {
        self.0.try_lock()
    }
}

impl<T: Send + Sync> ReadMostly<T> for RwLock<T> {
    type Read<'l>
        = RwLockReadGuard<'l, T>
    where
        Self: 'l;
    type Write<'l>
        = RwLockWriteGuard<'l, T>
    where
        Self: 'l;

    fn around(value: T) -> Self {
        Self::new(value)
    }

    fn read(&self) -> Self::Read<'_> {
        Self::read(self).unwrap_or_else(PoisonError::into_inner)
    }

    fn try_read(&self) -> Option<Self::Read<'_>> {
        gained(Self::try_read(self))
    }

    fn write(&self) -> Self::Write<'_> {
        Self::write(self).unwrap_or_else(PoisonError::into_inner)
    }

    fn try_write(&self) -> Option<Self::Write<'_>> {
        gained(Self::try_write(self))
    }
}

fn gained<G>(tried: Result<G, TryLockError<G>>) -> Option<G> {
    match tried {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

impl<R: RawRwLock + Send + Sync, T: Send + Sync> ReadMostly<T> for lock_api::RwLock<R, T> {
    type Read<'l>
        = lock_api::RwLockReadGuard<'l, R, T>
    where
        Self: 'l;
    type Write<'l>
        = lock_api::RwLockWriteGuard<'l, R, T>
    where
        Self: 'l;

    fn around(value: T) -> Self {
        Self::new(value)
    }

    #[inline]
    fn read(&self) -> Self::Read<'_> {
        Self::read(self)
    }

    #[inline]
    fn try_read(&self) -> Option<Self::Read<'_>> {
        Self::try_read(self)
    }

    #[inline]
    fn write(&self) -> Self::Write<'_> {
        Self::write(self)
    }

    #[inline]
    fn try_write(&self) -> Option<Self::Write<'_>> {
        Self::try_write(self)
    }
}
