//! The atomics of the crate: the processor's, or in models those that loom watches.
//!
//! Not here: orderings, which each access names itself.

#[cfg(not(all(test, loom)))]
pub(crate) use core::sync::atomic::{AtomicU32, AtomicUsize, fence};
#[cfg(all(test, loom))]
pub(crate) use loom::sync::atomic::{AtomicU32, AtomicUsize, fence};
