//! The locks in all interleavings, and all values that their orderings let a thread read (loom).
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p qspinlock --lib --target-dir target/loom`, with `BAREBLK_LONG=1` in full size.
//!
//! | file | what |
//! |---|---|
//! | `ticket.rs` | the ticket lock |
//! | `platform.rs` | threads, nodes, futexes and deadlines for the queued lock |
//! | `rig.rs` | a lock and a number that two threads must never touch at once; policies with tiny limits |
//! | `two.rs` | two threads and the queued lock, with a bound on preemptions |
//! | `three.rs` | three, with a bound on preemptions |
//! | `rwlock.rs` | the reader/writer lock, with two and three |
//!
//! What loom does not see: accesses that are reordered with later ones in a way C++ allows but no execution of it
//! interleaves (load buffering), and `SeqCst`, which it takes for `AcqRel`.
//!
//! Not here: `StdMutex` and `Api04`, which have no orderings of their own; Linux's futex (`tests/`, under Miri too).
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod platform;
mod rig;
mod rwlock;
mod three;
mod ticket;
mod two;

pub(crate) use rwlock::SleepyFifo;
