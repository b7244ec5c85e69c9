//! vhost-user's messages as calls: the contents of each message, and its valid replies.
//!
//! - This type knows whether a message without a reply of its own can request an acknowledgement (REPLY_ACK). Without
//!   REPLY_ACK the driver does not learn whether the message succeeded; [`FrontEnd::barrier`] at least ensures that the
//!   back-end has processed it.
//! - Values in replies are not checked in this file; the code that uses them checks them (`negotiate.rs`).
//!
//! Spec: vhost-user, "Front-end message types".

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use guest_mem::{Address, Region};
use vhost::vhost_user::message::{
    FrontendReq, VhostUserConfig, VhostUserProtocolFeatures, VhostUserU64, VhostUserVringState,
};
use vhost_user::body::{MemoryRegion, memory_table, read, vring_addresses, vring_state};
use virtqueue::RingLayout;

use super::log::{FIELDS_BYTES, Log, PADDED_BYTES, Wanted};
use super::wire::{Outgoing, Wire};
use crate::error::MessageError;

/// Offset, size and flags before the configuration's bytes (vhost-user, "Virtio device config space").
const CONFIG_HEAD_BYTES: usize = size_of::<VhostUserConfig>();
/// Maximum number of regions of SET_MEM_TABLE (vhost-user, "Memory region description").
pub(super) const MAX_TABLE_REGIONS: usize = 8;
/// Maximum number of bytes per request (vhost-user, `VHOST_USER_GET_CONFIG`).
const MAX_CONFIG_BYTES: usize = 256;

type Result<T, E = MessageError> = std::result::Result<T, E>;

/// A connected back-end.
#[derive(Debug)]
pub(super) struct FrontEnd {
    wire: Wire,
    protocol: VhostUserProtocolFeatures,
}

impl FrontEnd {
    pub(super) fn new(wire: Wire) -> Self {
        Self { wire, protocol: VhostUserProtocolFeatures::empty() }
    }

    pub(super) fn wire(&self) -> &Wire {
        &self.wire
    }

    pub(super) fn wire_mut(&mut self) -> &mut Wire {
        &mut self.wire
    }

    pub(super) fn has(&self, feature: VhostUserProtocolFeatures) -> bool {
        self.protocol.contains(feature)
    }

    pub(super) fn features(&self) -> Result<u64> {
        self.ask_u64(FrontendReq::GET_FEATURES)
    }

    pub(super) fn protocol_features(&self) -> Result<u64> {
        self.ask_u64(FrontendReq::GET_PROTOCOL_FEATURES)
    }

    pub(super) fn set_protocol_features(&mut self, features: VhostUserProtocolFeatures) -> Result<()> {
        let body = features.bits().to_ne_bytes();
        // Stores the features after this message, because REPLY_ACK applies only from the next message on.
        self.tell(FrontendReq::SET_PROTOCOL_FEATURES, &body, &[])?;
        self.protocol = features;
        Ok(())
    }

    pub(super) fn set_owner(&self) -> Result<()> {
        self.tell(FrontendReq::SET_OWNER, &[], &[])
    }

    pub(super) fn set_features(&self, features: u64) -> Result<()> {
        self.tell(FrontendReq::SET_FEATURES, &features.to_ne_bytes(), &[])
    }

    /// Requires MQ.
    pub(super) fn queue_num(&self) -> Result<u64> {
        self.ask_u64(FrontendReq::GET_QUEUE_NUM)
    }

    /// Requires CONFIGURE_MEM_SLOTS.
    pub(super) fn max_mem_slots(&self) -> Result<u64> {
        self.ask_u64(FrontendReq::GET_MAX_MEM_SLOTS)
    }

    /// Requires BACKEND_REQ.
    pub(super) fn set_backend_channel(&self, theirs: &OwnedFd) -> Result<()> {
        self.tell(FrontendReq::SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()])
    }

    /// Requires RESET_DEVICE.
    pub(super) fn reset_device(&self) -> Result<()> {
        self.tell(FrontendReq::RESET_DEVICE, &[], &[])
    }

    /// The first `size_bytes` (at most 256) of the configuration space; `None` if the back-end says that it
    /// does not have them. Requires CONFIG.
    pub(super) fn config(&self, size_bytes: usize) -> Result<Option<Vec<u8>>> {
        let body = vhost_user::body::config(0, &vec![0; size_bytes.min(MAX_CONFIG_BYTES)]);
        let message = Outgoing { request: FrontendReq::GET_CONFIG, need_reply: false, body: &body, fds: &[] };
        // An empty answer means failure.
        let mut reply = self.wire.ask(&message, body.len(), Some(0))?;
        Ok((!reply.is_empty()).then(|| reply.split_off(CONFIG_HEAD_BYTES)))
    }

    /// Sends all regions at once, at most [`MAX_TABLE_REGIONS`].
    pub(super) fn set_mem_table(&self, regions: &[&Region]) -> Result<()> {
        let body = memory_table(regions.iter().map(|region| description(region)));
        let fds: Vec<BorrowedFd<'_>> = regions.iter().map(|region| region.fd().as_fd()).collect();
        self.tell(FrontendReq::SET_MEM_TABLE, &body, &fds)
    }

    /// Requires CONFIGURE_MEM_SLOTS.
    pub(super) fn add_region(&self, region: &Region) -> Result<()> {
        self.tell(FrontendReq::ADD_MEM_REG, &description(region).single(), &[region.fd().as_fd()])
    }

    /// Requires CONFIGURE_MEM_SLOTS.
    pub(super) fn remove_region(&self, region: &Region) -> Result<()> {
        self.tell(FrontendReq::REM_MEM_REG, &description(region).single(), &[])
    }

    /// Requires INFLIGHT_SHMFD. Returns the answer unchecked.
    pub(super) fn inflight_fd(&self, wanted: Wanted) -> Result<([u8; PADDED_BYTES], Option<OwnedFd>)> {
        let body = wanted.description();
        let request = FrontendReq::GET_INFLIGHT_FD;
        let message = Outgoing { request, need_reply: false, body: &body, fds: &[] };
        let (reply, fd) = self.wire.ask_for_fd(&message, PADDED_BYTES, Some(FIELDS_BYTES))?;
        let mut answer = [0; PADDED_BYTES];
        answer.iter_mut().zip(reply).for_each(|(to, byte)| *to = byte);
        Ok((answer, fd))
    }

    /// Requires INFLIGHT_SHMFD.
    pub(super) fn set_inflight_fd(&self, log: &Log) -> Result<()> {
        self.tell(FrontendReq::SET_INFLIGHT_FD, log.description(), &[log.fd()])
    }

    pub(super) fn set_vring_num(&self, queue: u16, queue_size: u16) -> Result<()> {
        self.tell(FrontendReq::SET_VRING_NUM, &vring_state(queue, u32::from(queue_size)), &[])
    }

    /// Sends user addresses, which equal the guest addresses in our own memory (`Region::from_memfd`).
    pub(super) fn set_vring_addr(&self, queue: u16, layout: &RingLayout) -> Result<()> {
        let [descriptors, used, avail] =
            [layout.descriptors, layout.used, layout.avail].map(|addr| addr.raw_value());
        let body = vring_addresses(queue, descriptors, used, avail);
        self.tell(FrontendReq::SET_VRING_ADDR, &body, &[])
    }

    /// Sends all 32 bits: a packed ring's base has two indices and two wrap counters.
    pub(super) fn set_vring_base(&self, queue: u16, base: u32) -> Result<()> {
        self.tell(FrontendReq::SET_VRING_BASE, &vring_state(queue, base), &[])
    }

    /// Stops the queue: after the reply, the back-end does not access the ring any more.
    pub(super) fn vring_base(&self, queue: u16) -> Result<u32> {
        let body = vring_state(queue, 0);
        let message =
            Outgoing { request: FrontendReq::GET_VRING_BASE, need_reply: false, body: &body, fds: &[] };
        let reply = self.wire.ask(&message, body.len(), None)?;
        Ok(read::<VhostUserVringState>(&reply).unwrap_or_default().num)
    }

    pub(super) fn set_vring_kick(&self, queue: u16, fd: BorrowedFd<'_>) -> Result<()> {
        self.tell(FrontendReq::SET_VRING_KICK, &u64::from(queue).to_ne_bytes(), &[fd])
    }

    pub(super) fn set_vring_call(&self, queue: u16, fd: BorrowedFd<'_>) -> Result<()> {
        self.tell(FrontendReq::SET_VRING_CALL, &u64::from(queue).to_ne_bytes(), &[fd])
    }

    pub(super) fn set_vring_err(&self, queue: u16, fd: BorrowedFd<'_>) -> Result<()> {
        self.tell(FrontendReq::SET_VRING_ERR, &u64::from(queue).to_ne_bytes(), &[fd])
    }

    pub(super) fn set_vring_enable(&self, queue: u16, enable: bool) -> Result<()> {
        self.tell(FrontendReq::SET_VRING_ENABLE, &vring_state(queue, u32::from(enable)), &[])
    }

    /// Waits until the back-end has processed every earlier message, successfully or not. Back-ends handle messages in
    /// order.
    pub(super) fn barrier(&self) -> Result<()> {
        if self.has(VhostUserProtocolFeatures::REPLY_ACK) {
            return Ok(());
        }
        self.features().map(drop)
    }

    fn ask_u64(&self, request: FrontendReq) -> Result<u64> {
        self.wire_u64(&Outgoing { request, need_reply: false, body: &[], fds: &[] })
    }

    /// Sends a message that has no reply of its own.
    fn tell(&self, request: FrontendReq, body: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        let need_reply = self.has(VhostUserProtocolFeatures::REPLY_ACK);
        let message = Outgoing { request, need_reply, body, fds };
        if !need_reply {
            return self.wire.send(&message);
        }
        match self.wire_u64(&message)? {
            0 => Ok(()),
            value => Err(MessageError::Refused { request, value }),
        }
    }

    /// Sends a message whose reply is one 64-bit value.
    fn wire_u64(&self, message: &Outgoing<'_>) -> Result<u64> {
        let reply = self.wire.ask(message, size_of::<u64>(), None)?;
        Ok(read::<VhostUserU64>(&reply).unwrap_or_default().value)
    }
}

fn description(region: &Region) -> MemoryRegion {
    let spec = region.spec();
    MemoryRegion {
        guest_addr: spec.guest_addr.raw_value(),
        size_bytes: spec.size_bytes,
        user_addr: spec.user_addr,
        file_offset_bytes: spec.file_offset_bytes,
    }
}
