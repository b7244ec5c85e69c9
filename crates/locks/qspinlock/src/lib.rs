//! Locks in user space behind `lock_api` 0.5: queued locks, a fair ticket lock of four bytes, and std's mutex
//! for comparison.
//!
//! `lock → (spin, or sleep) → the guard's state → unlock`
//!
//! - These locks are designed for a `lock_api::Mutex` around small data, held for less than a microsecond.
//! - Use a lock that only spins ([`TicketLock`]) only with fewer threads than cores: a waiter that the scheduler
//!   preempts stops all waiters behind it. If you cannot guarantee that, use a lock that sleeps
//!   ([`StdMutex`]).
//! - Models check the orderings: `RUSTFLAGS="--cfg loom" cargo test -p qspinlock --lib --target-dir
//!   target/loom`.
//!
//! See also: the data behind a lock (`blk_driver::SharedQueue`), the C interface (`qspinlock_capi`).
#![no_std]

#[cfg(any(feature = "std", test))]
extern crate std;

mod ticket;

mod atomic;
mod events;
mod node;
mod platform;
mod policy;
mod queue;
#[cfg(not(all(test, loom)))]
mod raw;
mod rwlock;
mod word;

#[cfg(all(feature = "std", not(all(test, loom))))]
mod linux;

#[cfg(feature = "std")]
mod std_mutex;

#[cfg(feature = "lock_api_04")]
mod api_04;

#[cfg(all(feature = "std", not(all(test, loom))))]
mod metered;

#[cfg(all(feature = "peers", not(all(test, loom))))]
pub mod peers;

#[cfg(all(any(feature = "stats", feature = "misuse"), not(all(test, loom))))]
mod thread_number;

#[cfg(all(feature = "misuse", not(all(test, loom))))]
pub mod checked;
#[cfg(all(feature = "stats", not(all(test, loom))))]
pub mod stats;

#[cfg(all(test, loom))]
mod model;

#[cfg(feature = "lock_api_04")]
pub use api_04::Api04;
pub use events::Event;
#[cfg(all(feature = "std", not(all(test, loom))))]
pub use linux::{Linux, now};
#[cfg(all(feature = "std", not(all(test, loom))))]
pub use metered::{Held, LockTimes, Metered, STRIDE};
pub use node::{NODES_PER_THREAD, Node};
pub use platform::{Clock, Deadline, Platform, Slept};
pub use policy::{Fair, Fifo, Hybrid, Native, Policy};
pub use queue::QueueLock;
#[cfg(not(all(test, loom)))]
pub use rwlock::recursive::RecursiveQueueRwLock;
pub use rwlock::{MAX_READERS, QueueRwLock};
#[cfg(feature = "std")]
pub use std_mutex::{StdGuard, StdMutex};
pub use ticket::{Ticket, TicketLock};
pub use word::{FOREIGN, MAX_NODES, MAX_PASSED};

/// The queued lock that only spins: first in, first out. Each thread needs a core of its own.
#[cfg(all(feature = "std", not(all(test, loom))))]
pub type QSpinLock = QueueLock<Native, Linux>;
/// The queued lock whose waiters spin for a while and then sleep. `P` is [`Hybrid`] (high throughput, limited
/// overtaking) or [`Fair`] (first in, first out).
#[cfg(all(feature = "std", not(all(test, loom))))]
pub type PvQSpinLock<P = Hybrid> = QueueLock<P, Linux>;

/// The fair reader/writer lock of eight bytes, whose waiters queue, spin for a while and then sleep.
#[cfg(all(feature = "std", not(all(test, loom))))]
pub type QRwLock = QueueRwLock<Linux>;
/// A [`QRwLock`] that a thread may read-lock again while it holds a read lock: readers pass waiting writers.
#[cfg(all(feature = "std", not(all(test, loom))))]
pub type RecursiveQRwLock = RecursiveQueueRwLock<Linux>;

/// Data behind a [`QRwLock`].
#[cfg(all(feature = "std", not(all(test, loom))))]
pub type RwLock<T> = lock_api::RwLock<QRwLock, T>;
/// Shared access to the data of a [`RwLock`].
#[cfg(all(feature = "std", not(all(test, loom))))]
pub type RwLockReadGuard<'a, T> = lock_api::RwLockReadGuard<'a, QRwLock, T>;
/// Exclusive access to the data of a [`RwLock`].
#[cfg(all(feature = "std", not(all(test, loom))))]
pub type RwLockWriteGuard<'a, T> = lock_api::RwLockWriteGuard<'a, QRwLock, T>;

/// Data behind a [`TicketLock`].
#[cfg(not(all(test, loom)))]
pub type TicketMutex<T> = lock_api::Mutex<TicketLock, T>;
/// Access to the data of a [`TicketMutex`].
#[cfg(not(all(test, loom)))]
pub type TicketMutexGuard<'a, T> = lock_api::MutexGuard<'a, TicketLock, T>;
