//! A small number for each living thread, used to index static tables.
//!
//! It is the number of the thread's node slot: dense, claimed at first use, and taken over by a new thread
//! once its owner has ended. Nothing is allocated, and nothing runs when a thread ends.
//!
//! See also: how numbers are assigned (`linux/slots.rs`), the tables (`stats/table.rs`,
//! `checked/holders.rs`).

use crate::NODES_PER_THREAD;
use crate::linux::slots::{COMMON_NODES, own_nodes};

/// Limit of numbered threads. There may be more threads; each table defines how it handles them.
pub(crate) const MAX_THREADS: usize = if cfg!(miri) { 64 } else { 4096 };

/// The calling thread's number, below [`MAX_THREADS`]; `None` if too many other threads are alive.
pub(crate) fn claim() -> Option<usize> {
    let first = own_nodes()?;
    let number = first.checked_sub(COMMON_NODES)? / NODES_PER_THREAD;
    usize::try_from(number).ok().filter(|&number| number < MAX_THREADS)
}
