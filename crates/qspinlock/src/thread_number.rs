//! A small number for each living thread, by which what is known about it is found in static memory.
//!
//! It is the number of the thread's nodes: dense, claimed at first use, taken over by a new thread once its owner has
//! ended. Nothing is allocated and nothing runs when a thread ends.
//!
//! Not here: how numbers are given out (`linux/slots.rs`), what is kept under them (`stats/table.rs`,
//! `checked/holders.rs`).

use crate::{Linux, NODES_PER_THREAD, Platform};

/// Threads that are told apart. More may live; what becomes of them is said where numbers are used.
pub(crate) const MAX_THREADS: usize = if cfg!(miri) { 64 } else { 4096 };

/// The calling thread's, below [`MAX_THREADS`]; none if too many others live.
pub(crate) fn claim() -> Option<usize> {
    let first = Linux::own_nodes()?;
    let number = first.checked_sub(Linux::common_nodes())? / NODES_PER_THREAD;
    usize::try_from(number).ok().filter(|&number| number < MAX_THREADS)
}
