//! Locks that detect misuse, for debugging: relocking by the same thread, deadlocks, double unlocks.
//!
//! ```text
//! lock: try → held by this thread? panic → publish the request → try for 1 ms → a cycle of waiters? panic
//!                                                                   ▲───────────────────┘ no
//! acquired: a record in this thread's table       unlock: the record is removed first
//! ```
//!
//! - [`Checked`] wraps any lock that supports timed attempts. A report is a panic with one line, which shows
//!   where each lock was taken and where it is requested. The thread panics before it acquires anything:
//!   unwinding releases what the thread holds, and the other threads continue.
//! - Relocking by the same thread (AA) is detected at once. A cycle of up to [`MAX_CYCLE`] threads (ABBA) is
//!   detected after about a millisecond, and only by the cycle's first thread in the table.
//! - There are no false reports: a record exists only while its lock is held, and a cycle counts only if none
//!   of its records changed between the first and the last read (each change gives a record a new value).
//!   Timed waits end by themselves, so they are not part of a cycle, and a timed attempt on a lock that the
//!   thread already holds is not misuse.
//! - Guards stay with the thread that took them (they are not `Send`), even if the inner lock's guards are
//!   `Send`: a thread that sent its guard away could correctly lock again, and that would look like AA. A
//!   guard moved to another thread by `unsafe` code is released there without complaint; until then it counts
//!   as the first thread's.
//! - Bounds: [`MAX_HELD`] locks held per thread, 4096 threads alive at a time. Acquisitions beyond these bounds are
//!   not checked; they are reported once on standard error, and counted: [`not_checked`].
//! - With statistics, use `Profiled<Checked<L>>`; with `Checked<Profiled<L>>`, waits would be attributed to a line
//!   of this file.
//! - A wait is a series of timed attempts, so a fair lock keeps its order for only a millisecond at a time.
//!
//! Reader/writer locks are not checked. A forked child inherits records of threads that do not exist in it, and this
//! module does not remove them.

mod cycle;
mod holders;

use core::fmt;
use core::marker::PhantomData;
use core::panic::Location;
use core::sync::atomic::{
    AtomicU32, AtomicU64,
    Ordering::{AcqRel, Acquire, Relaxed},
};
use core::time::Duration;

use lock_api::{GuardNoSend, RawMutex, RawMutexFair, RawMutexTimed};

pub use cycle::MAX_CYCLE;
pub use holders::MAX_HELD;
use holders::{LockId, Me, Taken, me};

/// Time between two searches for a cycle.
const LOOK_EVERY: Duration = Duration::from_millis(1);

static NEXT_ID: AtomicU32 = AtomicU32::new(1);
static NOT_CHECKED: AtomicU64 = AtomicU64::new(0);

/// Wraps the lock `L` and checks for misuse. See the [module](self).
pub struct Checked<L> {
    raw: L,
    /// 0 before the first acquisition. An address would not identify the lock: a locked lock may be moved, or dropped
    /// and its memory reused.
    id: AtomicU32,
}

impl<L> fmt::Debug for Checked<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checked").field("id", &self.id).finish_non_exhaustive()
    }
}

/// An acquisition. It stays with the thread that made it.
///
/// ```compile_fail
/// use qspinlock::{PvQSpinLock, checked::Checked};
/// let lock = lock_api::Mutex::<Checked<PvQSpinLock>, u32>::new(0);
/// let guard = lock.lock();
/// std::thread::scope(|scope| _ = scope.spawn(move || drop(guard)));
/// ```
#[derive(Debug)]
pub struct Holding<G> {
    inner: G,
    /// `None`: not checked.
    taken: Option<Taken>,
    _stays: PhantomData<GuardNoSend>,
}

/// How many acquisitions were not checked, because the thread held [`MAX_HELD`] locks already or too many
/// threads were alive.
#[must_use]
pub fn not_checked() -> u64 {
    NOT_CHECKED.load(Relaxed)
}

#[cold]
fn count_not_checked() {
    if NOT_CHECKED.fetch_add(1, Relaxed) == 0 {
        std::eprintln!(
            "qspinlock: some acquisitions are not checked for misuse, because a thread holds more than {MAX_HELD} locks, \
             or more than {} threads are alive",
            crate::thread_number::MAX_THREADS
        );
    }
}

impl<L> Checked<L> {
    /// `None` after four billion locks have been used.
    fn id(&self) -> Option<LockId> {
        // Relaxed: only the number is read.
        LockId::new(self.id.load(Relaxed)).or_else(|| self.assign_id())
    }

    #[cold]
    fn assign_id(&self) -> Option<LockId> {
        let fresh = NEXT_ID.try_update(Relaxed, Relaxed, |next| next.checked_add(1)).ok()?;
        match self.id.compare_exchange(0, fresh, AcqRel, Acquire) {
            Ok(_) => LockId::new(fresh),
            Err(other) => LockId::new(other), // another thread was first
        }
    }

    fn addr(&self) -> usize {
        core::ptr::from_ref(self).addr()
    }

    /// Records an acquisition that the caller has just made.
    fn hold<G>(&self, inner: G, site: &'static Location<'static>) -> Holding<G> {
        let taken = me().zip(self.id()).and_then(|(me, id)| me.take(id, self.addr(), site));
        if taken.is_none() {
            count_not_checked();
        }
        Holding { inner, taken, _stays: PhantomData }
    }

    /// Removes the record of a lock that the caller is about to release.
    #[track_caller]
    fn drop_record(&self, taken: Option<Taken>) {
        let Some(taken) = taken else { return };
        let is_ours = self.id().is_some_and(|id| taken.is_of(id));
        let was_held = is_ours && (taken.take_out() || !taken.is_by_this_thread());
        if !was_held {
            let (addr, site) = (self.addr(), taken.site());
            panic!("lock {addr:#x} is released for the acquisition made at {site}, which does not hold it");
        }
    }
}

impl<L: RawMutexTimed<Duration = Duration>> Checked<L> {
    #[cold]
    fn wait(&self, site: &'static Location<'static>) -> L::Guard {
        match me().zip(self.id()) {
            Some((me, id)) => self.wait_checked(me, id, site),
            None => self.raw.lock(),
        }
    }

    fn wait_checked(&self, me: Me, id: LockId, site: &'static Location<'static>) -> L::Guard {
        let addr = self.addr();
        if let Some(held) = me.table.find(id) {
            let taken = held.site();
            panic!("deadlock: a thread requests lock {addr:#x} at {site}, but took it already at {taken}");
        }
        let _wanted = me.want(id, addr, site);
        loop {
            if let Some(inner) = self.raw.try_lock_for(LOOK_EVERY) {
                return inner;
            }
            if let Some(cycle) = cycle::find(me.table) {
                panic!("{cycle}");
            }
        }
    }
}

// SAFETY: 1. exclusion and ordering are those of `L`: every acquisition and every release here is exactly one
// of the inner lock's; 2. `Holding` owns the inner state and passes it to that lock's `unlock`, once; a
// forgotten `Holding` leaves a record of a lock that stays locked; the record identifies the lock by a number,
// so moving or dropping the lock does no harm; 3. `lock` unwinds only before the inner lock is acquired;
// 4. `unlock` unwinds only for a state that is no longer an acquisition.
unsafe impl<L: RawMutexTimed<Duration = Duration>> RawMutex for Checked<L> {
    #[allow(clippy::declare_interior_mutable_const)] // as in the trait
    const INIT: Self = Self { raw: L::INIT, id: AtomicU32::new(0) };

    type Guard = Holding<L::Guard>;

    #[track_caller]
    fn lock(&self) -> Self::Guard {
        let site = Location::caller();
        let inner = self.raw.try_lock().unwrap_or_else(|| self.wait(site));
        self.hold(inner, site)
    }

    #[track_caller]
    fn try_lock(&self) -> Option<Self::Guard> {
        let site = Location::caller();
        self.raw.try_lock().map(|inner| self.hold(inner, site))
    }

    #[track_caller]
    unsafe fn unlock(&self, guard: Self::Guard) {
        self.drop_record(guard.taken);
        // SAFETY: the caller passes the state of an acquisition of this lock; `inner` is the inner lock's
        // state for it.
        unsafe { self.raw.unlock(guard.inner) }
    }

    fn is_locked(&self) -> bool {
        self.raw.is_locked()
    }
}

// SAFETY: as above; `bump` restores the inner state on every exit path, because `L`'s does.
unsafe impl<L: RawMutexFair + RawMutexTimed<Duration = Duration>> RawMutexFair for Checked<L> {
    #[track_caller]
    unsafe fn unlock_fair(&self, guard: Self::Guard) {
        self.drop_record(guard.taken);
        // SAFETY: the caller passes the state of an acquisition of this lock; `inner` is the inner lock's
        // state for it.
        unsafe { self.raw.unlock_fair(guard.inner) }
    }

    /// `Checked` does not check this call while other threads hold the lock in between.
    #[track_caller]
    unsafe fn bump(&self, guard: &mut Self::Guard) {
        self.drop_record(guard.taken.take());
        // SAFETY: the caller passes the state of an acquisition of this lock; `inner` is the inner lock's
        // state for it.
        unsafe { self.raw.bump(&mut guard.inner) };
        guard.taken = self.hold((), Location::caller()).taken;
    }
}

// SAFETY: as for `RawMutex`; this acquires nothing that the inner lock did not acquire.
unsafe impl<L: RawMutexTimed<Duration = Duration>> RawMutexTimed for Checked<L> {
    type Duration = Duration;
    type Instant = L::Instant;

    #[track_caller]
    fn try_lock_for(&self, timeout: Duration) -> Option<Self::Guard> {
        let site = Location::caller();
        self.raw.try_lock_for(timeout).map(|inner| self.hold(inner, site))
    }

    #[track_caller]
    fn try_lock_until(&self, timeout: L::Instant) -> Option<Self::Guard> {
        let site = Location::caller();
        self.raw.try_lock_until(timeout).map(|inner| self.hold(inner, site))
    }
}
