//! The queued locks under all that threads do to them: far more threads than cores that come and go, time limits,
//! signals, forks, moves from core to core.
//!
//! - Each part runs for a while (`xtask::sizes::TORTURE`; `BAREBLK_LONG=1`: minutes).
//! - What it looks for: two inside at once (data behind each lock is several plain words), threads that never finish (a
//!   watchdog ends the process and prints the locks), places in queues that are never given back.
//! - Out of reach: more threads at the same time than `src/linux/slots.rs` has slots (65,000). Who has no slot takes the
//!   path of timed waits that have used up their nodes, which is reached.
//! - That nothing was found says that this machine and these schedules found nothing.
//!
//! Not here: single situations, one after another (`order.rs`), all interleavings of a few threads (`src/model.rs`).
#![cfg(not(any(loom, miri)))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation, missing_docs)]

mod crowd;
mod exits;
mod forks;
mod readers;
mod rig;
mod signals;
