//! Placements: engines whose ops are carried out elsewhere than on the worker that pushes them.
//!
//! `queue` (no placement): each worker has an engine of its own.
//! `completion`: `push → hand-over ring → the completion worker's engine → completion ring → reap`
//! `shared`: `push → lock → one engine → whoever reaps → completion ring → reap`
//!
//! - A placement makes one [`Engine`](crate::Engine) per worker; the worker cannot tell it from any other, except that
//!   [`Engine::keeps_running`](crate::Engine::keeps_running) may ask it to stay.
//! - One placement serves one disk, or several disks with the same completion worker.
//! - No order is lost: an op is handed over after whatever its worker has reaped, and the kernel's answer to a write is
//!   reaped before its completion is passed on. So a flush that was pushed after a write's completion was seen,
//!   by whichever worker, reaches the engine after the engine reaped that write.
//! - Guest memory is not registered with the kernel (`pin_guest_memory`): nobody here knows when the ops of all
//!   workers on a piece of it are done.
//!
//! Not here: which worker serves which queue (`blk_server`), engines that do the work.

mod completion;
mod counters;
mod epoll_wait;
mod placement;
mod routes;
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

/// Makes the engine that does the work; called on the thread that will use it.
pub type EngineMaker = Box<dyn Fn() -> io::Result<Box<dyn Engine>> + Send + Sync>;

/// What each worker of a placement needs of its engine's depth: with less, a request of many segments might never find
/// room.
pub const LEAST_SHARE: usize = 32;

/// What each of `participants` workers may have in flight in an engine of `depth`.
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
