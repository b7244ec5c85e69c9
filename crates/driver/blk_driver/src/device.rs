//! A connected device: features, configuration, memory, queues and events.
//!
//! `Options → connect (negotiate, share memory, start queues) → Device + Queues;  thread → events, reconnect`
//!
//! - Each device has one thread for work outside of requests: a lost connection, a changed configuration, registered
//!   and unregistered memory. Queues never wait for it.
//! - Once [`Device`] has been dropped, the driver no longer waits for the back-end, and every queue ends.
//!
//! Spec: vhost-user.

mod options;

mod info;

mod connect;

mod negotiate;

mod front_end;

mod wire;

mod state;

mod thread;

mod channel;

mod events;

mod log;

mod reconnect;

pub use info::{DeviceInfo, Event, ReconnectReport};
pub use options::{Options, Reconnect};

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
use state::{Command, Shared, Thread};

use crate::error::{ConnectError, MemoryError};
use crate::kick::{Doorbell, EventFd};
use crate::memory::{MemoryMap, Pool, UserMemory};
use crate::queue::area::area_bytes;
use crate::queue::fill::{Limits, SegmentLimits};
use crate::queue::{Queue, QueueParts};

/// A session with a back-end. Dropping it stops the queues: requests in flight end with `Lost`. Before the queues stop,
/// `drop` makes the back-end release all buffers. bareblk's server finishes the requests that it has started and then
/// releases the buffers. A back-end that hangs, or that answers too early as qemu-storage-daemon does (7.2, 10.0), may
/// still store into the buffers of reads. A program that wants to reuse those buffers must take all completions first.
#[derive(Debug)]
pub struct Device {
    pool: Pool,
    shared: Arc<Shared>,
    commands: Sender<Command>,
    /// `None` only inside `drop`.
    thread: Option<JoinHandle<()>>,
}

impl Device {
    /// Connects, negotiates, shares memory and starts the queues. The caller may move the queues to other
    /// threads.
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
        // One region for all queues, because a back-end may accept as few as eight regions.
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

    /// The most recently read configuration.
    #[must_use]
    pub fn info(&self) -> DeviceInfo {
        self.shared.info()
    }

    /// The pool that the options requested.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Lets requests use the user's own memory once this returns. If no back-end is connected, the next one gets the
    /// memory when it connects.
    ///
    /// # Errors
    /// [`MemoryError`].
    pub fn register(&self, memory: UserMemory) -> Result<(), MemoryError> {
        self.command(|answer| Command::Register(memory, answer))
    }

    /// Withdraws registered memory. No request that uses it may be in flight; later ones are refused. When this
    /// returns, the back-end has released the memory or disconnected.
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

    /// Returns the next event, or `None` if there is none within `limit`.
    pub fn next_event(&self, limit: Duration) -> Option<Event> {
        self.shared.events.next(limit)
    }

    /// A descriptor that is readable while there are events, to be polled together with others.
    #[must_use]
    pub fn event_fd(&self) -> BorrowedFd<'_> {
        self.shared.events.fd()
    }

    /// The back-end's process id, from the socket's credentials (`SO_PEERCRED`: the process that made it listen).
    /// `None` if that process has no id in this PID namespace, for example because it runs in another container.
    #[must_use]
    pub fn peer_pid(&self) -> Option<i32> {
        self.shared.peer_pid()
    }
}

/// The limits that requests are checked against.
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
    /// Waits until the back-end has released all buffers. Besides the message in progress, this takes at most the time
    /// limit of one message.
    fn drop(&mut self) {
        self.shared.stop.ring();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
