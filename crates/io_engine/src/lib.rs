//! Asynchronous I/O on disk images: one contract, several engines, and a fake for tests.
//!
//! Not here: which image and which range (`disk_image`), what a request means (`virtio_blk`).

mod contract;
mod record;

pub use contract::{
    Completion, Durability, Engine, EngineConfig, Event, FileId, FileSpec, Handles, Op, OpError, OpKind,
    Reap, Stats, Submit, Unmap, WatchId, WatchToken,
};
pub use record::{Record, Recorder, Verb};
