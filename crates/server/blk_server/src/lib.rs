//! The vhost-user-blk back-end: one session per front-end, its queues, and the workers that serve them.
//!
//! The path of one request, from kick to call (ARCHITECTURE.md has the same eight steps):
//!
//! `worker.rs` wakes → `queue.rs` takes a chain (`virtqueue`), parses it (`virtio_blk`), checks its range
//! (`disk_image`) → `in_flight.rs` → engine (`io_engine`) → `queue.rs` writes status and used ring →
//! notifies once per pass.
//!
//! Around it: `server.rs` owns everything, `exports.rs` has the disks and accepts, `session` speaks vhost-user,
//! `disk.rs` is what sessions and queues share.
//!
//! Not here: the command line (`bareblk`), formats and locks (`disk_image`).
#![forbid(unsafe_code)]

mod worker;

mod poller;

mod queue;

mod turn;

mod buffers;

mod coalescing;

mod refusal;

mod ring_start;

mod in_flight;

mod hold;

mod disk;

mod write_cache;

mod session_link;

mod session;

mod signal;

mod queue_start;

mod command;

mod workers;

mod worker_options;

mod worker_thread;

mod cpu_list;

mod numa;

mod cgroup;

mod engine_source;

mod placement;

mod report;

mod balance;

mod bell;

mod balancer;

mod submissions;

mod meters;

mod limit;

mod attachments;

mod log_limit;

mod error;

mod error_line;

mod clock;

mod listener;

mod acceptor;

mod session_list;

mod exports;

mod capacity;

mod flush;

mod removal;

mod server;

mod take_over;

mod inline;

pub use attachments::RollCall;
pub use balance::Balance;
pub use cgroup::{CgroupError, own_domain, threads_file};
pub use clock::monotonic_ns;
pub use coalescing::{Coalescing, InvalidCoalescing};
pub use cpu_list::{InvalidCpuList, MAX_CPU, format_cpus, parse_cpus};
pub use disk::{DiskConfig, InvalidDisk, MAX_QUEUES, SERIAL_BYTES};
pub use engine_source::{EngineFactory, EngineSource};
pub use error::{AdminError, ServerError};
pub use hold::{Hold, HoldWhat};
pub use inline::InlineWorker;
#[cfg(feature = "test-util")]
pub use inline::server::{InlineServer, InlineSession};
pub use listener::{Socket, SocketConfig, SocketError};
pub use log_limit::{Allowed, LogLimit};
pub use placement::{Placement, PlacementReport};
pub use poller::{BUSY_POLL, DEFAULT_POLL};
pub use report::{
    BalanceDecision, BalanceReport, DiskReport, MoveOutcome, QueueCounters, QueueReport, ServerReport,
    WorkerCounters, WorkerReport,
};
pub use server::{Server, ServerConfig, StopReport};
pub use session::hand_over::Handed;
pub use session::state::SessionState;
pub use submissions::Submissions;
pub use take_over::{DiskState, Fact, Frozen, GivenUp, Offer, Rebuilt, TakeOverError};
pub use virtqueue::{MAX_QUEUE_SIZE, MIN_QUEUE_SIZE};
pub use worker_options::{InvalidClass, SchedulingClass, WorkerId, WorkerOptions, WorkerOptionsError};
pub use write_cache::Wce;
