//! posix-aio on each kind of storage.

use crate::bed::Bed;

pub fn posix_aio_direct() -> Option<Bed> {
    println!("skipped: not there yet");
    None
}

pub fn posix_aio_buffered() -> Option<Bed> {
    println!("skipped: not there yet");
    None
}

pub fn posix_aio_tmpfs() -> Option<Bed> {
    println!("skipped: not there yet");
    None
}

pub fn posix_aio_loop_device() -> Option<Bed> {
    println!("skipped: not there yet");
    None
}

pub fn posix_aio_without_fd_pool() -> Option<Bed> {
    println!("skipped: not there yet");
    None
}
