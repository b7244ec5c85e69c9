//! How many files the process may have open, and how many its disks may come to need.
//!
//! Not here: who opens them.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tracing::{debug, warn};

use crate::config::configuration::Configuration;

/// Standard streams, the log, signals, the control socket and its clients, and room for a look into /proc.
const PROCESS: u64 = 64;
/// A worker's doorbell, and an engine's ring, its eventfds and epolls.
const PER_WORKER: u64 = 16;
/// The listening socket, and the image.
const PER_DISK: u64 = 2;
/// A session's socket and doorbells.
const PER_SESSION: u64 = 3;
/// What a front-end passes: its log for migration, its channel, and the regions of a usual guest's memory.
const PASSED: u64 = 10;
/// A queue's kick, call and err.
const PER_QUEUE: u64 = 3;

/// Raises the soft limit to the hard one; the usual soft limit is 1024. Returns what is possible now.
pub fn raise_limit() -> Option<u64> {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, ..limit };
    match setrlimit(Resource::Nofile, raised) {
        Ok(()) => limit.maximum,
        Err(error) => {
            debug!("the limit of open files stays at {:?}: {error}", limit.current);
            limit.current
        }
    }
}

/// Told at the start, not when the last guest cannot connect. `limit`: `None` is no limit.
pub fn warn_if_short(limit: Option<u64>, needed: u64) {
    if let Some(limit) = limit.filter(|limit| *limit < needed) {
        warn!(
            "the disks may need {needed} open files once every guest uses every queue, and {limit} are allowed: \
             raise the hard limit (ulimit -Hn, LimitNOFILE=), or offer fewer queues"
        );
    }
}

/// With one front-end at each disk that uses all its queues. Front-ends get three quarters of the limit (`guest_mem`'s `Limits`).
pub fn needed(configuration: &Configuration) -> u64 {
    let workers = configuration.server.workers.len() as u64;
    let queues = || configuration.disks.iter().map(|disk| u64::from(disk.options.queues));
    // An image has a file description in each worker that serves it, and not in more than it has queues.
    let own: u64 = queues().map(|queues| PER_DISK + workers.min(queues) + PER_SESSION).sum();
    let passed: u64 = queues().map(|queues| PASSED + PER_QUEUE * queues).sum();
    (PROCESS + PER_WORKER * workers + own + passed).max((passed * 4).div_ceil(3))
}
