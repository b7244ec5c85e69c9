//! Integration tests: one program, a module for each subject. Folders without tests are shared by modules.
#![allow(missing_docs)]

mod bad_images;
mod block_devices;
mod images;
mod locking;
mod rig;
