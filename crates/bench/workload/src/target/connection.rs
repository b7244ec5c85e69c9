//! A back-end as a target: connects, assigns queues to threads, reports events of the session.
//!
//! - One queue per job if the device has that many; otherwise jobs share queues: job j uses queue j modulo n.
//! - A ring is large enough for the requests in flight without indirect descriptors: three descriptors each.

use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use blk_driver::{Device, Event, KickPolicy, Options, PoolOptions, Queue, Reconnect, SharedQueue};
use disk_image::SECTOR_BYTES;

use super::port::{Port, PortError};
use super::queue::{Blocks, QueuePort};
use super::shared::{AnyShared, Ring, SharedPort};
use super::{Client, LockKind};
use crate::error::RunError;
use crate::job::{Job, Limits};
use crate::measured::QueueCounts;

/// Largest ring (virtio 1.3 §2.7 allows more; no back-end offers more).
const MAX_QUEUE_SIZE: u32 = 1024;
/// Smallest ring that the client requests; a smaller one would save nothing.
const MIN_QUEUE_SIZE: u32 = 64;
/// Header, data and status; without indirect descriptors each needs its own descriptor.
const DESCRIPTORS: u32 = 3;

/// A session, and the threads' access to its queues.
pub(crate) struct Connection {
    device: Device,
    ways: Ways,
    /// Whether to wait for a back-end that disconnected.
    waits: bool,
}

enum Ways {
    /// One queue per thread; each thread takes its queue out of this list.
    Own(Vec<Queue>),
    Shared(Vec<Arc<Ring>>),
}

impl Connection {
    pub fn open(socket: &Path, job: &Job, client: &Client) -> Result<Self, RunError> {
        check_socket(socket)?;
        let jobs = u16::try_from(job.jobs).unwrap_or(u16::MAX);
        let queues = match client.queues {
            Some(queues) if u32::from(queues) > job.jobs => {
                return Err(RunError::IdleQueues { queues, jobs: job.jobs });
            }
            Some(queues) => queues,
            None if jobs == 1 => 1,
            None => offered(socket, job, client)?.min(jobs),
        };
        let (device, queues) = connect(socket, &options(socket, job, client, queues)?)?;
        let shares = u32::from(jobs).div_ceil(u32::try_from(queues.len()).unwrap_or(1).max(1));
        let ways = if shares == 1 && !client.wants_lock() {
            check_room(&queues, job)?;
            Ways::Own(queues)
        } else {
            Ways::Shared(queues.into_iter().map(|queue| Arc::new(ring(queue, client, jobs))).collect())
        };
        Ok(Self { device, ways, waits: client.reconnect.is_some() })
    }

    pub fn limits(&self) -> Limits {
        let info = self.device.info();
        Limits {
            size_bytes: info.capacity_sectors.saturating_mul(SECTOR_BYTES),
            block_bytes: info.block_size_bytes,
            read_only: info.read_only,
            flush: info.flush,
        }
    }

    /// The port of thread `clone`. For a queue that is not shared, may be called only once.
    pub fn port(&mut self, job: &Job, clone: u32) -> Result<Box<dyn Port + Send>, PortError> {
        let blocks = Blocks::take(self.device.pool(), job.block_bytes, job.depth)?;
        match &mut self.ways {
            Ways::Own(queues) => {
                let queue =
                    queues.pop().ok_or_else(|| PortError("no queue is left for this thread".to_owned()))?;
                Ok(Box::new(QueuePort::new(queue, blocks)))
            }
            Ways::Shared(rings) => {
                let ring = rings.get(clone as usize % rings.len().max(1));
                let ring = ring.ok_or_else(|| PortError("there is no queue for this thread".to_owned()))?;
                Ok(Box::new(SharedPort::new(Arc::clone(ring), clone as usize, blocks)))
            }
        }
    }

    /// Counts of shared queues; other queues are counted by their threads.
    pub fn counts(&self) -> QueueCounts {
        let mut sum = QueueCounts::default();
        if let Ways::Shared(rings) = &self.ways {
            rings.iter().for_each(|ring| sum.merge(&ring.counts()));
        }
        sum
    }

    pub fn peer_pid(&self) -> Option<i32> {
        self.device.peer_pid()
    }

    /// Events since the last call, as text for the user.
    pub fn news(&self) -> Option<String> {
        self.device.next_event(Duration::ZERO).map(|event| describe(&event, self.waits))
    }
}

fn describe(event: &Event, waits: bool) -> String {
    match event {
        Event::ConfigChanged(info) => {
            format!(
                "the device's configuration changed: it now has {} bytes",
                info.capacity_sectors.saturating_mul(SECTOR_BYTES)
            )
        }
        Event::Disconnected => "the back-end disconnected".to_owned(),
        Event::Reconnected(report) if report.kept_rings => format!(
            "the back-end is back after {:.3} s ({} attempts) and continues from its in-flight log",
            report.away.as_secs_f64(),
            report.attempts
        ),
        Event::Reconnected(report) => format!(
            "the back-end is back after {:.3} s ({} attempts): {} requests sent again, {} found completed",
            report.away.as_secs_f64(),
            report.attempts,
            report.resubmitted,
            report.completed
        ),
        Event::GaveUp { .. } if !waits => {
            "the run does not wait for the back-end: use --reconnect TIME to wait".to_owned()
        }
        Event::GaveUp { reason } => format!("the back-end did not return in time: {reason}"),
    }
}

/// Reports errors that `connect` would report less clearly.
fn check_socket(socket: &Path) -> Result<(), RunError> {
    let path = || socket.to_path_buf();
    match std::fs::metadata(socket) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            Err(RunError::NoSocket { path: path() })
        }
        Err(source) => Err(RunError::Socket { path: path(), source }),
        Ok(found) if !found.file_type().is_socket() => Err(RunError::NotASocket { path: path() }),
        Ok(_) => Ok(()),
    }
}

fn connect(socket: &Path, options: &Options) -> Result<(Device, Vec<Queue>), RunError> {
    let path = || socket.to_path_buf();
    Device::connect(options).map_err(|source| {
        if is_refused(&source) {
            RunError::Refused { path: path() }
        } else {
            RunError::Connect { path: path(), source }
        }
    })
}

/// Whether one of the causes is "connection refused".
fn is_refused(error: &(dyn std::error::Error + 'static)) -> bool {
    let refused = error
        .downcast_ref::<std::io::Error>()
        .is_some_and(|error| error.kind() == std::io::ErrorKind::ConnectionRefused);
    refused || error.source().is_some_and(is_refused)
}

/// Number of queues of the device, determined in a separate session.
fn offered(socket: &Path, job: &Job, client: &Client) -> Result<u16, RunError> {
    let (device, _) = connect(socket, &options(socket, job, client, 1)?)?;
    Ok(device.info().num_queues.max(1))
}

fn options(socket: &Path, job: &Job, client: &Client, queues: u16) -> Result<Options, RunError> {
    let blocks_bytes = Blocks::needed_bytes(job.block_bytes, job.depth);
    Ok(Options {
        queues,
        queue_size: queue_size(job, client, queues)?,
        packed: client.packed,
        pool: PoolOptions { size_bytes: blocks_bytes.saturating_mul(job.jobs.into()), huge_pages: false },
        reconnect: client.reconnect.map_or(Reconnect::Never, Reconnect::For),
        in_flight_log: client.in_flight_log,
        ..Options::new(socket)
    })
}

fn queue_size(job: &Job, client: &Client, queues: u16) -> Result<u16, RunError> {
    let shared = u32::from(queues.max(1)) < job.jobs || client.wants_lock();
    // The depth already includes the flush that may be in flight besides the transfers.
    let descriptors = job.depth.saturating_mul(DESCRIPTORS);
    let wanted = if shared { MAX_QUEUE_SIZE } else { descriptors.next_power_of_two() };
    let size = client.queue_size.map_or(wanted.clamp(MIN_QUEUE_SIZE, MAX_QUEUE_SIZE), u32::from);
    if !shared && job.depth > size {
        return Err(RunError::Depth { depth: job.depth, most: size, queue_size: size });
    }
    u16::try_from(size).map_err(|_| RunError::Depth {
        depth: job.depth,
        most: MAX_QUEUE_SIZE,
        queue_size: size,
    })
}

/// Without indirect descriptors a ring holds fewer requests than it has descriptors.
fn check_room(queues: &[Queue], job: &Job) -> Result<(), RunError> {
    let Some(queue) = queues.first() else { return Ok(()) };
    let most = u32::try_from(queue.room(1)).unwrap_or(u32::MAX);
    if job.depth > most {
        return Err(RunError::Depth { depth: job.depth, most, queue_size: queue.queue_size().into() });
    }
    Ok(())
}

fn ring(queue: Queue, client: &Client, jobs: u16) -> Ring {
    let policy = match client.kick_locked {
        Some(true) => KickPolicy::Locked,
        _ => KickPolicy::Unlocked,
    };
    let shared: Box<dyn AnyShared> = match client.lock.unwrap_or(LockKind::Std) {
        LockKind::Ticket => Box::new(SharedQueue::<qspinlock::TicketLock>::new(queue, policy)),
        LockKind::Std => Box::new(SharedQueue::<qspinlock::StdMutex>::new(queue, policy)),
        LockKind::ParkingLot => Box::new(SharedQueue::<parking_lot::RawMutex>::new(queue, policy)),
    };
    Ring::new(shared, jobs.into())
}
