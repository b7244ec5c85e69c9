//! Assigns nodes to threads.
//!
//! A thread gets a slot of [`NODES_PER_THREAD`] nodes on its first wait, and keeps the slot's number in a
//! thread-local cell. Each slot holds its owner's thread id. A new thread takes over a slot whose owner has
//! ended, so nothing has to run when a thread ends.
//!
//! This file never accesses the nodes' contents.

use core::cell::Cell;
use core::sync::atomic::{
    AtomicU32,
    Ordering::{AcqRel, Acquire, Relaxed},
};

use super::errno::KeptErrno;
use super::fork;
use crate::{NODES_PER_THREAD, Node};

/// Nodes without an owner; a thread that has no free node borrows one.
pub(crate) const COMMON_NODES: u32 = if cfg!(miri) { 16 } else { 1026 };
/// Threads that can have their own nodes at the same time.
const SLOTS: u32 = if cfg!(miri) { 64 } else { 16_127 };
const NODES: u32 = COMMON_NODES + SLOTS * NODES_PER_THREAD;
/// Slots to check for an ended owner before taking a fresh one.
const PROBES: u32 = 4;

const _: () = assert!(
    if cfg!(miri) { NODES <= crate::MAX_NODES } else { NODES == crate::MAX_NODES },
    "every node number that a lock's word can hold, even an uninitialised word, is that of a node",
);

static POOL: [Node; NODES as usize] = [const { Node::new() }; NODES as usize];
static OWNERS: [Owner; SLOTS as usize] = [const { Owner::none() }; SLOTS as usize];
/// Number of slots that were ever used; they are the first ones.
static USED: AtomicU32 = AtomicU32::new(0);
/// Where the next search for an ended owner starts.
static CURSOR: AtomicU32 = AtomicU32::new(0);

std::thread_local! {
    /// This thread's slot plus one; 0 before the first wait.
    static SLOT: Cell<u32> = const { Cell::new(0) };
}

/// The owner of a slot.
struct Owner {
    /// The owner's kernel thread id; 0 for a slot that was never taken.
    thread: AtomicU32,
    /// The epoch in which the slot was taken. Slots of an older epoch stay as they are: their nodes may be in
    /// queues that the child inherited, and must not be mistaken for new waiters.
    epoch: AtomicU32,
}

impl Owner {
    const fn none() -> Self {
        Self { thread: AtomicU32::new(0), epoch: AtomicU32::new(0) }
    }
}

#[inline]
pub(super) fn nodes() -> &'static [Node] {
    &POOL
}

#[inline]
pub(crate) fn own_nodes() -> Option<u32> {
    let slot = match SLOT.get() {
        0 => claim_slot()?,
        slot => slot - 1,
    };
    Some(COMMON_NODES + slot * NODES_PER_THREAD)
}

#[cold]
fn claim_slot() -> Option<u32> {
    let _errno = KeptErrno::new(); // the liveness check of an ended thread fails and sets errno
    let thread = thread_id();
    let slot = take_over(thread).or_else(|| take_fresh(thread)).or_else(|| search_all(thread))?;
    // A signal handler may have claimed a slot meanwhile; that slot is then lost until the thread ends.
    SLOT.set(slot + 1);
    Some(slot)
}

/// Takes over a slot whose owner has ended, if there is one among the next few.
fn take_over(thread: u32) -> Option<u32> {
    let used = USED.load(Acquire);
    (0..PROBES.min(used)).map(|_| CURSOR.fetch_add(1, Relaxed) % used).find(|&slot| inherit(slot, thread))
}

fn take_fresh(thread: u32) -> Option<u32> {
    let slot = USED.try_update(AcqRel, Relaxed, |used| (used < SLOTS).then_some(used + 1)).ok()?;
    let owner = OWNERS.get(slot as usize)?;
    owner.epoch.store(fork::epoch(), Relaxed);
    // Release pairs with the other threads' acquires: a thread that sees the thread id sees the epoch.
    owner.thread.store(thread, core::sync::atomic::Ordering::Release);
    Some(slot)
}

/// For when every slot has an owner: takes over one whose owner has ended.
#[cold]
fn search_all(thread: u32) -> Option<u32> {
    (0..SLOTS).find(|&slot| inherit(slot, thread))
}

fn inherit(slot: u32, thread: u32) -> bool {
    let Some(owner) = OWNERS.get(slot as usize) else { return false };
    let previous = owner.thread.load(Acquire);
    let ours = owner.epoch.load(Relaxed) == fork::epoch();
    // Skips a slot whose ended owner had the same thread id as this thread: the exchange would leave the
    // value unchanged, and another thread that takes the slot over at the same time would not notice it.
    previous != 0
        && ours
        && !is_alive(previous)
        && owner.thread.compare_exchange(previous, thread, AcqRel, Relaxed).is_ok()
}

#[cfg(not(miri))]
fn thread_id() -> u32 {
    // SAFETY: takes no arguments and cannot fail.
    let id = unsafe { libc::syscall(libc::SYS_gettid) };
    u32::try_from(id).unwrap_or(u32::MAX)
}

/// Whether a thread of this process has that id. If the kernel has reused the id for a new thread, the slot
/// stays taken until that thread ends too.
#[cfg(not(miri))]
fn is_alive(thread: u32) -> bool {
    // SAFETY: takes no arguments and cannot fail.
    let process = unsafe { libc::getpid() };
    // SAFETY: signal 0 is not delivered; the kernel only checks whether it could be.
    let result = unsafe { libc::syscall(libc::SYS_tgkill, process, thread, 0) };
    result == 0 || std::io::Error::last_os_error().raw_os_error() != Some(libc::ESRCH)
}

/// Miri does not expose kernel thread ids.
#[cfg(miri)]
fn thread_id() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    NEXT.fetch_add(1, Relaxed)
}

#[cfg(miri)]
fn is_alive(_thread: u32) -> bool {
    true
}
