//! Integration tests: one binary, one module per subject. Folders without tests hold code that modules share.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

mod device;
mod driver;
mod oracle;
mod packed_crashes;
mod packed_device;
mod packed_driver;
mod packed_hand_over;
mod packed_resume;
mod reference;
mod rig;
mod schedules;
mod threads;
