//! Other people's locks behind `lock_api`, to be measured beside ours: the C library's, and a plain futex.
//!
//! - Only for comparisons (feature `peers`): who wants one of them for work is better served by its own interface.
//!
//! Not here: locks that come with a safe interface (parking_lot, `spin`, `mcslock`): who measures uses that.

mod futex;
mod pthread;

pub use futex::FutexLock;
pub use pthread::{PthreadMutex, PthreadSpin};

/// State of an acquisition that only the thread that acquired may release.
pub type OwnThread = lock_api::GuardNoSend;
