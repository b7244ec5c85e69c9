//! Raises the limit of open files, and computes how many the disks may need.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tracing::{debug, warn};

use crate::config::configuration::Configuration;

/// Number of descriptors of the process itself: standard streams, the log, signals, the control socket and the monitor
/// socket with their clients, and reads of /proc.
const PROCESS: u64 = 80;
/// Number of descriptors of a worker: its wakeup fd, and an engine's ring, eventfds and epolls.
const PER_WORKER: u64 = 16;
/// Number of descriptors of a disk: the listening socket and the image.
const PER_DISK: u64 = 2;
/// Number of descriptors of a qcow2 disk besides: its longest chain, without data files.
const PER_CHAIN: u64 = 15;
/// Number of descriptors of a session: its socket and its wakeup fds.
const PER_SESSION: u64 = 3;
/// Number of descriptors that a front-end passes: its log for migration, its channel, and the memory regions of a
/// typical guest.
const PASSED: u64 = 10;
/// Number of descriptors of a queue: kick, call and err.
const PER_QUEUE: u64 = 3;

/// Raises the soft limit, usually 1024, to the hard limit. Returns the limit that applies now.
pub fn raise_limit() -> Option<u64> {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, ..limit };
    match setrlimit(Resource::Nofile, raised) {
        Ok(()) => limit.maximum,
        Err(error) => {
            debug!("cannot raise the limit of open files, so it stays at {:?}: {error}", limit.current);
            limit.current
        }
    }
}

/// Warns at the start, so that the operator does not learn it from a guest that cannot connect. `limit`: `None` is no
/// limit.
pub fn warn_if_short(limit: Option<u64>, needed: u64) {
    if let Some(limit) = limit.filter(|limit| *limit < needed) {
        warn!(
            "the disks may need {needed} open files if guests use all queues, but only {limit} are allowed: \
             raise the hard limit (ulimit -Hn, LimitNOFILE=), or offer fewer queues"
        );
    }
}

/// Descriptors needed if each disk has one front-end that uses all its queues. Front-ends get three quarters of the
/// limit (`guest_mem`'s `Limits`).
pub fn needed(configuration: &Configuration) -> u64 {
    let workers = configuration.server.workers.len() as u64;
    let queues = || configuration.disks.iter().map(|disk| u64::from(disk.options.queues));
    // Each worker that serves an image opens it once more; at most one worker per queue does.
    let own: u64 = queues().map(|queues| PER_DISK + workers.min(queues) + PER_SESSION).sum();
    // Each worker has two memory files for tables and clusters of a qcow2 disk, and a pair of sockets if the disk is
    // writable, instead of an image that is opened again.
    let chains = configuration.disks.iter().filter(|disk| disk.options.is_qcow2());
    let own = own + chains.map(|disk| PER_CHAIN + 3 * workers.min(disk.options.queues.into())).sum::<u64>();
    let passed: u64 = queues().map(|queues| PASSED + PER_QUEUE * queues).sum();
    (PROCESS + PER_WORKER * workers + own + passed).max((passed * 4).div_ceil(3))
}
