//! Tests of repairs, on images that are made by hand and then damaged.
//!
//! `damage.rs: bytes of a damaged image → rig.rs: a file that keeps all calls → repair → check, QEMU, every crash`
#![allow(clippy::cast_possible_truncation)]

mod careful;
mod crashes;
mod damage;
mod hostile;
mod qemu;
mod rebuilt;
mod repaired;
mod rig;
