//! mmap on each kind of storage.

use crate::bed::Bed;

pub fn mmap_tmpfs() -> Option<Bed> {
    println!("skipped: not there yet");
    None
}

pub fn mmap_tmpfs_direct() -> Option<Bed> {
    println!("skipped: not there yet");
    None
}
