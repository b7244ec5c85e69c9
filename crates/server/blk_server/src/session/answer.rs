//! The answers of a session to a message: a body or an error.

use std::os::fd::OwnedFd;

use guest_mem::QuotaError;
use vhost::vhost_user::message::{
    FrontendReq, VhostUserConfig, VhostUserInflight, VhostUserLog, VhostUserVringState,
};

use super::dirty_log::DirtyLogRefused;
use super::log_memory::LogMemoryError;
use super::memory::MemoryChangeError;
use super::state::NoDescriptor;
use super::wire::WireError;
use crate::data_path::disk::ring_lease::LeaseError;
use crate::data_path::worker::command::WorkerGone;

/// The answer to a message.
pub(super) enum Answer {
    /// Reports success, if the front-end requested an answer (REPLY_ACK).
    Ack,
    U64(u64),
    VringState(VhostUserVringState),
    Config(VhostUserConfig, Vec<u8>),
    Log(VhostUserInflight, OwnedFd),
    DirtyLog(VhostUserLog),
}

/// Why the session refused a message.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SessionError {
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error("{request:?} has a body of {bytes} bytes, but {wanted} are needed")]
    BodySize { request: FrontendReq, bytes: usize, wanted: usize },
    #[error("{request:?} came with {count} file descriptors, but {wanted} are needed")]
    FdCount { request: FrontendReq, count: usize, wanted: usize },
    #[error("{request:?} names queue {index}, but this disk has {queues} queues")]
    QueueIndex { request: FrontendReq, index: u64, queues: u16 },
    #[error(
        "SET_VRING_NUM {num} for queue {index} is invalid: the queue size must be a power of two from 2 to {max}"
    )]
    QueueSize { index: u32, num: u32, max: u16 },
    #[error("SET_VRING_KICK for queue {index} without a file descriptor: polled queues are not supported")]
    NoKick { index: u16 },
    #[error("{request:?} came with a file descriptor that cannot be used")]
    NotAnEventfd { request: FrontendReq, source: std::io::Error },
    #[error("SET_BACKEND_REQ_FD came with a file descriptor that cannot be used")]
    NotAChannel { source: std::io::Error },
    #[error("SET_PROTOCOL_FEATURES {wanted:#x} has bits that were not offered ({offered:#x})")]
    ProtocolFeatures { wanted: u64, offered: u64 },
    #[error(
        "SET_PROTOCOL_FEATURES {wanted:#x}: GET_VRING_BASE_INFLIGHT (bit 20) needs INFLIGHT_SHMFD (bit 12)"
    )]
    NoLog { wanted: u64 },
    #[error(
        "SET_CONFIG without VIRTIO_BLK_F_CONFIG_WCE: no field is writable unless the driver negotiates this feature"
    )]
    NoConfigWce,
    #[error("{request:?} is not supported: the server did not offer the feature for this message")]
    NotOffered { request: FrontendReq },
    #[error(transparent)]
    Features(#[from] virtio_blk::FeatureError),
    #[error(transparent)]
    ConfigRead(#[from] virtio_blk::ConfigReadError),
    #[error(transparent)]
    ConfigWrite(#[from] virtio_blk::ConfigWriteError),
    #[error(transparent)]
    Memory(#[from] MemoryChangeError),
    #[error(transparent)]
    LogMemory(#[from] LogMemoryError),
    #[error(transparent)]
    DirtyLog(#[from] DirtyLogRefused),
    #[error(transparent)]
    Lease(#[from] LeaseError),
    #[error(transparent)]
    Descriptor(#[from] NoDescriptor),
    #[error(transparent)]
    Quota(#[from] QuotaError),
    #[error("the worker's thread has ended")]
    WorkerGone,
}

pub(super) type Result<T, E = SessionError> = std::result::Result<T, E>;

impl SessionError {
    /// Whether the session must end, even if the front-end requested an answer.
    pub(super) fn ends_session(&self) -> bool {
        // Front-ends ignore the answer to SET_LOG_BASE, so a migration would continue without the unmarked pages.
        let is_dirty_log = matches!(self, Self::DirtyLog(_));
        is_dirty_log || matches!(self, Self::Wire(_) | Self::WorkerGone | Self::Lease(LeaseError::Ending))
    }
}

impl From<WorkerGone> for SessionError {
    fn from(_: WorkerGone) -> Self {
        Self::WorkerGone
    }
}
