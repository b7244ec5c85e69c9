//! Decides whether the server may have missed the guest's choice of cache mode, because the ring ran in another server.
//!
//! - The server knows a ring if this session or an earlier one of the disk has opened it (`write_cache.rs`), or if the
//!   guest has chosen a mode in this session.
//! - The server does not know a ring that ran in another server, even if that ring has once failed to start in this
//!   one. If such a ring is in use, writes are durable until the guest chooses (`ring_start.rs`).

use virtio_blk::Negotiated;

use super::{Session, Vring};
use crate::data_path::disk::write_cache::{MemoryFile, StartingRing};
use crate::data_path::queue::ring_start::assume_writethrough;

/// Bits of a ring base that are 0 until the ring is used, in both formats: all except a packed ring's wrap counters.
const USED_BITS: u32 = 0x7fff_7fff;

impl Session {
    /// Whether the guest of queue `at` may have disabled its cache in another server. Only relevant if the ring is in
    /// use.
    pub(super) fn may_hide_a_choice(&self, at: usize, negotiated: Negotiated) -> bool {
        if !negotiated.has_config_wce() {
            return false;
        }
        self.look_at_other_rings(at);
        !self.is_known(at)
    }

    /// Records that queue `at` was opened, if it runs.
    pub(super) fn note_opened(&mut self, at: usize) {
        if self.vrings[at].running.is_some() {
            self.disk.guest_cache().ring_opened(at, self.memory_file(at));
            self.vrings[at].is_known = true;
        }
    }

    fn is_known(&self, at: usize) -> bool {
        let (session, memory, base) = (self.shared.id(), self.memory_file(at), self.vrings[at].base);
        self.vrings[at].is_known
            || self.disk.guest_cache().has_seen_all_choices(&StartingRing {
                queue: at,
                session,
                memory,
                base,
            })
    }

    /// The file that contains the ring.
    fn memory_file(&self, at: usize) -> Option<MemoryFile> {
        let addr = self.vrings[at].layout(&self.memory)?.descriptors.0;
        let holds = |start: u64, end: u64| (start..end).contains(&addr);
        let mut regions = self.memory.regions().iter();
        let region = regions.find(|region| holds(region.spec().guest_addr.0, region.guest_end()))?;
        MemoryFile::of(region.fd())
    }

    /// Rings start one by one. If the base of a later ring shows that the later ring ran in another server, the guest's
    /// mode is unknown for this ring too, even if the guest has not used this ring yet.
    fn look_at_other_rings(&self, at: usize) {
        let follows =
            |vring: &Vring| vring.kick.is_some() && vring.running.is_none() && vring.base & USED_BITS != 0;
        let is_in_doubt = |other: usize| other != at && follows(&self.vrings[other]) && !self.is_known(other);
        if !self.disk.ignores_flushes() && (0..self.vrings.len()).any(is_in_doubt) {
            assume_writethrough(&self.disk, &self.shared);
        }
    }
}
