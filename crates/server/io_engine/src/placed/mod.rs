//! Placements: engines that carry out ops on another worker, or share one engine among several workers.
//!
//! `completion`: `push → hand-over ring → the completion worker's engine → completion ring → reap`
//! `shared`: `push → lock → one engine → the worker that reaps → completion ring → reap`
//!
//! - A placement makes one [`Engine`](crate::Engine) per worker. To the worker it is an ordinary engine.
//! - A placement serves one disk, or several disks with the same completion worker.
//! - A flush covers the writes that completed before it on any worker: a worker sees a write's completion only after
//!   the engine has reaped the write, and the flush reaches the engine later.
//! - Placed engines do not support registered guest memory (`pin_guest_memory`): no part of a placement knows when the
//!   ops of all workers on that memory have ended.

mod completion;
mod counters;
mod epoll_wait;
mod group;
mod limits;
mod placement;
mod routed_engine;
mod shared;
#[cfg(test)]
#[allow(clippy::cast_possible_truncation)] // small numbers of our own
mod test_bed;
mod waker;

pub use completion::{HandOver, ParseHandOverError};
pub use counters::PlacementCounters;
pub use limits::{EngineMaker, LEAST_SHARE};
pub use placement::{PlacedEngines, Placement, PlacementReport, WorkerId};
