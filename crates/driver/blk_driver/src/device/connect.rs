//! Connects to a socket and starts the device's queues: the order of the messages.
//!
//! `connect → features → protocol features → owner → queues, slots, channel, configuration → features accepted
//!  → memory → in-flight log → each queue: num, base, addr, call, err, kick, enable`
//!
//! - The first connection chooses features; later connections must match that choice (`Terms`).
//! - Back-ends start a queue at its kick descriptor or when it is enabled, so enabling comes last, after
//!   everything that the queue needs.
//! - The in-flight log comes before all rings, because a back-end reads it when it starts them.
//!
//! Spec: vhost-user, "Starting and stopping rings".

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Instant;

use guest_mem::{GuestMemory, Region};
use vhost::vhost_user::message::VhostUserProtocolFeatures as Protocol;
use virtio_blk::DeviceConfig;

use super::channel::Channel;
use super::front_end::{FrontEnd, MAX_TABLE_REGIONS};
use super::info::DeviceInfo;
use super::log::{Log, Wanted};
use super::negotiate::{CONFIG_SIZES, accept, accept_protocol, check_not_smaller, check_same, device_info};
use super::options::Options;
use super::wire::Wire;

use crate::error::{ConnectError, MemoryError, MessageError};
use crate::kick::EventFd;
use crate::queue::link::RingPlace;

/// The requirements on a connection.
#[derive(Clone, Copy, Debug)]
pub(super) enum Terms<'a> {
    /// The connection must meet the options.
    Fresh,
    /// The connection must meet the options, and the device must be the same as before.
    AsBefore(&'a DeviceInfo),
}

/// A back-end with the agreed features.
#[derive(Debug)]
pub(super) struct Session {
    front_end: FrontEnd,
    /// `None` without BACKEND_REQ, or after the channel failed.
    pub(super) channel: Option<Channel>,
    pub(super) info: DeviceInfo,
    /// The number of queues, from GET_QUEUE_NUM.
    counted_queues: Option<u64>,
    queue_size: u16,
    /// How many regions the back-end accepts at once.
    max_regions: usize,
    /// The regions that were announced to the back-end.
    shared: Vec<Arc<Region>>,
    /// Indices of the running queues.
    started: Vec<u16>,
}

impl Session {
    /// Connects and negotiates. No memory is shared yet, and no queue runs.
    pub(super) fn open(
        options: &Options,
        terms: Terms<'_>,
        not_after: Option<Instant>,
        stop: &Arc<EventFd>,
    ) -> Result<Self, ConnectError> {
        let wire = Wire::connect(&options.socket, options.timeout, not_after, Arc::clone(stop))
            .map_err(|source| ConnectError::Socket { path: options.socket.clone(), source })?;
        let mut front_end = FrontEnd::new(wire);
        let offered = front_end.features()?;
        let accepted = match terms {
            Terms::Fresh => accept(offered, options)?,
            Terms::AsBefore(before) => check_same(offered, before)?,
        };
        let protocol = accept_protocol(front_end.protocol_features()?, options)?;
        front_end.set_protocol_features(protocol)?;
        front_end.set_owner()?;
        let counted_queues = protocol.contains(Protocol::MQ).then(|| front_end.queue_num()).transpose()?;
        let max_regions = max_regions(&front_end)?;
        let channel = channel(&front_end)?;
        let info = read_info(&front_end, counted_queues, options.queue_size, accepted, protocol)?;
        match terms {
            Terms::Fresh if options.queues > info.num_queues => {
                let (wanted, available) = (options.queues, info.num_queues);
                return Err(ConnectError::Queues { wanted, available });
            }
            Terms::Fresh => {}
            Terms::AsBefore(before) => check_not_smaller(&info, before, options.queues)?,
        }
        front_end.set_features(accepted)?;
        let (shared, started) = (Vec::new(), Vec::new());
        let queue_size = options.queue_size;
        Ok(Self { front_end, channel, info, counted_queues, queue_size, max_regions, shared, started })
    }

    /// The socket, to poll for the connection's end and to get the peer's credentials.
    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.front_end.wire().socket()
    }

    /// Announces all regions of `memory` to the back-end.
    pub(super) fn share(&mut self, memory: &GuestMemory) -> Result<(), ConnectError> {
        self.check_regions(memory.regions().len())?;
        if self.front_end.has(Protocol::CONFIGURE_MEM_SLOTS) {
            memory.regions().iter().try_for_each(|region| self.front_end.add_region(region))?;
        } else {
            self.set_table(memory.regions())?;
        }
        self.shared = memory.regions().to_vec();
        Ok(())
    }

    /// Adds one region while queues run. After an error, the back-end has the same regions as before.
    pub(super) fn add_region(&mut self, region: &Arc<Region>) -> Result<(), MemoryError> {
        self.check_regions(self.shared.len() + 1)?;
        if self.front_end.has(Protocol::CONFIGURE_MEM_SLOTS) {
            self.front_end.add_region(region).map_err(MemoryError::Message)?;
        } else {
            let all: Vec<_> = self.shared.iter().cloned().chain([Arc::clone(region)]).collect();
            self.set_table(&all).map_err(MemoryError::Message)?;
        }
        self.front_end.barrier().map_err(MemoryError::Message)?;
        self.shared.push(Arc::clone(region));
        Ok(())
    }

    /// Removes one region while queues run.
    pub(super) fn remove_region(&mut self, region: &Arc<Region>) -> Result<(), MessageError> {
        self.shared.retain(|other| !Arc::ptr_eq(other, region));
        if self.front_end.has(Protocol::CONFIGURE_MEM_SLOTS) {
            self.front_end.remove_region(region)?;
        } else {
            self.set_table(&self.shared)?;
        }
        self.front_end.barrier()
    }

    fn set_table(&self, regions: &[Arc<Region>]) -> Result<(), MessageError> {
        let regions: Vec<&Region> = regions.iter().map(|region| &**region).collect();
        self.front_end.set_mem_table(&regions)
    }

    fn check_regions(&self, count: usize) -> Result<(), MemoryError> {
        let max = self.max_regions;
        if count > max { Err(MemoryError::TooManyRegions { count, max }) } else { Ok(()) }
    }

    /// Whether the back-end accepts a log.
    pub(super) fn takes_log(&self) -> bool {
        self.front_end.has(Protocol::INFLIGHT_SHMFD)
    }

    /// Gets a new log for `queues` new rings from the back-end, if it offers one, and passes the log back to it.
    pub(super) fn new_log(&self, queues: u16) -> Result<Option<Log>, ConnectError> {
        if !self.takes_log() {
            return Ok(None);
        }
        let wanted = Wanted { queues, queue_size: self.queue_size };
        let (answer, fd) = self.front_end.inflight_fd(wanted)?;
        let log = wanted.log(answer, fd)?;
        log.as_ref().map(|log| self.give_log(log)).transpose()?;
        Ok(log)
    }

    /// Passes to the back-end the log of the rings that will be started next.
    pub(super) fn give_log(&self, log: &Log) -> Result<(), MessageError> {
        self.front_end.set_inflight_fd(log)
    }

    /// Waits until the back-end has processed every message.
    pub(super) fn barrier(&self) -> Result<(), MessageError> {
        self.front_end.barrier()
    }

    /// Starts queue `queue` in memory that was shared before.
    pub(super) fn start(
        &mut self,
        queue: u16,
        place: &RingPlace,
        call: &EventFd,
        kick: &EventFd,
        err: &EventFd,
    ) -> Result<(), MessageError> {
        let RingPlace { layout, base } = place;
        self.front_end.set_vring_num(queue, layout.queue_size)?;
        self.front_end.set_vring_base(queue, *base)?;
        self.front_end.set_vring_addr(queue, layout)?;
        self.front_end.set_vring_call(queue, call.as_fd())?;
        self.front_end.set_vring_err(queue, err.as_fd())?;
        self.front_end.set_vring_kick(queue, kick.as_fd())?;
        self.front_end.set_vring_enable(queue, true)?;
        self.started.push(queue);
        Ok(())
    }

    /// Reads the current configuration.
    pub(super) fn read_info(&self) -> Result<DeviceInfo, ConnectError> {
        let protocol = Protocol::from_bits_truncate(self.info.protocol_features);
        read_info(&self.front_end, self.counted_queues, self.queue_size, self.info.features, protocol)
    }

    /// Marks the connection as established: from now on only each message's own limit applies.
    pub(super) fn settle(&mut self) {
        self.front_end.wire_mut().settle();
    }

    /// Makes the back-end release one queue's ring and buffers.
    pub(super) fn stop_queue(&mut self, queue: u16) -> Result<(), MessageError> {
        let count = self.started.len();
        self.started.retain(|&other| other != queue);
        if self.started.len() == count { Ok(()) } else { self.front_end.vring_base(queue).map(drop) }
    }

    /// Makes the back-end release all memory; takes at most the time limit of one message.
    pub(super) fn close(mut self) -> Result<(), MessageError> {
        self.front_end.wire_mut().hurry();
        self.started.iter().try_for_each(|&queue| self.front_end.vring_base(queue).map(drop))?;
        if self.front_end.has(Protocol::RESET_DEVICE) { self.front_end.reset_device() } else { Ok(()) }
    }
}

fn max_regions(front_end: &FrontEnd) -> Result<usize, ConnectError> {
    if !front_end.has(Protocol::CONFIGURE_MEM_SLOTS) {
        return Ok(MAX_TABLE_REGIONS);
    }
    let slots = front_end.max_mem_slots()?;
    if slots == 0 {
        return Err(ConnectError::Config { field: "memory slots (GET_MAX_MEM_SLOTS)", value: 0 });
    }
    Ok(usize::try_from(slots).unwrap_or(usize::MAX).min(guest_mem::MAX_REGIONS))
}

fn channel(front_end: &FrontEnd) -> Result<Option<Channel>, ConnectError> {
    if !front_end.has(Protocol::BACKEND_REQ) {
        return Ok(None);
    }
    let (ours, theirs) = Channel::pair().map_err(ConnectError::Resources)?;
    front_end.set_backend_channel(&theirs)?;
    Ok(Some(ours))
}

fn read_info(
    front_end: &FrontEnd,
    counted_queues: Option<u64>,
    queue_size: u16,
    accepted: u64,
    protocol: Protocol,
) -> Result<DeviceInfo, ConnectError> {
    for size_bytes in CONFIG_SIZES {
        if let Some(bytes) = front_end.config(size_bytes)? {
            let config = DeviceConfig::from_bytes(&bytes);
            return device_info(&config, counted_queues, queue_size, accepted, protocol);
        }
    }
    Err(ConnectError::NoConfig { asked_bytes: CONFIG_SIZES })
}
