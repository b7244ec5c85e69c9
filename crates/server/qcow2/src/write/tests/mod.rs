//! Tests of the writer on a simulated disk that fails at every instant.
//!
//! ```text
//! images.rs: an image with all kinds of entries ─▶ disk.rs: the file, its unsynced sectors, its faults
//! world.rs: a guest's operations ─▶ Writer ─▶ disk.rs ─ after each call ─▶ model.rs: every crash is checked
//! ```
#![allow(clippy::cast_possible_truncation)]

mod crashes;
pub(crate) mod disk;
mod faults;
mod growth;
mod hostile;
pub(crate) mod images;
mod limits;
mod merge;
mod model;
pub(crate) mod plain;
mod qemu;
mod reclaim;
mod steps;
mod world;
