//! The crate's atomics: `core`'s, or loom's in models.
//!
//! Each access names its own ordering.

#[cfg(not(all(test, loom)))]
pub(crate) use core::sync::atomic::{AtomicU32, AtomicUsize, fence};
#[cfg(all(test, loom))]
pub(crate) use loom::sync::atomic::{AtomicU32, AtomicUsize, fence};
