//! Tests that change or count resources of the whole process: descriptors, threads, log lines, CPU time.
//!
//! Each test holds `alone()` while it runs, so they run one at a time. All other tests are in `tests/it`.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

mod allowances;
mod disk_leaks;
mod idle;
mod leaks;
mod log_lines;
mod logs;
mod many_disks;
mod queue_restarts;
mod rapid_fire;
#[path = "../it/rig/mod.rs"]
mod rig;
mod worker_threads;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Until the guard is dropped, no other test runs.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}
