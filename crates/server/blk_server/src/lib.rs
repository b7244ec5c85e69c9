//! The vhost-user-blk back-end: one session per front-end, its queues, and the workers that serve them.
//!
//! The path of one request, from kick to call (ARCHITECTURE.md has the same eight steps):
//!
//! `data_path/worker` wakes → `data_path/queue` takes a chain (`virtqueue`), parses it (`virtio_blk`), checks its range
//! (`disk_image`) → `in_flight.rs` → engine (`io_engine`) → the queue writes status and used ring → notifies once per pass.
//!
//! Three layers over shared parts; each layer uses only those below it:
//!
//! - `control`: the server, its disks and workers, live upgrades, the balancer.
//! - `session`: one front-end and its messages.
//! - `data_path`: workers, queues, disks, and which worker serves which queue.
//! - `host` and `error.rs`: used by all layers.
//! - `inline`: one worker, stepped by its caller, for benchmarks and fuzzing.
#![forbid(unsafe_code)]

mod data_path;

mod session;

mod control;

mod host;

mod error;

mod inline;

pub use control::balance::Balance;
pub use control::live_upgrade::{DiskState, Fact, Frozen, GivenUp, LiveUpgradeError, Offer, Rebuilt};
pub use control::overlay::Replacement;
pub use control::server::{Server, ServerConfig, StopReport};
pub use data_path::assignment::Attached;
pub use data_path::assignment::liveness::LivenessCheck;
pub use data_path::counters::{CounterInfo, CounterUnit, QueueCounters, WorkerCounters};
pub use data_path::disk::engine_source::{EngineFactory, EngineSource};
pub use data_path::disk::log_limit::{Allowed, LogLimit};
pub use data_path::disk::slow_requests::SlowRequest;
pub use data_path::disk::totals::DiskTotals;
pub use data_path::disk::write_cache::Wce;
pub use data_path::disk::{DiskConfig, InvalidDisk, MAX_QUEUES, SERIAL_BYTES};
pub use data_path::latency::{Latency, LatencyHistogram};
pub use data_path::queue::coalescing::{Coalescing, InvalidCoalescing};
pub use data_path::queue::parked::{ParkPolicy, ParkWhat};
pub use data_path::report::{
    BalanceDecision, BalanceReport, DiskReport, DiskThrottling, GroupReport, MoveOutcome, QueueReport,
    ServerReport, WorkerReport,
};
pub use data_path::throttle::disk_throttle::LimitReport;
pub use data_path::throttle::limits::{
    DEFAULT_WEIGHT, DiskLimits, InvalidLimits, LimitKind, LimitSettings, MAX_WEIGHT, RateSettings,
    SettingUnit,
};
pub use data_path::worker::poller::{BUSY_POLL, DEFAULT_POLL};
pub use data_path::worker::submissions::Submissions;
pub use data_path::worker::worker_options::{
    InvalidClass, SchedulingClass, WorkerOptions, WorkerOptionsError,
};
pub use error::{AdminError, ServerError};
pub use host::cgroup::{CgroupError, own_domain, threads_file};
pub use host::clock::monotonic_ns;
pub use host::cpu_list::{InvalidCpuList, MAX_CPU, format_cpus, parse_cpus};
pub use host::listener::{Socket, SocketConfig, SocketError};
pub use inline::InlineWorker;
#[cfg(feature = "test-util")]
pub use inline::server::{InlineServer, InlineSession};
pub use io_engine::{Placement, PlacementReport, WorkerId};
pub use session::state::{Handed, SessionState};
pub use virtqueue::{MAX_QUEUE_SIZE, MIN_QUEUE_SIZE};
