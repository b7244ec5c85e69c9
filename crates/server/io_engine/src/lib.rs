//! Asynchronous I/O on disk images: one trait for workers, several engines, and a fake for tests.
//!
//! ```text
//! worker → Engine ─┬─ Core (op table, bounce buffers, next call, meaning of results) → IoBackend:
//!                  │       io_uring | linux_aio | posix_aio | threads | sync | mmap | nbd | rbd | fake
//!                  ├─ mapped: looks up where the data are, and hands ops on files to another engine
//!                  └─ placed: the ops go to another worker's engine, or to one that several workers share
//! ```
//!
//! - An engine owns an op and its memory until the op's completion. Callers never see short transfers, `EINTR` or
//!   misaligned buffers.
//! - All engines share everything except the system calls, so the faults that the fake injects test production code.
//!
//! See also: the image and the range (`disk_image`), the meaning of a request (`virtio_blk`).

mod backend;
mod choose;
mod config;
mod core;
mod engine;
mod engine_options;
mod engines;
mod placed;
#[cfg(any(test, feature = "test-util"))]
mod record;

pub use backend::{Buffers, Call, IoBackend, QueueFull, RawResult, Target, Verb};
pub use choose::capability::Capability;
pub use choose::kind::EngineKind;
pub use choose::storage::Storage;
pub use choose::{Chosen, EngineChoice, EngineError, ParseEngineError, PassedOver, choose, make};
pub use config::EngineConfig;
pub use engine::{
    Completion, Durability, Engine, Event, FileId, FileSpec, Op, OpError, OpKind, Stats, Unmap, WatchId,
    WatchToken,
};
pub use engine_options::EngineOptions;
pub use engines::epoll::EpollWatcher;
#[cfg(any(test, feature = "test-util"))]
pub use engines::fake::{FakeEngine, FakeHandle, Fault, Rule, When};
pub use engines::io_uring::{
    Features, FileTableKind, IoUringEngine, IoUringOptions, KernelAge, io_uring_capabilities,
};
pub use engines::linux_aio::LinuxAioEngine;
pub use engines::linux_aio::signal::{prepare_signals, signal_shared};
pub use engines::mapped::MappedEngine;
pub use engines::mmap::MmapEngine;
pub use engines::nbd::{NbdBackend, NbdEngine};
#[cfg(any(test, feature = "test-util"))]
pub use engines::null::NullEngine;
pub use engines::posix_aio::{MAX_FD_POOL, PosixAioEngine, PosixAioOptions};
pub use engines::rbd::{RbdBackend, RbdEngine};
pub use engines::sync::SyncEngine;
pub use engines::threads::ThreadsEngine;
pub use placed::{
    EngineMaker, HandOver, LEAST_SHARE, ParseHandOverError, PlacedEngines, Placement, PlacementCounters,
    PlacementReport, WorkerId,
};

pub use crate::core::Core;
pub use crate::core::shares::Shares;
#[cfg(any(test, feature = "test-util"))]
pub use crate::record::{Record, Recorder};
