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
        /** The request that was sent. */
        request: FrontendReq,
        /** The time allowed. */
        limit: Duration,
    },
    /// The connection ended.
    #[error("the back-end closed the connection during {request:?}")]
    Closed {
        /** The request that was sent. */
        request: FrontendReq,
    },
    /// The message received is not a reply to this request.
    #[error(
        "the back-end answered {request:?} with message {code} and flags {flags:#x}, which is not a reply to it"
    )]
    NotAReply {
        /** The request that was sent. */
        request: FrontendReq,
        /** The code of the received message. */
        code: u32,
        /** The flags of the received message. */
        flags: u32,
    },
    /// The reply has a wrong length.
    #[error(
        "the back-end answered {request:?} with {size_bytes} bytes, but the reply must have {wanted_bytes}"
    )]
    Size {
        /** The request that was sent. */
        request: FrontendReq,
        /** Size of the reply. */
        size_bytes: u32,
        /** The required size. */
        wanted_bytes: usize,
    },
    /// The reply came with descriptors that it must not have, or with more than one.
    #[error("the back-end answered {request:?} with file descriptors that its reply must not carry")]
    Descriptors {
        /** The request that was sent. */
        request: FrontendReq,
    },
    /// The back-end reports failure (REPLY_ACK).
    #[error("the back-end refused {request:?} with {value} (0 would mean success)")]
    Refused {
        /** The request that was sent. */
        request: FrontendReq,
        /** The value in the reply; 0 would be success. */
        value: u64,
    },
    /// The device was dropped during the exchange.
    #[error("stopped during {request:?}, because the device was dropped")]
    Stopped {
        /** The request that was sent. */
        request: FrontendReq,
    },
    /// A system call on the socket failed.
    #[error("{request:?} cannot be sent, or its reply cannot be received")]
    Io {
        /** The request that was sent. */
        request: FrontendReq,
        /** The kernel's error. */
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
