//! The client's end of the control protocol, for `bareblk-monitor`.

pub use crate::control::protocol::{Answer, ErrorKind, Fault, Verb};
pub use crate::control::reports::{Disk, DiskStats, Queue, StatsAnswer, Worker, WorkerStats};
pub use crate::ctl::connection::{Connection, Reply};
pub use crate::ctl::tables::rates as rates_table;
