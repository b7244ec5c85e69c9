//! Which thread waits on which nodes.
//!
//! A thread gets a slot of [`NODES_PER_THREAD`] nodes when it waits for the first time, and keeps its number in a
//! thread-local cell. Slots carry their owner's thread id; one whose owner is gone is taken over by a newcomer, so
//! nothing has to run when a thread ends.
//!
//! Not here: the nodes' contents.

use core::cell::Cell;
use core::sync::atomic::{
    AtomicU32,
    Ordering::{AcqRel, Acquire, Relaxed},
};

use super::errno::KeptErrno;
use super::fork;
use crate::{NODES_PER_THREAD, Node};

/// Nodes of nobody, for threads beyond the last slot and the like.
pub(super) const COMMON_NODES: u32 = if cfg!(miri) { 16 } else { 1026 };
/// Threads that can have nodes of their own at the same time.
const SLOTS: u32 = if cfg!(miri) { 64 } else { 65_279 };
const NODES: u32 = COMMON_NODES + SLOTS * NODES_PER_THREAD;
/// Slots that are looked at for a dead owner before a fresh one is taken.
const PROBES: u32 = 4;

const _: () = assert!(
    if cfg!(miri) { NODES <= crate::MAX_NODES } else { NODES == crate::MAX_NODES },
    "whatever number a lock's word shows, even one that was never initialised, there is such a node",
);

static POOL: [Node; NODES as usize] = [const { Node::new() }; NODES as usize];
static OWNERS: [Owner; SLOTS as usize] = [const { Owner::nobody() }; SLOTS as usize];
/// Slots that have ever been used are the first so many.
static USED: AtomicU32 = AtomicU32::new(0);
/// Where the next search for a dead owner begins.
static CURSOR: AtomicU32 = AtomicU32::new(0);

std::thread_local! {
    /// This thread's slot, plus one; 0 before the first wait.
    static SLOT: Cell<u32> = const { Cell::new(0) };
}

/// Who has a slot.
struct Owner {
    /// The kernel's number of the thread; 0 for nobody yet.
    thread: AtomicU32,
    /// In which epoch it was taken. Slots of an older one stay as they are: their nodes may be in queues that the
    /// child inherited, and must not be taken for new waiters.
    epoch: AtomicU32,
}

impl Owner {
    const fn nobody() -> Self {
        Self { thread: AtomicU32::new(0), epoch: AtomicU32::new(0) }
    }
}

#[inline]
pub(super) fn nodes() -> &'static [Node] {
    &POOL
}

#[inline]
pub(super) fn own_nodes() -> Option<u32> {
    let slot = match SLOT.get() {
        0 => claim_slot()?,
        slot => slot - 1,
    };
    Some(COMMON_NODES + slot * NODES_PER_THREAD)
}

#[cold]
fn claim_slot() -> Option<u32> {
    let _errno = KeptErrno::new(); // asking for threads that are gone fails
    let thread = thread_id();
    let slot = take_over(thread).or_else(|| take_fresh(thread)).or_else(|| search_all(thread))?;
    // A signal handler may have claimed one meanwhile; then this one is lost until the thread ends.
    SLOT.set(slot + 1);
    Some(slot)
}

/// A slot whose owner has ended, if one of the next few is such a one.
fn take_over(thread: u32) -> Option<u32> {
    let used = USED.load(Acquire);
    (0..PROBES.min(used)).map(|_| CURSOR.fetch_add(1, Relaxed) % used).find(|&slot| inherit(slot, thread))
}

fn take_fresh(thread: u32) -> Option<u32> {
    let slot = USED.try_update(AcqRel, Relaxed, |used| (used < SLOTS).then_some(used + 1)).ok()?;
    let owner = OWNERS.get(slot as usize)?;
    owner.epoch.store(fork::epoch(), Relaxed);
    // Release, with the others' acquires: who sees the thread sees the epoch.
    owner.thread.store(thread, core::sync::atomic::Ordering::Release);
    Some(slot)
}

/// All numbers are given out: is there any whose thread is gone?
#[cold]
fn search_all(thread: u32) -> Option<u32> {
    (0..SLOTS).find(|&slot| inherit(slot, thread))
}

fn inherit(slot: u32, thread: u32) -> bool {
    let Some(owner) = OWNERS.get(slot as usize) else { return false };
    let previous = owner.thread.load(Acquire);
    let ours = owner.epoch.load(Relaxed) == fork::epoch();
    // Not one of a dead thread that had the number we have now: an exchange that leaves the number as it is would go
    // unnoticed by another thread that is taking the slot over at the same time.
    previous != 0
        && ours
        && !is_alive(previous)
        && owner.thread.compare_exchange(previous, thread, AcqRel, Relaxed).is_ok()
}

#[cfg(not(miri))]
fn thread_id() -> u32 {
    // SAFETY: takes nothing and cannot fail.
    let id = unsafe { libc::syscall(libc::SYS_gettid) };
    u32::try_from(id).unwrap_or(u32::MAX)
}

/// Whether a thread of this process has that number. If the number has gone to a new thread, the slot waits for the
/// end of that one as well.
#[cfg(not(miri))]
fn is_alive(thread: u32) -> bool {
    // SAFETY: takes nothing and cannot fail.
    let process = unsafe { libc::getpid() };
    // SAFETY: signal 0 is sent to nobody: only whether it could be is asked.
    let result = unsafe { libc::syscall(libc::SYS_tgkill, process, thread, 0) };
    result == 0 || std::io::Error::last_os_error().raw_os_error() != Some(libc::ESRCH)
}

/// Miri does not show the kernel's numbers.
#[cfg(miri)]
fn thread_id() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    NEXT.fetch_add(1, Relaxed)
}

#[cfg(miri)]
fn is_alive(_thread: u32) -> bool {
    true
}
