//! Other locks behind `lock_api`, to measure against ours: the C library's, and a plain futex.
//!
//! - For comparisons only (feature `peers`): for real work, use their own interfaces.
//!
//! Benchmarks use locks with a safe interface (parking_lot, `spin`, `mcslock`) directly.

mod futex;
mod pthread;

pub use futex::FutexLock;
pub use pthread::{OwnThread, PthreadMutex, PthreadSpin};
