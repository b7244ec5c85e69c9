//! A connected device: features, configuration, memory, queues, and what happens to it later.
//!
//! `Options → connect (negotiate, share memory, start queues) → Device + Queues;  thread → events, reconnect`
//!
//! - One thread per device, asleep but for what is not about requests: the end of the connection, a changed
//!   configuration, memory that comes and goes. Queues never wait for it.
//! - After [`Device`] is dropped nothing of the back-end's is waited for, and every queue ends.
//!
//! Spec: vhost-user. Not here: the queues themselves (`queue.rs`).

mod options;

mod error;

mod connect;

mod negotiate;

mod front_end;

mod wire;

mod thread;

mod channel;

mod events;

mod log;

mod reconnect;

pub use error::ConnectError;
pub use options::{Options, Reconnect};
pub use wire::MessageError;

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::mpsc::{Sender, SyncSender, channel, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use guest_mem::Address;
use virtio_blk::features;
use virtqueue::RingFeatures;

use connect::{Session, Terms};
use reconnect::Kept;
use thread::{Command, Shared, Thread};

use crate::fill::{Limits, SegmentLimits};
use crate::kick::{Doorbell, EventFd};
use crate::memory::{MemoryError, MemoryMap, Pool, UserMemory};
use crate::queue::{Queue, QueueParts, area_bytes};

/// What the device says about itself (virtio 1.3 §5.2.4). Units as named.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Of 512 bytes.
    pub capacity_sectors: u64,
    /// Logical block.
    pub block_size_bytes: u32,
    /// Queues that can be used of those it has.
    pub num_queues: u16,
    /// Buffers per request.
    pub max_segments: u32,
    /// Accepts no writes.
    pub read_only: bool,
    /// Has a cache to flush.
    pub flush: bool,
    /// 0: no discard.
    pub max_discard_segments: u32,
    /// Per segment.
    pub max_discard_sectors: u32,
    /// 0: no write zeroes.
    pub max_write_zeroes_segments: u32,
    /// Per segment.
    pub max_write_zeroes_sectors: u32,
    /// Virtio features both sides agreed on.
    pub features: u64,
    /// vhost-user protocol features both sides agreed on.
    pub protocol_features: u64,
}

/// Something that happened outside the queues.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The configuration changed (a resize, say): the new one.
    ConfigChanged(DeviceInfo),
    /// The back-end went away.
    Disconnected,
    /// It is back, and this is what was done.
    Reconnected(ReconnectReport),
    /// It did not come back in time, not as it was, or was not waited for. The last event there is.
    GaveUp {
        /// What was wrong with the last attempt, with its causes.
        reason: String,
    },
}

/// What a reconnect did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReconnectReport {
    /// How often it was tried.
    pub attempts: u32,
    /// How long the device was away.
    pub away: Duration,
    /// Requests that were sent again. None if `kept_rings`.
    pub resubmitted: u64,
    /// Requests found completed in the old ring. None if `kept_rings`.
    pub completed: u64,
    /// Queues whose owners had not called a second after the device was back: their requests are not in the two
    /// counts, and are sent again when they call.
    pub owners_waited_for: u16,
    /// The queues go on with the rings that they had: what the back-end had begun is in its in-flight log, and is done again
    /// by its successor.
    pub kept_rings: bool,
}

/// A session with a back-end. Dropping it stops the queues: what is in flight ends with `Lost`.
///
/// Before, the back-end is asked to let go of all buffers. Ours finishes what it has begun and does; one that hangs, or
/// answers too early as qemu-storage-daemon does (7.2, 10.0), may still store into the buffers of reads. Who wants them
/// again takes all completions first.
#[derive(Debug)]
pub struct Device {
    pool: Pool,
    shared: Arc<Shared>,
    commands: Sender<Command>,
    /// `None` only inside `drop`.
    thread: Option<JoinHandle<()>>,
}

impl Device {
    /// Connects, negotiates, shares memory and starts the queues, which the caller may move to other threads.
    ///
    /// # Errors
    /// [`ConnectError`].
    pub fn connect(options: &Options) -> Result<(Self, Vec<Queue>), ConnectError> {
        options.check()?;
        let resources = ConnectError::Resources;
        let stop = Arc::new(EventFd::new().map_err(resources)?);
        let mut session = Session::open(options, Terms::Fresh, None, &stop)?;
        let shared = Arc::new(Shared::new(stop, &session).map_err(resources)?);
        let (map, err) = (MemoryMap::new(), EventFd::new().map_err(resources)?);
        let limits = limits(&session.info);
        let queue_bytes = area_bytes(options.queue_size, limits.max_segments);
        // One region for all queues: a back-end may take as few as eight.
        let region = map.add_private(queue_bytes * u64::from(options.queues))?;
        let pool = map.add_pool(options.pool)?;
        session.share(&map.memory())?;
        let log = session.new_log(options.queues)?;
        let (mut queues, mut bells) = (Vec::new(), Vec::new());
        for index in 0..options.queues {
            let bell = Arc::new(EventFd::new().map_err(resources)?);
            let queue = Queue::new(QueueParts {
                index,
                queue_size: options.queue_size,
                features: ring_features(session.info.features),
                limits,
                region: Arc::clone(&region),
                area: region.spec().guest_addr.unchecked_add(queue_bytes * u64::from(index)),
                map: Arc::clone(&map),
                pool: pool.clone(),
                bell: Arc::clone(&bell) as Arc<dyn Doorbell>,
                notice: Some(Arc::clone(&shared.notice) as Arc<dyn Doorbell>),
            })?;
            session.start(index, &queue.link().place(), queue.link().call(), &bell, &err)?;
            queues.push(queue);
            bells.push(bell);
        }
        session.settle();
        let links = queues.iter().map(|queue| Arc::clone(queue.link())).collect();
        let (commands, received) = channel();
        let options = options.clone();
        let thread = Thread { options, shared: Arc::clone(&shared), map, links, commands: received, err };
        let builder = std::thread::Builder::new().name("bareblk-driver".into());
        let kept = Kept::new(log, bells);
        let thread = Some(builder.spawn(move || thread.run(session, kept)).map_err(resources)?);
        Ok((Self { pool, shared, commands, thread }, queues))
    }

    /// As last read.
    #[must_use]
    pub fn info(&self) -> DeviceInfo {
        self.shared.info()
    }

    /// The pool that was asked for.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Lets requests use memory of the user's own, from the moment that this returns. While the back-end is away, the
    /// next one is told of it.
    ///
    /// # Errors
    /// [`MemoryError`].
    pub fn register(&self, memory: UserMemory) -> Result<(), MemoryError> {
        self.command(|answer| Command::Register(memory, answer))
    }

    /// Takes it back. No request may be in flight that uses it; later ones are refused. When this returns, the
    /// back-end has let go of it, or is gone.
    ///
    /// # Errors
    /// [`MemoryError`].
    pub fn unregister(&self, addr: u64) -> Result<(), MemoryError> {
        self.command(|answer| Command::Unregister(addr, answer))
    }

    fn command(
        &self,
        command: impl FnOnce(SyncSender<Result<(), MemoryError>>) -> Command,
    ) -> Result<(), MemoryError> {
        let (answer, answered) = sync_channel(1);
        self.commands.send(command(answer)).map_err(|_| MemoryError::Disconnected)?;
        self.shared.notice.ring();
        answered.recv().map_err(|_| MemoryError::Disconnected)?
    }

    /// The next event, waiting up to `limit`.
    pub fn next_event(&self, limit: Duration) -> Option<Event> {
        self.shared.events.next(limit)
    }

    /// Readable while there are events: to poll together with other things.
    #[must_use]
    pub fn event_fd(&self) -> BorrowedFd<'_> {
        self.shared.events.fd()
    }

    /// Process of the back-end, from the socket's credentials (`SO_PEERCRED`: who made it listen); `None` if it has no
    /// number here, as from another container.
    #[must_use]
    pub fn peer_pid(&self) -> Option<i32> {
        self.shared.peer_pid()
    }
}

/// What requests are checked against.
fn limits(info: &DeviceInfo) -> Limits {
    Limits {
        max_segments: u16::try_from(info.max_segments).unwrap_or(u16::MAX),
        flush: info.flush,
        read_only: info.read_only,
        discard: SegmentLimits { segments: info.max_discard_segments, sectors: info.max_discard_sectors },
        write_zeroes: SegmentLimits {
            segments: info.max_write_zeroes_segments,
            sectors: info.max_write_zeroes_sectors,
        },
    }
}

fn ring_features(accepted: u64) -> RingFeatures {
    let has = |bit: u64| accepted & bit != 0;
    RingFeatures {
        event_idx: has(features::EVENT_IDX),
        indirect: has(features::INDIRECT_DESC),
        packed: has(features::RING_PACKED),
    }
}

impl Drop for Device {
    /// Waits until the back-end has let go of all buffers, at most for the limit of one message, and before that for
    /// the message that is under way.
    fn drop(&mut self) {
        self.shared.stop.ring();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
