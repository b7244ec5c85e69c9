//! Offers protocol features, and takes those that the front-end chooses.
//!
//! Spec: vhost-user, "Protocol features". The device's features are in `mod.rs` and `virtio_blk`.

use vhost::vhost_user::message::VhostUserProtocolFeatures;

use super::body::u64_body;
use super::wire::Message;
use super::{Answer, Result, Session, SessionError};

/// The protocol features that the server offers.
pub(super) fn protocol_features() -> VhostUserProtocolFeatures {
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

impl Session {
    pub(super) fn has(&self, feature: VhostUserProtocolFeatures) -> bool {
        self.protocol & feature.bits() != 0
    }

    pub(super) fn set_protocol_features(&mut self, message: &Message) -> Result<Answer> {
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
}
