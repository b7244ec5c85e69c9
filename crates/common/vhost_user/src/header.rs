//! A message's header: three 32-bit values in native byte order.
//!
//! Spec: vhost-user, "Header". The `vhost` crate keeps its header type private.

use vhost::vhost_user::message::{MAX_MSG_SIZE, VhostUserHeaderFlag};

use crate::error::FrameError;

/// Length of a header: code, flags, size.
pub const HEADER_BYTES: usize = 12;
/// Largest body of a message.
pub const MAX_BODY_BYTES: usize = MAX_MSG_SIZE;

const VERSION: u32 = 1;
const VERSION_MASK: u32 = VhostUserHeaderFlag::VERSION.bits();
const REPLY: u32 = VhostUserHeaderFlag::REPLY.bits();
const NEED_REPLY: u32 = VhostUserHeaderFlag::NEED_REPLY.bits();

/// The three values, as they are on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The request's code.
    pub code: u32,
    /// The version, whether this is a reply, and whether the sender wants a reply.
    pub flags: u32,
    /// The body's size in bytes.
    pub size: u32,
}

impl Header {
    /// Flags of a request that needs no acknowledgement.
    pub const REQUEST: u32 = VERSION;
    /// Flags of a request whose success or failure must be acknowledged (REPLY_ACK).
    pub const REQUEST_WITH_ACK: u32 = VERSION | NEED_REPLY;
    /// Flags of a reply.
    pub const REPLY: u32 = VERSION | REPLY;

    /// Reads the three values.
    #[must_use]
    pub fn from_bytes(bytes: [u8; HEADER_BYTES]) -> Self {
        let [c0, c1, c2, c3, f0, f1, f2, f3, s0, s1, s2, s3] = bytes;
        Self {
            code: u32::from_ne_bytes([c0, c1, c2, c3]),
            flags: u32::from_ne_bytes([f0, f1, f2, f3]),
            size: u32::from_ne_bytes([s0, s1, s2, s3]),
        }
    }

    /// The bytes on the wire.
    #[must_use]
    pub fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let [[c0, c1, c2, c3], [f0, f1, f2, f3], [s0, s1, s2, s3]] =
            [self.code, self.flags, self.size].map(u32::to_ne_bytes);
        [c0, c1, c2, c3, f0, f1, f2, f3, s0, s1, s2, s3]
    }

    /// Whether this is a request of the known version, not a reply.
    #[must_use]
    pub fn is_request(self) -> bool {
        self.flags & (VERSION_MASK | REPLY) == Self::REQUEST
    }

    /// Whether this is a reply of the known version to request `code`.
    #[must_use]
    pub fn is_reply_to(self, code: u32) -> bool {
        self.code == code && self.flags & (VERSION_MASK | REPLY) == Self::REPLY
    }

    /// Whether the sender waits for an acknowledgement of success or failure.
    #[must_use]
    pub fn wants_reply(self) -> bool {
        self.flags & NEED_REPLY != 0
    }

    /// Checks version and size.
    ///
    /// # Errors
    /// [`FrameError::Version`], [`FrameError::TooLarge`].
    pub fn checked_body_bytes(self) -> Result<usize, FrameError> {
        let Self { code, flags, size } = self;
        if flags & VERSION_MASK != VERSION {
            return Err(FrameError::Version { code, version: flags & VERSION_MASK, flags });
        }
        let bytes = usize::try_from(size).ok().filter(|&bytes| bytes <= MAX_BODY_BYTES);
        bytes.ok_or(FrameError::TooLarge { code, size, max: MAX_BODY_BYTES })
    }
}

/// Header and body of a message whose body has two parts (the second may be empty).
#[must_use]
pub fn message_bytes(code: u32, flags: u32, body: &[u8], rest: &[u8]) -> Vec<u8> {
    let size = u32::try_from(body.len() + rest.len()).unwrap_or(u32::MAX);
    [&Header { code, flags, size }.to_bytes()[..], body, rest].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_is_code_flags_and_size_in_native_order() {
        let bytes = message_bytes(24, Header::REQUEST_WITH_ACK, &[1, 2], &[3]);
        assert_eq!(bytes, [&[24_u32, 9, 3].map(u32::to_ne_bytes).concat()[..], &[1, 2, 3]].concat());
        let header = Header::from_bytes(*bytes.first_chunk().unwrap());
        assert_eq!(header, Header { code: 24, flags: 9, size: 3 });
        assert!(header.is_request() && header.wants_reply());
    }

    #[test]
    fn requests_and_replies_are_told_apart_and_need_the_known_version() {
        let of = |code, flags| Header { code, flags, size: 0 };
        assert!(of(1, 1).is_request() && !of(1, 1).wants_reply());
        assert!(of(1, 5).is_reply_to(1) && of(1, 13).is_reply_to(1));
        for flags in [0, 2, 3, 4, 6, 7] {
            assert!(!of(1, flags).is_request() && !of(1, flags).is_reply_to(1), "{flags}");
        }
        assert!(!of(1, 5).is_request() && !of(1, 1).is_reply_to(1) && !of(2, 5).is_reply_to(1));
    }

    #[test]
    fn version_and_size_are_checked_to_the_limit() {
        let of = |flags, size| Header { code: 7, flags, size }.checked_body_bytes();
        assert_eq!(of(1, 4096).unwrap(), 4096);
        assert_eq!(of(5, 0).unwrap(), 0);
        for size in [4097, u32::MAX] {
            let error = of(1, size).unwrap_err();
            assert!(matches!(error, FrameError::TooLarge { code: 7, max: 4096, .. }), "{error}");
            assert!(error.to_string().contains(&size.to_string()), "{error}");
        }
        for flags in [0, 2, 3, 6] {
            assert!(matches!(of(flags, 0), Err(FrameError::Version { code: 7, .. })), "{flags}");
        }
    }
}
