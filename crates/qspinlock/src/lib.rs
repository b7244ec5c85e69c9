//! Locks in user space: a ticket lock now, the queued spinlock later, all behind `lock_api`.
//!
//! Not here: what is locked (`blk_driver::SharedQueue`), C interfaces.
