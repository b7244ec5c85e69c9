//! Why a message cannot be received or sent.

use std::io;

/// Why a message cannot be received or sent. The two ends are then out of step, and the connection is unusable.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// The peer closed the connection: between two messages if `bytes` is 0.
    #[error("the peer closed the connection{}", inside(*bytes))]
    Closed {
        /** Bytes of the message that had arrived. */
        bytes: usize,
    },
    /// The version is not 1, the only version that exists.
    #[error("request {code} has message version {version}, but only version 1 is defined (flags {flags:#x})")]
    Version {
        /** The request's code. */
        code: u32,
        /** The version in the message's header. */
        version: u32,
        /** The flags in the message's header. */
        flags: u32,
    },
    /// The header announces too large a body.
    #[error("request {code} announces a body of {size} bytes; at most {max} are allowed")]
    TooLarge {
        /** The request's code. */
        code: u32,
        /** The size in the message's header. */
        size: u32,
        /** The limit. */
        max: usize,
    },
    /// The body has more bytes than the header announces.
    #[error("request {code} has {bytes} bytes, but its header announces {whole}")]
    TooLong {
        /** The request's code. */
        code: u32,
        /** Number of bytes given. */
        bytes: usize,
        /** Size of header and body. */
        whole: usize,
    },
    /// The message has more descriptors than any message may carry.
    #[error("a message came with {count} file descriptors; at most {max} are allowed")]
    TooManyFds {
        /** Number of descriptors that arrived. */
        count: usize,
        /** The limit. */
        max: usize,
    },
    /// The kernel closed descriptors, because this process cannot hold any more.
    #[error(
        "the kernel dropped file descriptors of a message, because this process has too many open: raise \
         RLIMIT_NOFILE"
    )]
    FdsLost,
    /// A system call on the socket failed.
    #[error("the socket failed")]
    Io(#[from] io::Error),
}

fn inside(bytes: usize) -> String {
    if bytes == 0 { String::new() } else { format!(" after {bytes} bytes of a message") }
}

impl From<rustix::io::Errno> for FrameError {
    fn from(errno: rustix::io::Errno) -> Self {
        Self::Io(errno.into())
    }
}
