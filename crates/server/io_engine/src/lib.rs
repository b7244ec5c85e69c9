//! Asynchronous I/O on disk images: one contract, several engines, and a fake for tests.
//!
//! `Op → contract → core (op table, bounce, completion logic) → kernel: io_uring | linux_aio | posix_aio | threads | sync | mmap | fake →
//! Completion`
//!
//! - An engine owns an op, hence its memory, until it gives it back; short transfers, `EINTR` and
//!   misaligned buffers never leave it.
//! - Everything but the system calls is shared by all engines, so the fake's faults test what runs.
//!
//! Not here: which image and which range (`disk_image`), what a request means (`virtio_blk`).

mod backend;
mod choose;
mod core;
mod engine;
mod engines;
mod halves;
mod placed;
mod record;

pub use crate::core::shares::Shares;
pub use choose::capability::Capability;
pub use choose::kind::EngineKind;
pub use choose::storage::Storage;
pub use choose::{
    Chosen, EngineChoice, EngineError, ParseEngineError, PassedOver, check_options, choose, make,
};
pub use engine::{
    Completion, Durability, Engine, EngineConfig, Event, FileId, FileSpec, Handles, Op, OpError, OpKind,
    Reap, SharedHandles, Stats, Submit, Unmap, WatchId, WatchToken,
};
pub use engines::fake::{FakeEngine, FakeHandle, Fault, Rule, When};
pub use engines::io_uring::{Features, FileTableKind, IoUringEngine, KernelAge, io_uring_capabilities};
pub use engines::linux_aio::LinuxAioEngine;
pub use engines::linux_aio::signal::{prepare_signals, signal_shared};
pub use engines::mmap::MmapEngine;
pub use engines::null::NullEngine;
pub use engines::posix_aio::PosixAioEngine;
pub use engines::sync::SyncEngine;
pub use engines::threads::ThreadsEngine;
pub use placed::{
    CompletionPlacement, EngineMaker, HandOver, LEAST_SHARE, ParseHandOverError, PlacementCounters,
    SharedPlacement,
};
pub use record::{Record, Recorder, Verb};
