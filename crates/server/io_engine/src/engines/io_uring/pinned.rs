//! Registers guest memory with the kernel as fixed buffers. This pins the memory once, so no call has to pin pages.
//!
//! `use_memory → region → pieces of at most 1 GiB → the kernel's table`; a transfer inside one piece uses a fixed
//! buffer
//!
//! Off by default (`pin_guest_memory`), because it conflicts with other features:
//!
//! - **Balloon, free-page reporting, virtio-mem** punch holes into the guest's memory file. The kernel keeps using the
//!   old pages: a read succeeds, and the guest does not see the data. This is silent corruption. Never pin a guest with
//!   any of these devices.
//! - **Overcommit and KSM**: all guest memory is resident and locked, and the kernel counts it once per worker
//!   (`RLIMIT_MEMLOCK`, for users other than root). Pages are not swapped, merged or migrated.
//! - The worker waits at the start until the kernel has touched all of the memory.
//!
//! Announcements of a region are counted, so a region in both the old and the new memory stays registered. A region
//! stays mapped while it is in the table, so no other memory can get its addresses. A region that the kernel refuses is
//! used unpinned. Pages of a removed piece stay pinned until the calls on them end: the kernel releases a registered
//! resource when it "is not used anymore" (io_uring_register(2), resource tagging).

use std::io;
use std::sync::Arc;

use guest_mem::{GuestMemory, Region};
use io_uring::Submitter;

use crate::backend::{Buffers, Call};

/// The kernel's limit per buffer (`SZ_1G`, io_uring/rsrc.c).
const PIECE_BYTES: u64 = 1 << 30;
/// Entries in the kernel's table: at least 4 TiB of guest memory if its regions are large. The kernel's limit is 16384.
pub(super) const MAX_PIECES: u16 = 4096;

/// A range of host addresses, and its index in the kernel's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    start: usize,
    end: usize,
    place: u16,
}

#[derive(Debug)]
struct Known {
    region: Arc<Region>,
    users: usize,
    /// Table indices; empty if the kernel refused the region.
    places: Vec<u16>,
}

/// The table of registered memory.
#[derive(Debug)]
pub(super) struct Pinned {
    regions: Vec<Known>,
    /// Sorted by address.
    pieces: Vec<Piece>,
    free: Vec<u16>,
}

impl Pinned {
    pub fn new() -> Self {
        Self { regions: Vec::new(), pieces: Vec::new(), free: (0..MAX_PIECES).rev().collect() }
    }

    /// The table index of the piece that contains the call's only buffer.
    #[inline]
    pub fn piece_of(&self, call: &Call) -> Option<u16> {
        let Buffers::One { base, len_bytes } = call.buffers else { return None };
        let after = self.pieces.partition_point(|piece| piece.start <= base.addr());
        let piece = self.pieces.get(after.checked_sub(1)?)?;
        (base.addr() + len_bytes as usize <= piece.end).then_some(piece.place)
    }

    /// Counts the regions of `memory`, and registers new ones with every ring.
    pub fn use_memory(&mut self, rings: &[Submitter<'_>], memory: &GuestMemory) {
        let mut refused: Option<(io::Error, u64)> = None;
        for region in memory.regions() {
            if let Some(known) = self.regions.iter_mut().find(|known| Arc::ptr_eq(&known.region, region)) {
                known.users += 1;
                continue;
            }
            let places = self.register(rings, region).unwrap_or_else(|error| {
                let bytes = refused.as_ref().map_or(0, |(_, bytes)| *bytes);
                refused = Some((error, bytes + region.spec().size_bytes));
                Vec::new()
            });
            self.regions.push(Known { region: Arc::clone(region), users: 1, places });
        }
        if let Some((error, bytes)) = refused {
            let limit = locked_memory_limit();
            tracing::warn!(
                %error,
                "guest memory is not pinned: the kernel refused to register {bytes} bytes; the limit on locked memory \
                 (RLIMIT_MEMLOCK, ulimit -l) is {limit}, and the memory must not be a file on a disk; I/O \
                 continues without pinning"
            );
        }
    }

    /// Withdraws one announcement of `memory`.
    pub fn forget_memory(&mut self, rings: &[Submitter<'_>], memory: &GuestMemory) {
        for region in memory.regions() {
            let Some(at) = self.regions.iter().position(|known| Arc::ptr_eq(&known.region, region)) else {
                debug_assert!(false, "memory is forgotten more often than it was announced");
                continue;
            };
            self.regions[at].users -= 1;
            if self.regions[at].users == 0 {
                let Known { region, places, .. } = self.regions.swap_remove(at);
                self.remove(rings, &places);
                drop(region); // not before the kernel has forgotten its addresses
            }
        }
    }

    #[cfg(test)]
    pub fn pieces(&self) -> usize {
        self.pieces.len()
    }

    /// Registers all of `region` or nothing.
    fn register(&mut self, rings: &[Submitter<'_>], region: &Region) -> io::Result<Vec<u16>> {
        let (base, size_bytes) = region.host_range();
        let mut places = Vec::new();
        for (offset, len) in pieces_of(size_bytes) {
            let registered = self.free.pop().ok_or_else(table_full).and_then(|place| {
                places.push(place);
                let iov_base = base.as_ptr().wrapping_add(offset).cast();
                rings.iter().try_for_each(|ring| set(ring, place, libc::iovec { iov_base, iov_len: len }))
            });
            if let Err(error) = registered {
                self.remove(rings, &places);
                return Err(error);
            }
            let start = base.as_ptr().addr() + offset;
            let piece = Piece { start, end: start + len, place: places[places.len() - 1] };
            let at = self.pieces.partition_point(|other| other.start < start);
            self.pieces.insert(at, piece);
        }
        Ok(places)
    }

    fn remove(&mut self, rings: &[Submitter<'_>], places: &[u16]) {
        self.pieces.retain(|piece| !places.contains(&piece.place));
        for &place in places {
            let nothing = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
            let removed = rings.iter().try_for_each(|ring| set(ring, place, nothing));
            if let Err(error) = removed {
                tracing::warn!(%error, "guest memory that is no longer used stays pinned by io_uring");
            }
            self.free.push(place);
        }
    }
}

fn table_full() -> io::Error {
    io::Error::other(format!("guest memory has more than {MAX_PIECES} pieces"))
}

fn set(ring: &Submitter<'_>, place: u16, buffer: libc::iovec) -> io::Result<()> {
    // SAFETY: 1. mapped: `Known` holds the region until its table entry was overwritten or the ring is gone; the kernel
    // holds the pages themselves, so an error here would expose stale data, never another process's memory.
    unsafe { ring.register_buffers_update(place.into(), &[buffer], None) }
}

/// Offset and length of each piece of a region.
fn pieces_of(size_bytes: u64) -> impl Iterator<Item = (usize, usize)> {
    (0..size_bytes.div_ceil(PIECE_BYTES)).map(move |index| {
        let offset_bytes = index * PIECE_BYTES;
        #[allow(clippy::cast_possible_truncation)] // the region is mapped: its size fits `usize`
        let piece = (offset_bytes as usize, PIECE_BYTES.min(size_bytes - offset_bytes) as usize);
        piece
    })
}

/// The text of `RLIMIT_MEMLOCK` for messages.
pub(super) fn locked_memory_limit() -> String {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
    limit.map_or_else(|| "unlimited".to_owned(), |bytes| format!("{bytes} bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn region_of_two_and_a_half_gib_is_three_pieces_of_at_most_one() {
        let pieces: Vec<_> = pieces_of(5 << 29).collect();
        assert_eq!(pieces, [(0, 1 << 30), (1 << 30, 1 << 30), (2 << 30, 1 << 29)]);
    }

    #[test]
    fn region_of_exactly_one_gib_is_one_piece() {
        assert_eq!(pieces_of(1 << 30).collect::<Vec<_>>(), [(0, 1 << 30)]);
    }

    #[test]
    fn buffer_across_two_pieces_is_in_neither() {
        let mut pinned = Pinned::new();
        pinned.pieces = vec![
            Piece { start: 0x1000, end: 0x3000, place: 7 },
            Piece { start: 0x3000, end: 0x4000, place: 9 },
        ];
        let place_of = |start, len_bytes| {
            let buffers = Buffers::One { base: std::ptr::without_provenance_mut(start), len_bytes };
            let verb = crate::backend::Verb::Read;
            pinned.piece_of(&Call { verb, flags: 0, offset_bytes: 0, len_bytes: 0, buffers })
        };
        assert_eq!([place_of(0x1000, 0x2000), place_of(0x3fff, 1)], [Some(7), Some(9)]);
        assert_eq!([place_of(0x2000, 0x1001), place_of(0xfff, 1), place_of(0x4000, 1)], [None; 3]);
    }
}
