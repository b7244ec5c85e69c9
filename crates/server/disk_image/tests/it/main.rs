//! Integration tests: one binary, one module per subject. Folders without tests hold code that modules share.
#![allow(missing_docs)]

mod bad_images;
mod block_devices;
mod images;
mod locking;
mod rig;
