//! An in-flight log that a front-end makes and keeps.

use std::os::fd::AsFd;

use super::format::Format;
use super::passed::memfd;
use super::{FrontEnd, Rig, code};

/// An in-flight log as a front-end keeps it: the body of SET_INFLIGHT_FD, and the memory.
pub struct Log(Vec<u8>, std::os::fd::OwnedFd);

impl Log {
    /// A log for one queue of 256 entries, as a front-end may make it.
    pub fn new() -> Self {
        Self::with(16_384, 256)
    }

    /// A log for one queue of 256 entries, as a server makes it for a front-end that requests 128.
    pub fn larger_than_asked() -> Self {
        Self::with(32 + 256 * 32 + 32 + 8, 128)
    }

    fn with(bytes: u64, queue_size: u16) -> Self {
        let sizes = [1, queue_size, 0, 0].into_iter().flat_map(u16::to_ne_bytes);
        let body = [bytes, 0].into_iter().flat_map(u64::to_ne_bytes).chain(sizes).collect();
        Self(body, memfd(bytes))
    }

    pub fn give(&self, front_end: &FrontEnd) {
        front_end.ok(code::SET_INFLIGHT_FD, &self.0, &[self.1.as_fd()]);
    }

    /// A front-end with this log and the offered protocol features that `protocol` selects.
    pub fn front_end(&self, rig: &Rig, format: Format, protocol: u64) -> FrontEnd {
        let front_end = rig.connect();
        let offered = front_end.ask_u64(code::GET_FEATURES);
        let offered_protocol = front_end.ask_u64(code::GET_PROTOCOL_FEATURES);
        front_end.send(code::SET_PROTOCOL_FEATURES, &(offered_protocol & protocol).to_ne_bytes(), &[]);
        front_end.ok(code::SET_FEATURES, &(format.usual() & offered).to_ne_bytes(), &[]);
        self.give(&front_end);
        front_end
    }
}
