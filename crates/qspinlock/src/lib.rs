//! Locks in user space behind `lock_api` 0.5: a fair ticket lock of four bytes, and std's mutex to compare it with.
//!
//! Not here: what is locked (`blk_driver::SharedQueue`), C interfaces.

mod metered;

pub use metered::{Held, LockTimes, Metered, STRIDE};
