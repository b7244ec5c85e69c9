//! Runs fio-style loads on a vhost-user-blk socket or a file, and measures them.
//!
//! `options, job_file → Job → run (target, ports, workers) → Outcome → text | json`, and `compare` calls
//! `run`
//!
//! - A fio word means what it means in fio; `docs/how-to/bench.md` lists the exceptions.
//! - The target is not trusted: its answers are checked, and no wait for it is longer than configured.
//! - Nothing is allocated per request during a run (with verify: one note per block).
//!
//! Not here: experiments and reports (`lab`), the command line (`bareblk`).
#![forbid(unsafe_code)]

mod units;

mod options;

mod job;

mod job_file;

mod target;

mod run;

mod connection;

mod port;

mod port_file;

mod port_queue;

mod port_shared;

mod worker;

mod offsets;

mod pace;

mod verify;

mod touch;

mod latency;

mod measured;

mod cpu;

mod text;

mod json;

mod compare;

pub mod date;

pub mod stats;

pub mod stop;

pub use blk_driver::ConnectError;
pub use compare::{CompareError, Comparison, Difference, compare};
pub use cpu::{CpuTime, ProcessTime};
pub use job::{Job, JobError, Limits, MAX_DEPTH, MAX_JOBS, Mix, Order, Pattern, Rate, Span};
pub use job_file::{JobFileError, parse as parse_jobs};
pub use json::report;
pub use latency::{Latency, Spread};
pub use measured::{DirectionMeasured, Measured, QueueCounts, Sample};
pub use offsets::Direction;
pub use options::{OptionError, engine_word, known as known_options};
pub use run::{Outcome, Progress, Quiet, RunError, Watch, run};
pub use target::{Client, LockKind, PATIENCE, Target, TargetError};
pub use text::text;
pub use units::{bytes as parse_bytes, cpus as parse_cpus, short as short_bytes, time as parse_time};
pub use verify::Mismatch;
pub use worker::Failure;
