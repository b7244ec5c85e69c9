//! A front-end's dirty log and its messages; and a page-by-page comparison of guest memory.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, OwnedFd};

use guest_mem::{DirtyLog, LOG_PAGE_BYTES, MemoryView};

use virtqueue::RingLayout;

use super::passed::memfd;
use super::{FrontEnd, MIB, code, feature, vring_addr};

/// The memory of each guest in these tests.
pub const MEMORY_BYTES: u64 = 16 * MIB;
const PAGE: usize = 0x1000;
const _: () = assert!(PAGE as u64 == LOG_PAGE_BYTES);
const F_LOG: u32 = 1;

/// A log that the test shares with the server.
pub struct Log {
    pub fd: OwnedFd,
    bytes: u64,
    bits: DirtyLog,
}

impl Log {
    /// Exactly large enough for [`MEMORY_BYTES`].
    pub fn new() -> Self {
        Self::of_bytes(MEMORY_BYTES / LOG_PAGE_BYTES / 8)
    }

    pub fn of_bytes(bytes: u64) -> Self {
        let fd = memfd(bytes);
        let bits = DirtyLog::map(fd.try_clone().unwrap(), bytes, 0).unwrap();
        Self { fd, bytes, bits }
    }

    pub fn body(&self) -> Vec<u8> {
        log_body(self.bytes, 0)
    }

    /// Sends SET_LOG_BASE, which always has a reply.
    pub fn give(&self, front_end: &FrontEnd) {
        front_end.send(code::SET_LOG_BASE, &self.body(), &[self.fd.as_fd()]);
        let reply = front_end.receive().expect("an answer");
        assert_eq!((reply.code, reply.flags, reply.body), (code::SET_LOG_BASE, 1 | 4, self.body()));
    }

    /// Sets all bits: a restarted migration copies everything.
    pub fn fill(&self) {
        rustix::io::pwrite(&self.fd, &vec![0xff; usize::try_from(self.bytes).unwrap()], 0).unwrap();
    }

    /// Clears the log; returns the addresses of its pages.
    pub fn take(&self) -> BTreeSet<u64> {
        self.bits.take().into_iter().collect()
    }
}

pub fn log_body(bytes: u64, offset_bytes: u64) -> Vec<u8> {
    [bytes.to_ne_bytes(), offset_bytes.to_ne_bytes()].concat()
}

/// Sends SET_FEATURES with or without LOG_ALL.
pub fn log_all(front_end: &FrontEnd, features: u64, on: bool) {
    let offered = front_end.ask_u64(code::GET_FEATURES);
    let all = if on { feature::LOG_ALL } else { 0 };
    front_end.ok(code::SET_FEATURES, &(features & offered | all).to_ne_bytes(), &[]);
}

/// Sends SET_VRING_ADDR as before, with or without logging of the used ring at `log_addr`.
pub fn log_ring(front_end: &FrontEnd, &(index, layout): &(u16, RingLayout), log_addr: Option<u64>) {
    let mut body = vring_addr(index, &layout);
    body[4..8].copy_from_slice(&log_addr.map_or(0, |_| F_LOG).to_ne_bytes());
    body[32..40].copy_from_slice(&log_addr.unwrap_or(0).to_ne_bytes());
    front_end.ok(code::SET_VRING_ADDR, &body, &[]);
}

/// Sends QEMU's messages for the start or the end of a migration of these rings.
pub fn begin(front_end: &FrontEnd, rings: &[(u16, RingLayout)], features: u64, log: &Log) {
    log.give(front_end);
    log_all(front_end, features, true);
    rings.iter().for_each(|ring| log_ring(front_end, ring, Some(ring.1.used.0)));
}

pub fn end(front_end: &FrontEnd, rings: &[(u16, RingLayout)], features: u64) {
    log_all(front_end, features, false);
    rings.iter().for_each(|ring| log_ring(front_end, ring, None));
}

/// All of the guest's memory.
pub fn contents(view: &MemoryView) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(MEMORY_BYTES).unwrap()];
    view.read(0, &mut bytes).unwrap();
    bytes
}

/// Addresses of the pages that differ.
pub fn changed(before: &[u8], after: &[u8]) -> BTreeSet<u64> {
    let pages = before.chunks(PAGE).zip(after.chunks(PAGE)).zip((0..).step_by(PAGE));
    pages.filter(|((old, new), _)| old != new).map(|(_, addr)| addr).collect()
}

pub fn page_of(addr: u64) -> u64 {
    addr / LOG_PAGE_BYTES * LOG_PAGE_BYTES
}

/// Copies one page.
pub fn copy_page(view: &MemoryView, addr: u64, to: &mut [u8]) {
    let at = usize::try_from(addr).unwrap();
    view.read(addr, &mut to[at..at + PAGE]).unwrap();
}
