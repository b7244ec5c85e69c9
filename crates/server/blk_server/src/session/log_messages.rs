//! Handles the messages about the two logs that a front-end keeps: the dirty log of a live migration, and the in-flight
//! logs.
//!
//! `SET_LOG_BASE (file) + LOG_ALL or a ring's F_LOG → StoreLog → the session's memory → its queues' workers`
//!
//! - The dirty log is part of the memory that a queue uses, and changes like a memory table: the workers apply the new
//!   state before the session answers the front-end. Queues keep running. A request marks the log that is active when
//!   it completes.
//! - As soon as the front-end requests that some stores are marked, the server marks all stores. A superfluous bit
//!   costs one extra page copy.
//! - A dirty log that is too small ends the session. Front-ends ignore the answer, and a migration that misses bits
//!   gives the guest wrong memory.
//! - The session refuses a different in-flight log while rings run (`log_memory.rs`).
//!
//! Spec: vhost-user, "Migration", SET_LOG_BASE, SET_LOG_FD, SET_VRING_ADDR, "Inflight description". The logs' memory is
//! in `dirty_log.rs` and `log_memory.rs`.

use std::sync::Arc;

use guest_mem::{Address, GuestMemory, LoggedElsewhere, StoreLog};
use tracing::debug;
use vhost::vhost_user::message::{
    FrontendReq, VhostUserInflight, VhostUserLog, VhostUserProtocolFeatures, VhostUserVringAddr,
    VhostUserVringAddrFlags,
};
use virtqueue::LogArea;
use vm_memory::ByteValued;

use super::Session;
use super::answer::{Answer, Result, SessionError};
use super::body::{body, expect_fds};
use super::dirty_log::{DirtyLogRefused, mapped};
use super::log_memory::{LogLayout, LogMemoryError, check, map, roomy_memory};
use super::vring::UserAddresses;
use super::wire::Message;

/// The size of the in-flight message without padding; some peers send the padding.
const FIELDS_BYTES: usize = 20;

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
        // QEMU checks only the request number of the answer. Other front-ends also check that the body is the one that
        // they sent.
        Ok(Answer::DirtyLog(said))
    }

    /// SET_LOG_FD: the descriptor to signal when bits are set.
    pub(super) fn set_log_fd(&mut self, mut message: Message) -> Result<Answer> {
        expect_fds(&message, 1)?;
        let request = FrontendReq::SET_LOG_FD;
        let adopted = message.fds.pop().map(crate::host::signal::adopt_passed).transpose();
        let changed = adopted.map_err(|source| SessionError::NotAnEventfd { request, source })?;
        // Keeps the old descriptor, which stays charged, until no queue uses it.
        let before = std::mem::replace(&mut self.dirty.changed, changed);
        let renewed = self.renew_log();
        drop(before);
        renewed
    }

    /// The front-end repeats the message to start or stop marking a running ring's stores. If only the logging flag or
    /// address changed, the ring keeps running.
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

    /// Applies the front-end's messages about the dirty log so far: updates the memory and gives it to running queues.
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
                // No region is removed, so there is nothing to wait for.
                queue.set_memory(Arc::clone(&memory), false)?;
            }
        }
        self.memory = memory;
        Ok(Answer::Ack)
    }

    /// Returns `memory`, or a copy of it with different marking.
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

    /// Used rings that the front-end logs at addresses other than their guest addresses.
    fn logged_elsewhere(&self, memory: &GuestMemory) -> Box<[LoggedElsewhere]> {
        let features = self.negotiated.map(|negotiated| negotiated.ring()).unwrap_or_default();
        let rings = self.vrings.iter().filter_map(|vring| {
            let (log_addr, layout) = (vring.log_addr?, vring.layout(memory)?);
            let (addr, len_bytes) = (layout.used.raw_value(), layout.used_bytes(features));
            (addr != log_addr).then_some(LoggedElsewhere { addr, len_bytes, log_addr })
        });
        rings.collect()
    }

    /// GET_INFLIGHT_FD: creates memory for the logs. The server uses it only after the front-end has passed it back.
    pub(super) fn get_inflight_fd(&self, message: &Message) -> Result<Answer> {
        let asked = self.checked(message)?;
        let (num_queues, queue_size) = (asked.num_queues, asked.queue_size);
        let (bytes, fd) = roomy_memory(num_queues, queue_size.max(self.disk.queue_size()))?;
        let answer = VhostUserInflight { mmap_size: bytes, mmap_offset: 0, num_queues, queue_size };
        Ok(Answer::Log(answer, fd))
    }

    /// SET_INFLIGHT_FD: sets the logs of all rings, before they start.
    pub(super) fn set_inflight_fd(&mut self, mut message: Message) -> Result<Answer> {
        expect_fds(&message, 1)?;
        let said = self.checked(&message)?;
        let packed = self.negotiated.is_some_and(|negotiated| negotiated.ring().packed);
        let Some(fd) = message.fds.pop() else { return Ok(Answer::Ack) };
        if let Some(queue) = self.vrings.iter().position(|vring| vring.running.is_some()) {
            let is_same = self.log.as_ref().is_some_and(|log| log.is_same(&said, &fd));
            return if is_same { Ok(Answer::Ack) } else { Err(LogMemoryError::Running { queue }.into()) };
        }
        self.log = Some(map(&said, packed, fd)?);
        self.reconcile_all()
    }

    /// The log of queue `at`; `None` if the queue runs without one.
    pub(super) fn log_for(&self, at: usize, packed: bool) -> Option<LogArea> {
        let (log, queue_size) = (self.log.as_ref()?, self.vrings[at].queue_size?);
        let queue = u16::try_from(at).ok()?;
        let area = log.area(queue, queue_size, packed);
        if area.is_none() {
            let LogLayout { queues, entries } = log.layout();
            self.warn_once(&format!(
                "the front-end's in-flight log has no room for queue {queue} with {queue_size} descriptors (it is for \
                 {queues} queues of {entries}): the queue is served without a log, and its requests in flight are \
                 lost if the server is killed; make the front-end request the log from this server (GET_INFLIGHT_FD)"
            ));
        }
        area
    }

    fn checked(&self, message: &Message) -> Result<VhostUserInflight> {
        let (request, bytes, wanted) = (message.request, message.body.len(), size_of::<VhostUserInflight>());
        if bytes != wanted && bytes != FIELDS_BYTES {
            return Err(SessionError::BodySize { request, bytes, wanted });
        }
        let mut said = VhostUserInflight::default();
        said.as_mut_slice()[..bytes].copy_from_slice(&message.body);
        check(&said, self.disk.queues())?;
        Ok(said)
    }
}
