//! Beds by engine; those of io_uring and of the fake engine are in `bed.rs`.

mod ceph;

mod doubles;

mod io_uring_options;

mod linux_aio;

mod mapped;

mod mmap;

mod nbd;

mod nbd_server;

mod posix_aio;

mod rbd;

mod sync;

mod threads;

pub use crate::bed::{
    fake, fake_direct, uring_5_15, uring_before_5_19, uring_before_6_1, uring_buffered, uring_direct,
    uring_loop_device, uring_tmpfs,
};
pub use ceph::CephImage;
pub use doubles::*;
pub use io_uring_options::*;
pub use linux_aio::*;
pub use mapped::*;
pub use mmap::*;
pub use nbd::*;
pub use nbd_server::NbdServer;
pub use posix_aio::*;
pub use rbd::*;
pub use sync::*;
pub use threads::*;
