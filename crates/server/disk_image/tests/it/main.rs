//! Integration tests: one binary, one module per subject. Folders without tests hold code that modules share.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

mod bad_images;
mod block_devices;
mod images;
mod locking;
mod rig;
