//! Reads a message's body and counts its descriptors.

use vhost::vhost_user::message::{VhostUserConfig, VhostUserU64, VhostUserVringState};
use vm_memory::ByteValued;

use super::answer::{Result, SessionError};
use super::wire::Message;

pub(super) fn body<T: ByteValued>(message: &Message) -> Result<T> {
    let (bytes, wanted) = (message.body.len(), size_of::<T>());
    let wrong = SessionError::BodySize { request: message.request, bytes, wanted };
    vhost_user::body::read(&message.body).ok_or(wrong)
}

pub(super) fn u64_body(message: &Message) -> Result<u64> {
    body::<VhostUserU64>(message).map(|body| body.value)
}

pub(super) fn vring_state(message: &Message) -> Result<(u32, u32)> {
    body::<VhostUserVringState>(message).map(|state| (state.index, state.num))
}

/// Body of GET_CONFIG and SET_CONFIG: offset, size and flags, then `size` bytes. GET_CONFIG ignores these bytes.
pub(super) fn config_body(message: &Message) -> Result<(VhostUserConfig, &[u8])> {
    const HEAD_BYTES: usize = size_of::<VhostUserConfig>();
    let (bytes, request) = (message.body.len(), message.request);
    let short = SessionError::BodySize { request, bytes, wanted: HEAD_BYTES };
    let parts = message.body.split_at_checked(HEAD_BYTES);
    let parts = parts.and_then(|(head, rest)| Some((vhost_user::body::read::<VhostUserConfig>(head)?, rest)));
    let (head, rest) = parts.ok_or(short)?;
    let size = head.size;
    if rest.len() != size as usize {
        let wanted = HEAD_BYTES + size as usize;
        return Err(SessionError::BodySize { request, bytes, wanted });
    }
    Ok((head, rest))
}

pub(super) fn expect_fds(message: &Message, wanted: usize) -> Result<()> {
    let (request, count) = (message.request, message.fds.len());
    if count == wanted { Ok(()) } else { Err(SessionError::FdCount { request, count, wanted }) }
}
