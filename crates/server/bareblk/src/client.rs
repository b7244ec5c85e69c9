//! The client's end of the control protocol, for `bareblk-monitor`.

pub use blk_server::{LimitKind, format_cpus};

pub use crate::control::answers::reports::{DiskStats, Queue, StatsAnswer, Worker, WorkerStats};
pub use crate::control::protocol::answer::ErrorKind;
pub use crate::ctl::connection::{Connection, Reply};
pub use crate::ctl::rates::{DiskRates, WorkerRates, of_disk, of_queue, of_worker};
pub use crate::ctl::tables::{plain, table};
