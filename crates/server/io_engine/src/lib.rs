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

mod contract;

mod halves;

mod core;

mod shares;

mod op_table;

mod files;

mod turn;
mod window;

mod flush_gate;

mod completion;

mod bounce;

mod kernel;

mod kind;

mod choose;

mod capability;

mod storage;

mod io_uring;

mod linux_aio;

mod posix_aio;

mod threads;

mod sync;

mod mmap;

mod plain;

mod watches;

mod epoll;

mod null;

mod fake;

mod record;

mod placed;

pub use capability::Capability;
pub use choose::{
    Chosen, EngineChoice, EngineError, ParseEngineError, PassedOver, check_options, choose, make,
};
pub use contract::{
    Completion, Durability, Engine, EngineConfig, Event, FileId, FileSpec, Handles, Op, OpError, OpKind,
    Reap, SharedHandles, Stats, Submit, Unmap, WatchId, WatchToken,
};
pub use fake::{FakeEngine, FakeHandle, Fault, Rule, When};
pub use io_uring::{Features, FileTableKind, IoUringEngine, KernelAge, io_uring_capabilities};
pub use kind::EngineKind;
pub use linux_aio::LinuxAioEngine;
pub use linux_aio::signal::{prepare_signals, signal_shared};
pub use mmap::MmapEngine;
pub use null::NullEngine;
pub use placed::{
    CompletionPlacement, EngineMaker, HandOver, LEAST_SHARE, ParseHandOverError, PlacementCounters,
    SharedPlacement,
};
pub use posix_aio::PosixAioEngine;
pub use record::{Record, Recorder, Verb};
pub use shares::Shares;
pub use storage::Storage;
pub use sync::SyncEngine;
pub use threads::ThreadsEngine;
