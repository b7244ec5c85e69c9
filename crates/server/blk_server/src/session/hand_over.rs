//! Hands a session over to another process, unnoticed by front-end and guest: freezes it in the old process and
//! rebuilds it in the new one.
//!
//! `order → (between two messages) queues drained and removed from their workers → SessionState → verdict:
//! theirs (this process never accesses it again) or, after any error, back to the workers`
//! `SessionState → checked, mapped, no ring started → go → rings started, calls signalled → the next message`
//!
//! - A frozen session holds its queues itself: no worker reads a ring, and the guest's kicks wait in their eventfds.
//! - Submitted requests complete first. Parked requests, and requests that still have to be repeated, stay in the
//!   in-flight log. A session that has parked requests and no log is not handed over.
//! - A half-received message and the dirty log of a live migration are handed over too, so that no front-end can keep
//!   its session in the old process (docs/decisions/0045).
//! - The lease of the disk's rings is handed over. In the new process, a session without the lease starts no ring
//!   before its front-end's next message.
//! - The new process checks the state as if a front-end had sent it, because the old process received the state from
//!   one.
//!
//! `live_upgrade.rs` hands over all sessions of a server. `assignment/frozen.rs` freezes the queues.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender};
use std::time::Duration;

use guest_mem::{GuestAddress, GuestMemory, PassedFd, Quota, Region, RegionSpec};
use io_engine::signal_shared;
use tracing::{debug, error};
use vhost::vhost_user::message::{FrontendReq, VhostUserInflight};
use virtio_blk::{Negotiated, WriteCache};
use virtqueue::MIN_QUEUE_SIZE;

use super::answer::{Result, SessionError};
use super::dirty_log::{DirtyLogging, mapped};
use super::log_memory::{self, LogLayout, LogMemory};
use super::shared::{Go, NotHanded, Order, SessionShared, Theirs};
use super::state::{
    DirtyLogState, HalfState, Handed, Incoming, LogState, Outgoing, Place, RegionState, SessionState,
    VringState,
};
use super::vring::{UserAddresses, Vring};
use super::wire::{HalfMessage, WireError};
use super::{Progress, Session, protocol_features};
use crate::data_path::assignment::frozen::{FrozenQueue, NotFrozen};
use crate::data_path::assignment::{QueueHandle, WorkerSet};
use crate::data_path::disk::Disk;
use crate::data_path::disk::ring_lease::RingLease;
use crate::data_path::disk::storage_thread::StorageThread;
use crate::data_path::queue::changes::CannotLeave;
use crate::host::clock::monotonic_ns;
use crate::host::error_line::error_line;
use crate::host::signal::adopt_passed;

/// Time limit for taking the storage's lock again after a failed live upgrade: less than the server waits for the session.
const AGAIN_TIMEOUT: Duration = Duration::from_secs(4);

impl Session {
    /// Freezes the session if ordered to, and waits for the verdict. Returns `Ended` if another process now owns the
    /// session.
    ///
    /// # Errors
    /// This process keeps the session, but cannot use its storage again.
    pub(super) fn freeze_if_ordered(&mut self) -> Result<Progress> {
        let Some(Order { timeout, frozen, verdict }) = self.shared.take_order() else {
            return Ok(Progress::GoesOn);
        };
        let (queues, handed) = match self.freeze(timeout) {
            Ok(done) => done,
            Err((queues, why)) => {
                let goes_on = self.go_on_with(queues);
                let _ = frozen.send(Err(why));
                return goes_on;
            }
        };
        let _ = frozen.send(Ok(handed));
        if verdict.recv() == Ok(Theirs) {
            // The session does not stop the queues, because the other process owns the rings.
            self.vrings.iter_mut().filter_map(|vring| vring.running.take()).for_each(QueueHandle::forget);
            self.wire.is_ours = false;
            debug!(disk = self.disk.name(), session = self.shared.id(), "session handed over");
            return Ok(Progress::Ended);
        }
        let goes_on = self.go_on_with(queues);
        // Closes the channel, which the thread that waits for the queues notices.
        drop(frozen);
        goes_on
    }

    /// Takes the storage's lock again, and returns the queues to their workers. Without the lock the storage refuses writes,
    /// so the session ends instead, and its requests stay in the rings.
    fn go_on_with(&mut self, queues: Vec<FrozenQueue>) -> Result<Progress> {
        if let Some(lease) = &mut self.lease {
            lease.begin_use(&self.shared, self.wire.socket(), Some(AGAIN_TIMEOUT))?;
        }
        self.workers.thaw(queues);
        Ok(Progress::GoesOn)
    }

    fn freeze(
        &mut self,
        timeout: Duration,
    ) -> Result<(Vec<FrozenQueue>, Handed), (Vec<FrozenQueue>, NotHanded)> {
        let frozen_ns = monotonic_ns();
        let running = self.vrings.iter().filter_map(|vring| vring.running.as_ref());
        let frozen = self.workers.freeze(running, timeout);
        let not_drained = |NotFrozen { queue }| (Vec::new(), NotHanded::NotDrained { queue, timeout });
        let mut queues = frozen.map_err(not_drained)?;
        match self.leave_all(&mut queues).and_then(|()| self.leave_storage(timeout)) {
            Ok(()) => {
                let (state, fds) = self.state();
                Ok((queues, Handed { state, fds, frozen_ns }))
            }
            Err(why) => Err((queues, why)),
        }
    }

    /// Releases the storage's lock, which the other process takes before it starts rings.
    fn leave_storage(&mut self, timeout: Duration) -> Result<(), NotHanded> {
        let Some(lease) = &mut self.lease else { return Ok(()) };
        lease.end_use(timeout).map_err(|why| NotHanded::Storage(why.to_string()))
    }

    /// Records the position at which each ring continues.
    fn leave_all(&mut self, queues: &mut [FrozenQueue]) -> Result<(), NotHanded> {
        // `queues` lacks a queue that ended because no worker could serve it.
        self.vrings.iter_mut().for_each(|vring| vring.broken = vring.running.is_some());
        for frozen in queues {
            let queue = frozen.index();
            let Some(vring) = self.vrings.get_mut(usize::from(queue)) else { continue };
            let left = frozen.queue().leave_as_it_is().map_err(|why| match why {
                CannotLeave::LostMemory => NotHanded::LostMemory,
                CannotLeave::Parked { requests } => NotHanded::Parked { queue, requests },
            })?;
            // Sets the position as a stop would. A queue that returns to its worker does not use it.
            (vring.base, vring.broken) = (left.position, left.is_broken);
        }
        Ok(())
    }

    fn state(&self) -> (SessionState, Vec<Arc<OwnedFd>>) {
        let mut fds = Outgoing::default();
        let socket = fds.put(self.wire.socket());
        let regions = self.memory.regions().iter().map(|region| {
            let RegionSpec { guest_addr, size_bytes, user_addr, file_offset_bytes } = *region.spec();
            let (fd, guest_addr) = (fds.put(region.fd()), guest_addr.0);
            RegionState { fd, guest_addr, size_bytes, user_addr, file_offset_bytes }
        });
        let regions = regions.collect();
        let log = self.log.as_ref().and_then(|log| {
            let LogLayout { queues, entries } = log.layout();
            let (mmap_bytes, offset_bytes) = (log.mmap_bytes, log.offset_bytes);
            Some(LogState { fd: fds.put(log.fd()?), mmap_bytes, offset_bytes, queues, entries })
        });
        let backend_channel = fds.put_some(self.shared.backend_channel().as_ref());
        let vrings = self.vrings.iter().map(|vring| vring_state(vring, &mut fds)).collect();
        let half = self.wire.half().map(|half| HalfState {
            bytes: half.bytes().to_vec(),
            fds: half.fds.iter().map(|fd| fds.put(fd.shared())).collect(),
            left_ms: u64::try_from(half.left.as_millis()).unwrap_or(u64::MAX),
        });
        let (dirty_log, dirty_log_changed) = self.dirty.state(&mut fds);
        let state = SessionState {
            socket,
            negotiated: self.negotiated.map(Negotiated::bits),
            protocol: self.protocol,
            protocol_negotiated: self.protocol_negotiated,
            half,
            has_lease: self.lease.is_some(),
            log_all: self.dirty.all,
            dirty_log,
            dirty_log_changed,
            writeback: self.shared.write_cache() == WriteCache::Writeback,
            heard: self.shared.has_heard(),
            regions,
            log,
            backend_channel,
            vrings,
        };
        (state, fds.0)
    }
}

fn vring_state(vring: &Vring, fds: &mut Outgoing) -> VringState {
    VringState {
        queue_size: vring.queue_size,
        addresses: vring.addresses.map(|addresses| [addresses.descriptors, addresses.avail, addresses.used]),
        log_addr: vring.log_addr,
        base: vring.base,
        kick: fds.put_some(vring.kick.as_ref().map(PassedFd::shared)),
        call: fds.put_some(vring.call.as_ref().map(PassedFd::shared)),
        err: fds.put_some(vring.err.as_ref().map(PassedFd::shared)),
        enabled: vring.enabled,
        failed: vring.failed || vring.running.is_some() && vring.broken,
        has_run: vring.is_known,
    }
}

// ---- in the new process

impl Session {
    /// Rebuilds the session as it was in the other process, with no ring running.
    pub(crate) fn rebuilt(
        disk: Arc<Disk>,
        workers: Arc<WorkerSet>,
        shared: Arc<SessionShared>,
        state: SessionState,
        fds: Vec<OwnedFd>,
        storage: Option<Arc<StorageThread>>,
    ) -> Result<Self> {
        let mut fds = Incoming::new(fds, disk.quota());
        let mut session = Self::new(disk, workers, Arc::new(fds.take(state.socket)?), shared, storage);
        let offered = protocol_features().bits();
        if state.protocol & !offered != 0 {
            return Err(SessionError::ProtocolFeatures { wanted: state.protocol, offered });
        }
        let negotiated = state.negotiated.map(|bits| Negotiated::accept(session.offered, bits));
        session.negotiated = negotiated.transpose()?;
        session.protocol = state.protocol;
        session.protocol_negotiated = state.protocol_negotiated;
        let (log, changed, quota) = (state.dirty_log, state.dirty_log_changed, session.disk.quota());
        session.dirty = dirty_logging(state.log_all, log, changed, &mut fds, quota)?;
        let cache = if state.writeback { WriteCache::Writeback } else { WriteCache::Writethrough };
        session.shared.set_write_cache(cache);
        if state.heard {
            session.shared.note_heard();
        }
        session.memory = Arc::new(memory(state.regions, &mut fds, session.disk.quota())?);
        session.log = state.log.map(|log| session.rebuilt_log(&log, &mut fds)).transpose()?;
        let channel = fds.take_some(state.backend_channel)?;
        session.adopt_backend_channel(channel.map(|fd| session.disk.quota().inherit(fd)).transpose()?)?;
        let (count, queues) = (state.vrings.len(), session.disk.queues());
        if count > session.vrings.len() {
            let (request, index) = (FrontendReq::SET_VRING_NUM, count.saturating_sub(1) as u64);
            return Err(SessionError::QueueIndex { request, index, queues });
        }
        for (index, said) in (0..).zip(state.vrings) {
            session.vrings[usize::from(index)] = session.rebuilt_vring(index, &said, &mut fds)?;
        }
        session.renew_log()?;
        if let Some(half) = state.half {
            let HalfState { bytes, fds: places, left_ms } = half;
            let quota = session.disk.quota();
            let mut take = |place| Ok(quota.inherit(fds.take(place)?)?);
            let passed = places.into_iter().map(&mut take).collect::<Result<_>>()?;
            let left = Duration::from_millis(left_ms);
            session.wire.go_on_with(HalfMessage::from_parts(left, bytes, passed).map_err(WireError::from)?);
        }
        if state.has_lease {
            session.lease = Some(RingLease::take_within(
                Duration::ZERO,
                &session.disk,
                &session.shared,
                session.storage.clone(),
            )?);
        }
        Ok(session)
    }

    /// Starts the rings that ran in the other process. Only the session with the disk's lease had running rings.
    fn start_leased(&mut self) -> Result<()> {
        if let Some(lease) = &mut self.lease {
            lease.begin_use(&self.shared, self.wire.socket(), None)?;
            self.reconcile_all()?;
            self.give_up_idle_lease();
        }
        Ok(())
    }

    fn rebuilt_log(&self, log: &LogState, fds: &mut Incoming) -> Result<LogMemory> {
        let LogState { mmap_bytes, offset_bytes, queues, entries, fd } = *log;
        let said = VhostUserInflight {
            mmap_size: mmap_bytes,
            mmap_offset: offset_bytes,
            num_queues: queues,
            queue_size: entries,
        };
        log_memory::check(&said, self.disk.queues())?;
        // Maps only the part that the smaller format needs: the front-end may have negotiated the format after it set
        // the log, and a ring that does not fit its log runs without one.
        Ok(log_memory::map(&said, false, self.disk.quota().inherit(fds.take(fd)?)?)?)
    }

    fn rebuilt_vring(&self, index: u16, said: &VringState, fds: &mut Incoming) -> Result<Vring> {
        let max = self.disk.queue_size();
        if let Some(num) = said.queue_size
            && !(num.is_power_of_two() && (MIN_QUEUE_SIZE..=max).contains(&num))
        {
            return Err(SessionError::QueueSize { index: index.into(), num: num.into(), max });
        }
        let mut eventfd = |place: Option<Place>, request| {
            let fd = fds.take_some(place)?.map(|fd| self.disk.quota().inherit(fd)).transpose()?;
            fd.map(adopt_passed).transpose().map_err(|source| SessionError::NotAnEventfd { request, source })
        };
        Ok(Vring {
            queue_size: said.queue_size,
            addresses: said.addresses.map(|[descriptors, avail, used]| UserAddresses {
                descriptors,
                avail,
                used,
            }),
            log_addr: said.log_addr,
            base: said.base,
            kick: eventfd(said.kick, FrontendReq::SET_VRING_KICK)?,
            call: eventfd(said.call, FrontendReq::SET_VRING_CALL)?,
            err: eventfd(said.err, FrontendReq::SET_VRING_ERR)?,
            enabled: said.enabled,
            failed: said.failed,
            is_known: said.has_run,
            ..Vring::default()
        })
    }

    /// Waits for permission, starts the rings, reports when they run, and serves the front-end.
    pub(crate) fn go_on(mut self, go: &Receiver<Go>, started: &SyncSender<Result<u64, String>>) {
        if go.recv().is_err() {
            return;
        }
        self.wire.is_ours = true;
        let had_failed: Vec<bool> = self.vrings.iter().map(|vring| vring.failed).collect();
        let reconciled = self.start_leased();
        let fails_here = self.vrings.iter().zip(had_failed).position(|(vring, had)| vring.failed && !had);
        // The other process signalled its completions, but this one cannot know whether the last signal arrived.
        let running = self.vrings.iter().filter(|vring| vring.running.is_some());
        running.filter_map(|vring| vring.call.as_ref()).for_each(signal_shared);
        let _ = started.send(match (&reconciled, fails_here) {
            (Err(error), _) => Err(error_line(error)),
            (Ok(()), Some(queue)) => {
                Err(format!("the new server cannot serve queue {queue}; its log says why"))
            }
            (Ok(()), None) => Ok(monotonic_ns()),
        });
        if let Err(error) = reconciled {
            let (disk, session) = (self.disk.name(), self.shared.id());
            return error!(disk, session, "session ended after the live upgrade: {}", error_line(&error));
        }
        self.run();
    }
}

/// The dirty log's state from the other process.
fn dirty_logging(
    all: bool,
    log: Option<DirtyLogState>,
    changed: Option<Place>,
    fds: &mut Incoming,
    quota: &Arc<Quota>,
) -> Result<DirtyLogging> {
    let map = |log: DirtyLogState| -> Result<_> {
        Ok(mapped(quota.inherit(fds.take(log.fd)?)?, log.mmap_bytes, log.offset_bytes)?)
    };
    let bits = log.map(map).transpose()?;
    let request = FrontendReq::SET_LOG_FD;
    let changed = fds.take_some(changed)?.map(|fd| quota.inherit(fd)).transpose()?;
    let changed = changed.map(adopt_passed).transpose();
    let changed = changed.map_err(|source| SessionError::NotAnEventfd { request, source })?;
    Ok(DirtyLogging { bits, changed, all })
}

fn memory(regions: Vec<RegionState>, fds: &mut Incoming, quota: &Arc<Quota>) -> Result<GuestMemory> {
    let mut mapped = Vec::new();
    for RegionState { fd, guest_addr, size_bytes, user_addr, file_offset_bytes } in regions {
        let guest_addr = GuestAddress(guest_addr);
        let spec = RegionSpec { guest_addr, size_bytes, user_addr, file_offset_bytes };
        let region = Region::map_passed(spec, quota.inherit(fds.take(fd)?)?);
        mapped.push(Arc::new(region.map_err(super::memory::MemoryChangeError::from)?));
    }
    Ok(GuestMemory::new(mapped).map_err(super::memory::MemoryChangeError::from)?)
}
