//! Why a message to the back-end failed.

use std::io;
use std::time::Duration;

use vhost::vhost_user::message::FrontendReq;

/// Why a message to the back-end failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MessageError {
    /// The exchange did not finish within [`crate::Options::timeout`], or within the time left for a
    /// reconnect.
    #[error("the back-end did not accept or answer {request:?} within {} ms", limit.as_millis())]
    TimedOut {
        /** What was sent. */
        request: FrontendReq,
        /** The time allowed. */
        limit: Duration,
    },
    /// The connection ended.
    #[error("the back-end closed the connection at {request:?}")]
    Closed {
        /** What was sent. */
        request: FrontendReq,
    },
    /// The message received is not a reply to this request.
    #[error("the back-end answered {request:?} with message {code}, flags {flags:#x}: not a reply to it")]
    NotAReply {
        /** What was sent. */
        request: FrontendReq,
        /** As received. */
        code: u32,
        /** As received. */
        flags: u32,
    },
    /// The reply has a wrong length.
    #[error("the back-end answered {request:?} with {size_bytes} bytes, but {wanted_bytes} are needed")]
    Size {
        /** What was sent. */
        request: FrontendReq,
        /** As received. */
        size_bytes: u32,
        /** Required size. */
        wanted_bytes: usize,
    },
    /// The reply came with descriptors that it must not have, or with more than one.
    #[error("the back-end answered {request:?} with file descriptors, which its answer must not have")]
    Descriptors {
        /** What was sent. */
        request: FrontendReq,
    },
    /// The back-end says that it failed (REPLY_ACK).
    #[error("the back-end refused {request:?} with {value}")]
    Refused {
        /** What was sent. */
        request: FrontendReq,
        /** As received; success is 0. */
        value: u64,
    },
    /// The device was dropped during the exchange.
    #[error("stopped at {request:?}")]
    Stopped {
        /** What was sent. */
        request: FrontendReq,
    },
    /// The kernel refused.
    #[error("{request:?} cannot be sent or answered")]
    Io {
        /** What was sent. */
        request: FrontendReq,
        /** From the kernel. */
        #[source]
        source: io::Error,
    },
}

impl MessageError {
    /// Whether the connection can still be used.
    pub(crate) fn is_refusal(&self) -> bool {
        matches!(self, Self::Refused { .. })
    }
}
