//! A live migration's messages: the front-end's dirty log, and the stores that are marked in it.
//!
//! `SET_LOG_BASE (file) + LOG_ALL or a ring's F_LOG → StoreLog → the session's memory → its queues' workers`
//!
//! - Whether stores are noted is part of the memory that a queue has, and changes as a memory table does: by a command
//!   that the worker has carried out before the front-end is answered. Nothing is stopped for it, and what is in flight
//!   is noted by what counts when it completes.
//! - All stores are noted as soon as the front-end wants any of them noted: a bit too many costs a page that is copied
//!   once more.
//! - A log that is too small ends the session. Front-ends ignore the answer, and a migration without some of the bits
//!   ends in a guest with wrong memory.
//!
//! Spec: vhost-user, "Migration", SET_LOG_BASE, SET_LOG_FD, SET_VRING_ADDR. Not here: the bits (`guest_mem`).

use std::sync::Arc;

use guest_mem::{
    Address, DirtyLog, DirtyLogError, GuestMemory, LoggedElsewhere, MemoryError, PassedFd, Quota, StoreLog,
};
use tracing::debug;
use vhost::vhost_user::message::{
    FrontendReq, VhostUserLog, VhostUserProtocolFeatures, VhostUserVringAddr, VhostUserVringAddrFlags,
};

use super::body::{body, expect_fds};
use super::state::{DirtyLogState, Incoming, Outgoing, Place};
use super::wire::Message;
use super::{Answer, Result, Session, SessionError, UserAddresses};

/// `VHOST_F_LOG_ALL` (vhost-user, "Migration").
pub(super) const F_LOG_ALL: u64 = 1 << 26;

/// Why stores cannot be marked in the log.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DirtyLogRefused {
    #[error("SET_LOG_BASE without LOG_SHMFD (bit 1): negotiate it, because only shared memory is supported")]
    NotShared,
    #[error("cannot map the dirty log: {mmap_bytes} bytes from byte {offset_bytes} of its file")]
    Map { mmap_bytes: u64, offset_bytes: u64, source: DirtyLogError },
    #[error(transparent)]
    TooSmall(#[from] MemoryError),
}

/// The front-end's messages about the log so far.
#[derive(Debug, Default)]
pub(super) struct DirtyLogging {
    bits: Option<Arc<DirtyLog>>,
    /// The descriptor to signal for new bits.
    changed: Option<PassedFd>,
    /// `VHOST_F_LOG_ALL` is on.
    pub(super) all: bool,
}

fn mapped(fd: PassedFd, mmap_bytes: u64, offset_bytes: u64) -> Result<Arc<DirtyLog>> {
    let bits = DirtyLog::map_passed(fd, mmap_bytes, offset_bytes);
    Ok(Arc::new(bits.map_err(|source| DirtyLogRefused::Map { mmap_bytes, offset_bytes, source })?))
}

impl DirtyLogging {
    /// What another server needs to note in the same log; that the front-end wants it is in its other messages.
    pub(super) fn state(&self, fds: &mut Outgoing) -> (Option<DirtyLogState>, Option<Place>) {
        let log = self.bits.as_ref().and_then(|bits| bits.region()).map(|region| DirtyLogState {
            fd: fds.put(region.fd()),
            mmap_bytes: region.spec().size_bytes,
            offset_bytes: region.spec().file_offset_bytes,
        });
        (log, fds.put_some(self.changed.as_ref().map(PassedFd::shared)))
    }

    pub(super) fn rebuilt(
        all: bool,
        log: Option<DirtyLogState>,
        changed: Option<Place>,
        fds: &mut Incoming,
        quota: &Arc<Quota>,
    ) -> Result<Self> {
        let map =
            |log: DirtyLogState| mapped(quota.inherit(fds.take(log.fd)?)?, log.mmap_bytes, log.offset_bytes);
        let bits = log.map(map).transpose()?;
        let request = FrontendReq::SET_LOG_FD;
        let changed = fds.take_some(changed)?.map(|fd| quota.inherit(fd)).transpose()?;
        let changed = changed.map(crate::host::signal::adopt_passed).transpose();
        let changed = changed.map_err(|source| SessionError::NotAnEventfd { request, source })?;
        Ok(Self { bits, changed, all })
    }
}

impl Session {
    /// SET_LOG_BASE: replaces the log.
    pub(super) fn set_log_base(&mut self, mut message: Message) -> Result<Answer> {
        if !self.has(VhostUserProtocolFeatures::LOG_SHMFD) {
            return Err(DirtyLogRefused::NotShared.into());
        }
        expect_fds(&message, 1)?;
        let said: VhostUserLog = body(&message)?;
        let VhostUserLog { mmap_size: mmap_bytes, mmap_offset: offset_bytes } = said;
        let bits = message.fds.pop().map(|fd| mapped(fd, mmap_bytes, offset_bytes)).transpose()?;
        self.dirty.bits = bits;
        self.renew_log()?;
        // QEMU looks at the request's number only, others at the body, which is their own.
        Ok(Answer::DirtyLog(said))
    }

    /// SET_LOG_FD: the descriptor to signal for new bits.
    pub(super) fn set_log_fd(&mut self, mut message: Message) -> Result<Answer> {
        expect_fds(&message, 1)?;
        let request = FrontendReq::SET_LOG_FD;
        let adopted = message.fds.pop().map(crate::host::signal::adopt_passed).transpose();
        let changed = adopted.map_err(|source| SessionError::NotAnEventfd { request, source })?;
        // Charged until no queue has it any more.
        let before = std::mem::replace(&mut self.dirty.changed, changed);
        let renewed = self.renew_log();
        drop(before);
        renewed
    }

    /// The front-end repeats the message to have a running ring's stores noted, or not any more: one that says nothing
    /// else does not stop it.
    pub(super) fn set_vring_addr(&mut self, message: &Message) -> Result<Answer> {
        let said: VhostUserVringAddr = body(message)?;
        let addresses =
            UserAddresses { descriptors: said.descriptor, avail: said.available, used: said.used };
        let wants_log = said.flags & VhostUserVringAddrFlags::VHOST_VRING_F_LOG.bits() != 0;
        let at = self.vring_index(message.request, u64::from(said.index))?;
        if self.vrings[at].addresses != Some(addresses) {
            self.stop(at);
            self.vrings[at].addresses = Some(addresses);
        }
        self.vrings[at].log_addr = wants_log.then_some(said.log);
        self.renew_log()?;
        self.reconcile(at)
    }

    /// Makes the memory, and what running queues have of it, note stores as the front-end's messages so far have it.
    pub(super) fn renew_log(&mut self) -> Result<Answer> {
        let memory = self.logged(Arc::clone(&self.memory))?;
        if Arc::ptr_eq(&memory, &self.memory) {
            return Ok(Answer::Ack);
        }
        if memory.logs_stores() != self.memory.logs_stores() {
            let (disk, session, logs) = (self.disk.name(), self.shared.id(), memory.logs_stores());
            debug!(disk, session, "dirty log {}", if logs { "on" } else { "off" });
        }
        for vring in &self.vrings {
            if let Some(queue) = &vring.running {
                // No region goes, so nothing is waited for.
                queue.set_memory(Arc::clone(&memory), false)?;
            }
        }
        self.memory = memory;
        Ok(Answer::Ack)
    }

    /// `memory`, or the same with other notes.
    pub(super) fn logged(&self, memory: Arc<GuestMemory>) -> Result<Arc<GuestMemory>> {
        let log = self.store_log(&memory);
        let is_same = match (&log, memory.log()) {
            (None, None) => true,
            (Some(new), Some(old)) => new.is_same(old),
            _ => false,
        };
        if is_same {
            return Ok(memory);
        }
        let with_log = memory.with_log(log.map(Arc::new)).map_err(DirtyLogRefused::from)?;
        Ok(Arc::new(with_log))
    }

    fn store_log(&self, memory: &GuestMemory) -> Option<StoreLog> {
        let wanted = self.dirty.all || self.vrings.iter().any(|vring| vring.log_addr.is_some());
        let bits = self.dirty.bits.clone().filter(|_| wanted)?;
        let changed = self.dirty.changed.as_ref().map(|fd| Arc::clone(fd.shared()));
        Some(StoreLog::new(bits, self.logged_elsewhere(memory), changed))
    }

    /// Used rings that the front-end knows by other addresses than their guest addresses.
    fn logged_elsewhere(&self, memory: &GuestMemory) -> Box<[LoggedElsewhere]> {
        let features = self.negotiated.map(|negotiated| negotiated.ring()).unwrap_or_default();
        let rings = self.vrings.iter().filter_map(|vring| {
            let (log_addr, layout) = (vring.log_addr?, vring.layout(memory)?);
            let (addr, len_bytes) = (layout.used.raw_value(), layout.used_bytes(features));
            (addr != log_addr).then_some(LoggedElsewhere { addr, len_bytes, log_addr })
        });
        rings.collect()
    }
}
