//! The context that a queue borrows from its worker to take requests in one pass.

use std::time::Instant;

use io_engine::{Engine, LEAST_SHARE};

use crate::data_path::worker::buffers::BufferPool;
use crate::data_path::worker::turn::Budget;

/// Maximum number of ops per request: a discard has one op per segment.
pub(super) const MAX_OPS: usize = virtio_blk::MAX_SEGMENTS;
const _: () = assert!(MAX_OPS <= LEAST_SHARE, "a disk's share is enough for any request");

/// The parts of a worker that a queue borrows for one pass.
pub(crate) struct SubmitContext<'w> {
    pub(crate) engine: &'w mut dyn Engine,
    /// How many more ops of this queue the engine accepts in this pass.
    pub(crate) room: usize,
    /// [`Engine::batch`]
    pub(crate) batch: usize,
    pub(crate) pool: &'w mut BufferPool,
    pub(crate) now: Instant,
    /// The same time as `process_ns`, for the requests in flight. 0 until the pass takes a request.
    pub(crate) now_ns: u64,
    /// The budget left for all queues of the disk in this pass.
    pub(crate) budget: &'w mut Budget,
}
