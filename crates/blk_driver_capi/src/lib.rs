//! The virtio-blk driver for C: the calls of `blk_driver` behind `bareblk_driver.h`.
//!
//! Not here: anything that decides; the calls only translate.
