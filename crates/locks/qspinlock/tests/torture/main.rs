//! Stresses the queued locks: far more threads than cores that come and go, time limits, signals, forks,
//! moves between cores.
//!
//! - Each part runs for a while (`xtask::sizes::TORTURE`; `BAREBLK_LONG=1`: minutes).
//! - It looks for two threads inside at once (the data behind each lock is several plain words), threads that
//!   never finish (a watchdog prints the locks and ends the process), and nodes that are never given back.
//! - Not reached: more threads at the same time than `src/linux/slots.rs` has slots (65,000). A thread
//!   without a slot takes the path of timed waits that have used up their nodes, which is reached.
//! - A pass only says that this machine and these schedules found nothing.
//!
//! See also: single situations (`tests/it/order.rs`), all interleavings of a few threads (`src/model/`).
#![cfg(not(any(loom, miri)))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation, missing_docs)]

mod crowd;
mod exits;
mod forks;
mod readers;
mod rig;
mod signals;
