//! The constructor of a placement's engine, and the shares of its depth.

use std::io;

use crate::engine::Engine;

/// Makes the engine that does the work. Called on the thread that will use the engine.
pub type EngineMaker = Box<dyn Fn() -> io::Result<Box<dyn Engine>> + Send + Sync>;

/// Smallest share of the depth per worker. With less, a request with many segments might never find room.
pub const LEAST_SHARE: usize = 32;

/// How many ops each of `participants` workers may have in flight in an engine of `depth`.
pub(super) fn share(depth: usize, participants: usize) -> io::Result<usize> {
    let share = depth / participants.max(1);
    if share >= LEAST_SHARE {
        return Ok(share);
    }
    let text = format!(
        "a depth of {depth} is too small for {participants} workers, because each needs {LEAST_SHARE}: make \
         it larger, or use fewer workers for this disk"
    );
    Err(io::Error::new(io::ErrorKind::InvalidInput, text))
}

pub(super) fn no_watches() -> io::Error {
    io::Error::new(
        io::ErrorKind::Unsupported,
        "a placed engine watches no descriptors: the worker's own engine does",
    )
}
