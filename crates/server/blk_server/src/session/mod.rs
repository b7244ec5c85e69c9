//! One connected front-end: its messages in order, and the queues that they start and stop.
//!
//! `wire.rs (Message) → handle → vrings, memory, features → worker commands → reply`
//!
//! - A disk may have several sessions: while one front-end replaces another it has two, but only one of them runs rings
//!   (`disk::ring_lease`).
//! - Each session has one thread, which sleeps in `poll` between messages. It never touches guest memory: the queues'
//!   workers do.
//! - An invalid message ends the session with one log line; the disk and other sessions continue. If the front-end
//!   requested an answer (NEED_REPLY) and can continue, it gets "failed" instead.
//!
//! Spec: vhost-user, "Front-end message types". The guest's requests are in `queue/mod.rs`.

mod answer;
mod body;
mod config_space;
mod dirty_log;
pub(crate) mod hand_over;
mod log_memory;
mod log_messages;
mod memory;
mod passed;
mod ring_history;
pub(crate) mod shared;
pub(crate) mod state;
#[cfg(test)]
mod tests;
mod vring;
pub(crate) mod wire;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use guest_mem::{GuestMemory, PassedFd};
use tracing::{debug, error, info, warn};
use vhost::vhost_user::message::{
    FrontendReq, VhostUserEmpty, VhostUserProtocolFeatures, VhostUserU64, VhostUserVringState,
};
use vhost_user::FrameError;
use virtio_blk::Negotiated;

pub(crate) use answer::SessionError;
use answer::{Answer, Result};
use body::{expect_fds, u64_body, vring_state};
use dirty_log::{DirtyLogging, F_LOG_ALL};
use log_memory::LogMemory;
use shared::SessionShared;
use vring::Vring;
use wire::{Incoming, Message, Wire, WireError};

use crate::data_path::assignment::WorkerSet;
use crate::data_path::disk::Disk;
use crate::data_path::disk::log_limit::Allowed;
use crate::data_path::disk::ring_lease::RingLease;
use crate::data_path::disk::session_link::EndReason;
use crate::data_path::disk::storage_thread::StorageThread;
use crate::data_path::queue::queue_start::{Ending, QueueStart};
use crate::host::error_line::error_line;

/// `VHOST_USER_F_PROTOCOL_FEATURES` (vhost-user, "Feature negotiation").
const F_PROTOCOL_FEATURES: u64 = 1 << 30;

/// Whether a session continues after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    GoesOn,
    Ended,
}

/// One front-end's state.
pub(crate) struct Session {
    disk: Arc<Disk>,
    workers: Arc<WorkerSet>,
    wire: Wire,
    shared: Arc<SessionShared>,
    memory: Arc<GuestMemory>,
    offered: u64,
    negotiated: Option<Negotiated>,
    protocol: u64,
    protocol_negotiated: bool,
    vrings: Vec<Vring>,
    /// The in-flight logs, if the front-end keeps them.
    log: Option<LogMemory>,
    dirty: DirtyLogging,
    lease: Option<RingLease>,
    /// Calls storage on another machine; `None`: the disk is on this host.
    storage: Option<Arc<StorageThread>>,
}

impl Session {
    pub(crate) fn new(
        disk: Arc<Disk>,
        workers: Arc<WorkerSet>,
        socket: Arc<OwnedFd>,
        shared: Arc<SessionShared>,
        storage: Option<Arc<StorageThread>>,
    ) -> Self {
        let vrings = (0..disk.queues()).map(|_| Vring::default()).collect();
        let offered = disk.device_features() | F_PROTOCOL_FEATURES | F_LOG_ALL;
        let (wake, pause) = (Arc::clone(shared.wake_fd()), Arc::clone(shared.pause_fd()));
        let wire = Wire::new(socket, wake, pause, Arc::clone(disk.quota()));
        let memory = Arc::default();
        shared.set_write_cache(disk.guest_cache().mode_at_first());
        disk.guest_cache().session_begins(shared.id());
        Self {
            disk,
            workers,
            wire,
            shared,
            memory,
            offered,
            negotiated: None,
            protocol: 0,
            protocol_negotiated: false,
            vrings,
            log: None,
            dirty: DirtyLogging::default(),
            lease: None,
            storage,
        }
    }

    /// Serves the front-end until it disconnects, sends an invalid message, or the session is ordered to end.
    pub(crate) fn run(mut self) {
        debug!(disk = self.disk.name(), session = self.shared.id(), "front-end connected");
        self.wire.is_ours = true;
        while self.step() == Progress::GoesOn {}
    }

    /// Waits once for the front-end, and handles the data that arrived. Logs the end of the session.
    pub(crate) fn step(&mut self) -> Progress {
        match self.receive_and_answer() {
            Ok(progress) => return progress,
            Err(SessionError::Wire(WireError::Frame(FrameError::Closed { bytes: 0 }))) => {
                debug!(disk = self.disk.name(), session = self.shared.id(), "front-end disconnected");
            }
            Err(error) => self.log_ended(&error_line(&error)),
        }
        Progress::Ended
    }

    /// Whether [`Session::step`] would return without waiting for the front-end.
    #[cfg(feature = "test-util")]
    pub(crate) fn is_ready(&self) -> bool {
        self.wire.is_ready()
    }

    fn receive_and_answer(&mut self) -> Result<Progress> {
        match self.wire.receive() {
            Ok(None) => {}
            Ok(Some(Incoming::Message(message))) => self.answer(message)?,
            Ok(Some(Incoming::Woken)) | Err(WireError::Woken) => {
                if let Some(reason) = self.shared.end_reason() {
                    self.end(&reason);
                    return Ok(Progress::Ended);
                }
            }
            Ok(Some(Incoming::Paused)) => {
                return self.freeze_if_ordered();
            }
            Err(error) => return Err(error.into()),
        }
        Ok(Progress::GoesOn)
    }

    fn end(&self, reason: &EndReason) {
        let (disk, session) = (self.disk.name(), self.shared.id());
        match reason {
            EndReason::Stop => debug!(disk, session, "the server ends the session"),
            EndReason::MadeRoom => {
                debug!(
                    disk,
                    session,
                    "session ended to make room for another front-end, because this one had sent nothing"
                )
            }
            EndReason::MemoryFault(what) => self.log_ended(what),
        }
    }

    fn log_use(&self, what: &str) {
        if let Some(Allowed { suppressed }) = self.disk.log_allowed(Instant::now()) {
            let (disk, session) = (self.disk.name(), self.shared.id());
            let features = self.negotiated.map(|negotiated| format!("{:#x}", negotiated.bits()));
            info!(disk, session, suppressed, features, "{what}");
        }
    }

    fn log_ended(&self, what: &str) {
        if let Some(Allowed { suppressed }) = self.disk.log_allowed_once(what, Instant::now()) {
            let (disk, session) = (self.disk.name(), self.shared.id());
            error!(disk, session, suppressed, "session ended: {what}");
        }
    }

    fn answer(&mut self, message: Message) -> Result<()> {
        self.shared.note_heard();
        let Message { request, need_reply, .. } = message;
        debug!(disk = self.disk.name(), session = self.shared.id(), ?request, need_reply, "message");
        let ack_wanted = need_reply && self.has(VhostUserProtocolFeatures::REPLY_ACK);
        match self.handle(message) {
            Ok(Answer::Ack) if ack_wanted => self.wire.reply(request, &VhostUserU64::new(0), &[])?,
            Ok(Answer::Ack) => {}
            Ok(Answer::U64(value)) => self.wire.reply(request, &VhostUserU64::new(value), &[])?,
            Ok(Answer::VringState(state)) => self.wire.reply(request, &state, &[])?,
            Ok(Answer::Config(head, bytes)) => self.wire.reply(request, &head, &bytes)?,
            Ok(Answer::Log(log, fd)) => self.wire.reply_with_fd(request, &log, &fd)?,
            Ok(Answer::DirtyLog(log)) => self.wire.reply(request, &log, &[])?,
            Err(error) if error.ends_session() => return Err(error),
            // For GET_CONFIG, an empty configuration space means failure.
            Err(error) if request == FrontendReq::GET_CONFIG => {
                self.log_refused(&error);
                self.wire.reply(request, &VhostUserEmpty, &[])?;
            }
            Err(error) if ack_wanted && !has_reply(request) => {
                self.log_refused(&error);
                self.wire.reply(request, &VhostUserU64::new(1), &[])?;
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    fn log_refused(&self, error: &SessionError) {
        self.warn_once(&format!("message refused: {}", error_line(error)));
    }

    /// Logs each text once, because front-ends repeat messages that the server refused.
    fn warn_once(&self, what: &str) {
        if let Some(Allowed { suppressed }) = self.disk.log_allowed_once(what, Instant::now()) {
            let (disk, session) = (self.disk.name(), self.shared.id());
            warn!(disk, session, suppressed, "{what}");
        }
    }

    /// Handles one message. The arms are ordered by subject: features, memory, rings.
    fn handle(&mut self, message: Message) -> Result<Answer> {
        let takes_fds = matches!(
            message.request,
            FrontendReq::SET_MEM_TABLE
                | FrontendReq::ADD_MEM_REG
                | FrontendReq::REM_MEM_REG
                | FrontendReq::SET_VRING_KICK
                | FrontendReq::SET_VRING_CALL
                | FrontendReq::SET_VRING_ERR
                | FrontendReq::SET_BACKEND_REQ_FD
                | FrontendReq::SET_INFLIGHT_FD
                | FrontendReq::SET_LOG_BASE
                | FrontendReq::SET_LOG_FD
        );
        if !takes_fds {
            expect_fds(&message, 0)?;
        }
        match message.request {
            FrontendReq::GET_FEATURES => Ok(Answer::U64(self.offered)),
            FrontendReq::SET_FEATURES => self.set_features(&message),
            FrontendReq::GET_PROTOCOL_FEATURES => Ok(Answer::U64(protocol_features().bits())),
            FrontendReq::SET_PROTOCOL_FEATURES => self.set_protocol_features(&message),
            FrontendReq::SET_OWNER => Ok(Answer::Ack),
            FrontendReq::RESET_OWNER | FrontendReq::RESET_DEVICE => self.reset(),
            FrontendReq::GET_QUEUE_NUM => Ok(Answer::U64(u64::from(self.disk.queues()))),
            FrontendReq::GET_CONFIG => self.get_config(&message),
            FrontendReq::SET_CONFIG => self.set_config(&message),
            FrontendReq::GET_MAX_MEM_SLOTS => Ok(Answer::U64(guest_mem::MAX_REGIONS as u64)),
            FrontendReq::SET_MEM_TABLE => self.set_memory(memory::replaced(&self.memory, message)),
            FrontendReq::ADD_MEM_REG => self.set_memory(memory::added(&self.memory, message)),
            FrontendReq::REM_MEM_REG => self.set_memory(memory::removed(&self.memory, &message)),
            FrontendReq::SET_VRING_NUM => self.set_vring_num(&message),
            FrontendReq::SET_VRING_ADDR => self.set_vring_addr(&message),
            FrontendReq::SET_VRING_BASE => self.set_vring_base(&message),
            FrontendReq::GET_VRING_BASE => self.get_vring_base(&message),
            FrontendReq::SET_VRING_KICK => self.set_vring_kick(message),
            FrontendReq::SET_VRING_CALL => self.set_vring_call(message),
            FrontendReq::SET_VRING_ERR => self.set_vring_err(message),
            FrontendReq::SET_VRING_ENABLE => self.set_vring_enable(&message),
            FrontendReq::SET_BACKEND_REQ_FD => self.set_backend_channel(message),
            FrontendReq::GET_INFLIGHT_FD => self.get_inflight_fd(&message),
            FrontendReq::SET_INFLIGHT_FD => self.set_inflight_fd(message),
            FrontendReq::SET_LOG_BASE => self.set_log_base(message),
            FrontendReq::SET_LOG_FD => self.set_log_fd(message),
            request => Err(SessionError::NotOffered { request }),
        }
    }

    fn has(&self, feature: VhostUserProtocolFeatures) -> bool {
        self.protocol & feature.bits() != 0
    }

    fn set_protocol_features(&mut self, message: &Message) -> Result<Answer> {
        let (wanted, offered) = (u64_body(message)?, protocol_features().bits());
        if wanted & !offered != 0 {
            return Err(SessionError::ProtocolFeatures { wanted, offered });
        }
        let [log, base] =
            [VhostUserProtocolFeatures::INFLIGHT_SHMFD, VhostUserProtocolFeatures::GET_VRING_BASE_INFLIGHT];
        if wanted & base.bits() != 0 && wanted & log.bits() == 0 {
            return Err(SessionError::NoLog { wanted });
        }
        self.protocol = wanted;
        Ok(Answer::Ack)
    }

    fn set_features(&mut self, message: &Message) -> Result<Answer> {
        let wanted = u64_body(message)?;
        // LOG_ALL may change while rings run, and it is not a feature of the driver.
        let negotiated = Negotiated::accept(self.offered, wanted & !F_LOG_ALL)?;
        self.dirty.all = wanted & F_LOG_ALL != 0;
        self.protocol_negotiated = wanted & F_PROTOCOL_FEATURES != 0;
        if !self.protocol_negotiated {
            // A front-end without protocol features never sends SET_VRING_ENABLE, so its rings start enabled.
            self.vrings.iter_mut().for_each(|vring| vring.enabled = true);
        }
        // Some front-ends repeat the message while the guest runs. A driver that starts negotiates while its rings are
        // stopped, and starts with the disk's cache mode.
        let repeated = self.negotiated == Some(negotiated);
        if !repeated || self.vrings.iter().all(|vring| vring.running.is_none()) {
            // Running rings use the old feature bits, so they are stopped.
            self.stop_all(Ending::Ring);
            self.shared.set_write_cache(self.disk.guest_cache().mode_for(negotiated));
            self.negotiated = Some(negotiated);
        }
        self.renew_log()?;
        self.reconcile_all()
    }

    /// Stops every ring, and forgets the negotiated features and the in-flight log. Keeps the memory, the channel and a
    /// guest's choice of writethrough.
    fn reset(&mut self) -> Result<Answer> {
        self.stop_all(Ending::Ring);
        (self.negotiated, self.log) = (None, None);
        self.shared.set_write_cache(self.disk.guest_cache().mode_at_first());
        for at in 0..self.vrings.len() {
            self.disk.guest_cache().ring_forgotten(at);
            let (enabled, is_known) = (!self.protocol_negotiated, self.vrings[at].is_known);
            self.vrings[at] = Vring { enabled, is_known, ..Vring::default() };
        }
        self.dirty = DirtyLogging::default();
        self.renew_log()
    }

    /// Gives running queues the new table. If the new table lacks a region, they release that region first.
    ///
    /// A ring that is in no region of the new table pauses without a fault: front-ends resize a region by removing it
    /// and adding another, and add regions one by one. Before the session answers, the queue releases the old table and
    /// the requests that use it (`queue/parking.rs`). A ring that is only partly mapped is a fault.
    fn set_memory(&mut self, change: Result<memory::Change, memory::MemoryChangeError>) -> Result<Answer> {
        let memory::Change { memory, removes } = change?;
        let memory = self.logged(memory)?;
        let ring = self.negotiated.map(Negotiated::ring).unwrap_or_default();
        for at in 0..self.vrings.len() {
            let vring = &self.vrings[at];
            let (old, layout) = (vring.layout(&self.memory), vring.layout(&memory));
            match &vring.running {
                Some(queue) if layout == old && vring.is_whole(&memory, ring) => {
                    queue.set_memory(Arc::clone(&memory), removes)?;
                }
                Some(_) => self.stop(at),
                None => {}
            }
        }
        self.memory = memory;
        for at in 0..self.vrings.len() {
            if self.vrings[at].layout(&self.memory).is_some() {
                self.vrings[at].failed = false;
                self.reconcile(at)?;
            }
        }
        Ok(Answer::Ack)
    }

    fn set_vring_num(&mut self, message: &Message) -> Result<Answer> {
        let (index, num) = vring_state(message)?;
        let max = self.disk.queue_size();
        let size = u16::try_from(num).ok().filter(|n| n.is_power_of_two() && (2..=max).contains(n));
        let size = size.ok_or(SessionError::QueueSize { index, num, max })?;
        self.changing(message.request, u64::from(index), |vring| vring.queue_size = Some(size))
    }

    fn set_vring_base(&mut self, message: &Message) -> Result<Answer> {
        let (index, base) = vring_state(message)?;
        self.changing(message.request, u64::from(index), |vring| vring.base = base)
    }

    fn get_vring_base(&mut self, message: &Message) -> Result<Answer> {
        let (index, _) = vring_state(message)?;
        let at = self.vring_index(message.request, u64::from(index))?;
        self.stop(at);
        let vring = &mut self.vrings[at];
        // If the session has not run this ring, the position proves nothing: the front-end may have invented it.
        let cache = self.disk.guest_cache();
        if vring.is_known {
            cache.ring_left(at, vring.base)
        } else {
            cache.ring_forgotten(at)
        }
        vring.kick = None;
        vring.failed = false;
        Ok(Answer::VringState(VhostUserVringState::new(index, vring.base)))
    }

    fn set_vring_enable(&mut self, message: &Message) -> Result<Answer> {
        let (index, num) = vring_state(message)?;
        let at = self.vring_index(message.request, u64::from(index))?;
        self.vrings[at].enabled = num != 0;
        self.reconcile(at)
    }

    /// Stops the ring, applies the change, and starts the ring again: a running ring cannot follow such a change.
    fn changing(
        &mut self,
        request: FrontendReq,
        index: u64,
        change: impl FnOnce(&mut Vring),
    ) -> Result<Answer> {
        let at = self.vring_index(request, index)?;
        self.stop(at);
        change(&mut self.vrings[at]);
        self.renew_log()?;
        self.reconcile(at)
    }

    fn reconcile_all(&mut self) -> Result<Answer> {
        for at in 0..self.vrings.len() {
            self.reconcile(at)?;
        }
        Ok(Answer::Ack)
    }

    /// Starts or stops the queue as the front-end's messages require.
    fn reconcile(&mut self, at: usize) -> Result<Answer> {
        let should_run = self.vrings[at].should_run() && !self.memory.regions().is_empty();
        match (self.negotiated, should_run, self.vrings[at].running.is_some()) {
            (Some(negotiated), true, false) => self.start(at, negotiated)?,
            (_, false, true) => self.stop(at),
            _ => {}
        }
        Ok(Answer::Ack)
    }

    fn start(&mut self, at: usize, negotiated: Negotiated) -> Result<()> {
        if self.lease.is_none() {
            let mut lease = RingLease::take(&self.disk, &self.shared, self.storage.clone())?;
            lease.begin_use(&self.shared, self.wire.socket(), None)?;
            self.lease = Some(lease);
            self.log_use("the disk is in use by a guest");
        }
        let leaves_unbegun = self.has(VhostUserProtocolFeatures::GET_VRING_BASE_INFLIGHT);
        let cache_choice_unknown = self.may_hide_a_choice(at, negotiated);
        let log = self.log_for(at, negotiated.ring().packed);
        let vring = &mut self.vrings[at];
        let fd = |passed: &Option<PassedFd>| passed.as_ref().map(|fd| Arc::clone(fd.shared()));
        let Some(kick) = fd(&vring.kick) else { return Ok(()) };
        #[allow(clippy::cast_possible_truncation)] // fewer than 65,536 queues
        let start = QueueStart {
            disk: Arc::clone(&self.disk),
            session: Arc::clone(self.shared.link()),
            index: at as u16,
            memory: Arc::clone(&self.memory),
            layout: vring.layout(&self.memory),
            ring: negotiated.ring(),
            base: vring.base,
            cache_choice_unknown,
            kick,
            call: fd(&vring.call),
            err: fd(&vring.err),
            meter: self.disk.totals().start_queue(),
            log,
            leaves_unbegun,
        };
        // A ring that cannot start is a fault of the queue, not of the session. The worker has logged it and signalled
        // the err fd. The other queues continue, and a reset restores this one.
        vring.running = self.workers.start_queue(start)?;
        vring.failed = vring.running.is_none();
        self.note_opened(at);
        self.give_up_idle_lease();
        Ok(())
    }

    /// Stops the queue, and returns when all submitted requests are complete. Requests that the guest adds later stay
    /// in the ring.
    fn stop(&mut self, at: usize) {
        if let Some(queue) = self.vrings[at].running.take() {
            self.vrings[at].base = queue.stop().unwrap_or(self.vrings[at].base);
        }
        self.give_up_idle_lease();
    }

    /// Releases the lease if no ring of this session runs, so that another session can start rings.
    fn give_up_idle_lease(&mut self) {
        if self.lease.is_some() && self.vrings.iter().all(|vring| vring.running.is_none()) {
            self.lease = None;
            self.log_use("the disk is no longer in use");
        }
    }

    /// Stops all queues at once, so that they drain in parallel.
    fn stop_all(&mut self, ending: Ending) {
        for vring in &self.vrings {
            if let Some(queue) = &vring.running {
                queue.begin_stop(ending);
            }
        }
        for at in 0..self.vrings.len() {
            self.stop(at);
        }
    }

    fn vring_index(&self, request: FrontendReq, index: u64) -> Result<usize> {
        let queues = self.disk.queues();
        let at = usize::try_from(index).ok().filter(|&at| at < self.vrings.len());
        at.ok_or(SessionError::QueueIndex { request, index, queues })
    }
}

/// Stops the queues when the session ends. The list no longer contains queues that another process owns.
impl Drop for Session {
    fn drop(&mut self) {
        // A session with the lease but without rings has handed its rings to another process, so the disk is still in
        // use.
        if self.vrings.iter().all(|vring| vring.running.is_none()) {
            self.lease = None;
        }
        self.stop_all(Ending::Session);
        self.disk.not_used_by(&self.shared);
        debug!(disk = self.disk.name(), session = self.shared.id(), "session closed");
    }
}

/// The protocol features that the server offers (vhost-user, "Protocol features").
fn protocol_features() -> VhostUserProtocolFeatures {
    VhostUserProtocolFeatures::MQ
        | VhostUserProtocolFeatures::LOG_SHMFD
        | VhostUserProtocolFeatures::REPLY_ACK
        | VhostUserProtocolFeatures::BACKEND_REQ
        | VhostUserProtocolFeatures::CONFIG
        | VhostUserProtocolFeatures::RESET_DEVICE
        | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
        | VhostUserProtocolFeatures::INFLIGHT_SHMFD
        | VhostUserProtocolFeatures::GET_VRING_BASE_INFLIGHT
}

/// Whether the answer to this request cannot express a failure.
fn has_reply(request: FrontendReq) -> bool {
    matches!(
        request,
        FrontendReq::GET_FEATURES
            | FrontendReq::GET_PROTOCOL_FEATURES
            | FrontendReq::GET_QUEUE_NUM
            | FrontendReq::GET_MAX_MEM_SLOTS
            | FrontendReq::GET_VRING_BASE
            | FrontendReq::GET_INFLIGHT_FD
            | FrontendReq::SET_LOG_BASE
    )
}
