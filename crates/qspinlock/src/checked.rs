//! Locks that notice misuse, for debugging: waiting for oneself, threads that wait for each other, letting go twice.
//!
//! ```text
//! lock: try → held by this thread? panic → say what is wanted → try for 1 ms → a cycle in who waits for what? panic
//!                                                 ▲────────────────────────────────────────┘ no
//! had: a record in this thread's table            let go: the record is taken out first
//! ```
//!
//! - [`Checked`] goes around any lock that can be tried for a while. A report is a panic with one line, which says
//!   where each lock was taken and where it is asked for. It comes before anything is acquired: what the thread holds is
//!   let go as it unwinds, and the others go on.
//! - Relocking by the same thread (AA) is noticed at once, a cycle of up to [`MAX_CYCLE`] threads (ABBA) after about a
//!   millisecond, by the one of them that comes first in the table and by no other.
//! - Nothing is reported that is not so: a record exists only while its lock is held, and a cycle counts only if none of
//!   its records changed from the first to the last look (each change gives a record another number). Waits with a time
//!   limit end by themselves: they are no part of a cycle, and asking for one's own lock with a limit is no misuse.
//! - Guards stay with the thread that took them (they are not `Send`), whatever those of the lock inside may do: whoever
//!   sends a guard could lock again in the meantime, rightly so, and that would look like AA. A guard carried elsewhere
//!   by `unsafe` means is let go there without complaint; until then it counts as its first thread's.
//! - Bounds: [`MAX_HELD`] locks held per thread, 4096 threads alive at a time. What is beyond is not checked, said
//!   once on standard error, and counted: [`not_checked`].
//! - With statistics, `Profiled<Checked<L>>`: the other way round, waits are attributed to a line of this file.
//! - Waiting is a row of attempts, so a fair lock's order is kept for a millisecond at a time only.
//!
//! Not here: locks for readers and writers; what a forked child inherits (records of threads that it does not have).

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

/// Between two searches for a cycle.
const LOOK_EVERY: Duration = Duration::from_millis(1);

static NEXT_ID: AtomicU32 = AtomicU32::new(1);
static NOT_CHECKED: AtomicU64 = AtomicU64::new(0);

/// `L`, checked for misuse. See the [module](self).
pub struct Checked<L> {
    raw: L,
    /// 0 before the first acquisition. Addresses would not do: locked locks may be moved, or dropped and their memory
    /// used again.
    id: AtomicU32,
}

impl<L> fmt::Debug for Checked<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checked").field("id", &self.id).finish_non_exhaustive()
    }
}

/// An acquisition; stays with the thread that made it.
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

/// How many acquisitions were not checked, because their thread held [`MAX_HELD`] locks already or was one too many.
#[must_use]
pub fn not_checked() -> u64 {
    NOT_CHECKED.load(Relaxed)
}

#[cold]
fn count_not_checked() {
    if NOT_CHECKED.fetch_add(1, Relaxed) == 0 {
        std::eprintln!(
            "qspinlock: acquisitions are not checked (more than {MAX_HELD} locks held by a thread, or more \
             than {} threads)",
            crate::thread_number::MAX_THREADS
        );
    }
}

impl<L> Checked<L> {
    /// None once four thousand million locks have been used.
    fn id(&self) -> Option<LockId> {
        // Relaxed: the number is all there is to see.
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

    /// The lock has just been had.
    fn hold<G>(&self, inner: G, site: &'static Location<'static>) -> Holding<G> {
        let taken = me().zip(self.id()).and_then(|(me, id)| me.take(id, self.addr(), site));
        if taken.is_none() {
            count_not_checked();
        }
        Holding { inner, taken, _stays: PhantomData }
    }

    /// Before the lock is let go: from here on it is nobody's.
    #[track_caller]
    fn drop_record(&self, taken: Option<Taken>) {
        let Some(taken) = taken else { return };
        let is_ours = self.id().is_some_and(|id| taken.is_of(id));
        let was_held = is_ours && (taken.take_out() || !taken.is_by_this_thread());
        if !was_held {
            let (addr, site) = (self.addr(), taken.site());
            panic!("lock {addr:#x} is let go, but is not held by the acquisition that was made at {site}");
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
            panic!("lock {addr:#x} is asked for at {site} by the thread that took it at {taken}");
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

// SAFETY: 1. exclusion and ordering are those of `L`: every acquisition and every release here is exactly one of the
// inner lock's; 2. `Holding` owns the inner state and gives it to that lock's `unlock`, once; forgetting it leaves a
// record of a lock that stays locked, by number, so a moved or dropped lock does no harm; 3. `lock` unwinds only
// before the inner lock is had; 4. `unlock` unwinds only for a state that is no acquisition any more.
unsafe impl<L: RawMutexTimed<Duration = Duration>> RawMutex for Checked<L> {
    #[allow(clippy::declare_interior_mutable_const)] // as the trait has it
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
        // SAFETY: the caller gives the state of an acquisition of this lock; `inner` is that of the inner one.
        unsafe { self.raw.unlock(guard.inner) }
    }

    fn is_locked(&self) -> bool {
        self.raw.is_locked()
    }
}

// SAFETY: as above; `bump` has the inner state restored on every way out, because `L`'s has.
unsafe impl<L: RawMutexFair + RawMutexTimed<Duration = Duration>> RawMutexFair for Checked<L> {
    #[track_caller]
    unsafe fn unlock_fair(&self, guard: Self::Guard) {
        self.drop_record(guard.taken);
        // SAFETY: the caller gives the state of an acquisition of this lock; `inner` is that of the inner one.
        unsafe { self.raw.unlock_fair(guard.inner) }
    }

    /// Not checked while others have the lock.
    #[track_caller]
    unsafe fn bump(&self, guard: &mut Self::Guard) {
        self.drop_record(guard.taken.take());
        // SAFETY: the caller gives the state of an acquisition of this lock; `inner` is that of the inner one.
        unsafe { self.raw.bump(&mut guard.inner) };
        guard.taken = self.hold((), Location::caller()).taken;
    }
}

// SAFETY: as for `RawMutex`; what the inner lock did not acquire is not acquired here.
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
