//! The engines, and the code that several of them share.

pub(crate) mod epoll;
#[cfg(any(test, feature = "test-util"))]
pub(crate) mod fake;
pub(crate) mod io_uring;
pub(crate) mod linux_aio;
pub(crate) mod mapped;
pub(crate) mod mmap;
pub(crate) mod nbd;
#[cfg(any(test, feature = "test-util"))]
pub(crate) mod null;
pub(crate) mod plain;
pub(crate) mod posix_aio;
pub(crate) mod rbd;
pub(crate) mod sync;
pub(crate) mod threads;
pub(crate) mod watches;
