//! Runs fio-style loads on a vhost-user-blk socket or a file, and measures them.
//!
//! `options, job_file → Job → run (target, ports, workers) → Outcome → text | json`, and `compare` calls
//! `run`
//!
//! - fio's options have fio's meaning; `docs/how-to/bench.md` lists the exceptions.
//! - The target is not trusted: its answers are checked, and each wait for it has a limit.
//! - Nothing is allocated per request during a run (verify allocates one record per block).
//!
//! See also: experiments and reports (`lab`), the command line (`bareblk`).
#![forbid(unsafe_code)]

mod error;

mod job;

mod measured;

mod target;

mod run;

mod report;

mod compare;

pub mod date;

pub mod stats;

pub mod stop;

pub use blk_driver::ConnectError;
pub use compare::{CompareError, Comparison, Difference, compare};
pub use error::RunError;
pub use job::file::{JobFileError, parse as parse_jobs};
pub use job::options::{OptionError, engine_word, known as known_options};
pub use job::units::{bytes as parse_bytes, cpus as parse_cpus, short as short_bytes, time as parse_time};
pub use job::{Job, JobError, Limits, MAX_DEPTH, MAX_JOBS, Mix, Order, Pattern, Rate, Span};
pub use measured::cpu::{CpuTime, ProcessTime};
pub use measured::latency::{Latency, Spread};
pub use measured::{DirectionMeasured, Measured, QueueCounts, Sample};
pub use report::json::report;
pub use report::text::text;
pub use run::offsets::Direction;
pub use run::outcome::{Outcome, Progress, Quiet, Watch};
pub use run::run;
pub use run::verify::Mismatch;
pub use run::worker::Failure;
pub use target::{Client, LockKind, PATIENCE, Target, TargetError};
