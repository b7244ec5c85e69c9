//! GET_CONFIG and SET_CONFIG: the front-end reads the configuration space for its guest; the guest writes one field.
//!
//! Spec: vhost-user, GET_CONFIG, SET_CONFIG. The fields are in `disk/mod.rs` and `virtio_blk`.

use tracing::debug;
use virtio_blk::{DeviceConfig, Negotiated};

use super::Session;
use super::answer::{Answer, Result, SessionError};
use super::body::config_body;
use super::wire::Message;

impl Session {
    fn config(&self) -> DeviceConfig {
        self.disk.device_config(self.shared.write_cache())
    }

    pub(super) fn get_config(&self, message: &Message) -> Result<Answer> {
        let (head, _) = config_body(message)?;
        let (offset, size) = (head.offset, head.size);
        let bytes = self.config().read(offset, size)?;
        Ok(Answer::Config(head, bytes))
    }

    pub(super) fn set_config(&mut self, message: &Message) -> Result<Answer> {
        let (head, bytes) = config_body(message)?;
        if !self.negotiated.is_some_and(Negotiated::has_config_wce) {
            return Err(SessionError::NoConfigWce);
        }
        let cache = self.config().write(head.offset, bytes)?;
        debug!(disk = self.disk.name(), session = self.shared.id(), ?cache, "guest set the write cache");
        self.disk.guest_cache().set(cache);
        self.shared.set_write_cache(cache);
        self.vrings.iter_mut().for_each(|vring| vring.is_known = true);
        Ok(Answer::Ack)
    }
}
