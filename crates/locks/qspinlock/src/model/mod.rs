//! Models of the locks (loom): all interleavings, and all values that the orderings let a thread read.
//!
//! Run `RUSTFLAGS="--cfg loom" cargo test -p qspinlock --lib --target-dir target/loom`; `BAREBLK_LONG=1` runs
//! them in full size.
//!
//! | file | what |
//! |---|---|
//! | `ticket.rs` | the ticket lock |
//! | `platform.rs` | threads, nodes, futexes and deadlines for the queued lock |
//! | `rig.rs` | a lock and a number that two threads must never touch at once; policies with tiny limits |
//! | `two.rs` | two threads and the queued lock, with a bound on preemptions |
//! | `three.rs` | three threads and the queued lock, with a bound on preemptions |
//! | `rwlock.rs` | the reader/writer lock, with two and three threads |
//!
//! What loom does not explore: load buffering (C++ lets a load be reordered after a later store, which no
//! interleaving shows), and `SeqCst`, which it treats as `AcqRel`.
//!
//! There are no models of `StdMutex` and `Api04`, which use no orderings themselves. `tests/` covers Linux's futex,
//! also in Miri.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod platform;
mod rig;
mod rwlock;
mod three;
mod ticket;
mod two;

pub(crate) use rig::SleepyFifo;
