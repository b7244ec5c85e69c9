//! Placements: engines that do not carry out ops on the worker that pushes them.
//!
//! `completion`: `push → hand-over ring → the completion worker's engine → completion ring → reap`
//! `shared`: `push → lock → one engine → the worker that reaps → completion ring → reap`
//!
//! - A placement makes one [`Engine`](crate::Engine) per worker. The worker cannot tell it from any other engine.
//! - One placement serves one disk, or several disks with the same completion worker.
//! - A flush covers the writes that completed before it, on any worker: a worker sees a write's completion only after the
//!   engine has reaped the write, and the flush reaches the engine later.
//! - Guest memory is not registered with the kernel (`pin_guest_memory`): no part of a placement knows when the ops of all
//!   workers on a piece of memory have ended.

mod completion;
mod counters;
mod epoll_wait;
mod group;
mod placement;
mod routed_engine;
mod shared;
#[cfg(test)]
#[allow(clippy::cast_possible_truncation)] // small numbers of our own
mod test_bed;
mod waker;

pub use completion::{HandOver, ParseHandOverError};
pub use counters::PlacementCounters;
pub use placement::{PlacedEngines, Placement, PlacementReport, WorkerId};

use std::io;

use crate::engine::Engine;

/// Makes the engine that does the work, on the thread that will use it.
pub type EngineMaker = Box<dyn Fn() -> io::Result<Box<dyn Engine>> + Send + Sync>;

/// The least share of the depth for each worker of a placement. With less, a request of many segments might never find
/// room.
pub const LEAST_SHARE: usize = 32;

/// How many ops each of `participants` workers may have in flight in an engine of `depth`.
fn share(depth: usize, participants: usize) -> io::Result<usize> {
    let share = depth / participants.max(1);
    if share >= LEAST_SHARE {
        return Ok(share);
    }
    let text = format!(
        "a depth of {depth} is too little for {participants} workers, each needs {LEAST_SHARE}: make it larger, or use \
         fewer workers for this disk"
    );
    Err(io::Error::new(io::ErrorKind::InvalidInput, text))
}

fn no_watches() -> io::Error {
    io::Error::new(
        io::ErrorKind::Unsupported,
        "a placed engine watches nothing: the worker's own engine does",
    )
}
