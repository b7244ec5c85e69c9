//! Layout of a queue's private data, in memory that the device can access but requests cannot refer to.
//!
//! ```text
//! ring 0 | ring 1 | slots: 128 bytes × queue size | segments: 256 × queue size | tables: × queue size
//! slot:  header 16 | status of ring 0, of ring 1 | … 64: table of up to 4 descriptors
//! ```
//!
//! - There are two rings, because a back-end that was abandoned may still write to the ring that it was given. Each
//!   ring has its own status bytes.
//! - A short table is next to its header, so that the requests of a busy queue share few pages.
//! - All accesses are atomic; each value that the device writes is read once.
//!
//! Spec: virtio 1.3 §2.7.5.3, §5.2.6.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use guest_mem::{AccessError, Address, GuestAddress, GuestMemory, GuestRange, MemoryView, SharedSlice};
use virtio_blk::{HEADER_BYTES, MAX_SEGMENTS, RequestHeader, SEGMENT_BYTES, Segment};
use virtqueue::{DriverQueue, RingFault, RingFeatures, RingLayout};

/// Limit of buffers per request, unless the device accepts fewer: the value that QEMU's own virtio-blk announces for a
/// queue of 128.
pub(crate) const DEFAULT_MAX_SEGMENTS: u16 = 128;

const LINE_BYTES: u64 = 64;
const SLOT_BYTES: usize = 128;
const SLOT_WORDS: usize = SLOT_BYTES / 8;
const STATUS_OFFSET_BYTES: usize = HEADER_BYTES;
const DESCRIPTOR_BYTES: u64 = 16;
/// Descriptors that fit into a slot's table.
const SHORT_TABLE: usize = 4;
const SEGMENTS_BYTES: usize = MAX_SEGMENTS * SEGMENT_BYTES;
const SEGMENTS_WORDS: usize = SEGMENTS_BYTES / 8;

#[allow(clippy::cast_possible_truncation)] // 16
const HEADER_LEN: u32 = HEADER_BYTES as u32;

/// A status byte's value before the device writes it; virtio does not define this value.
const NO_STATUS: u8 = 0xff;

/// Size of a queue's area in a region: a multiple of 4096.
pub(crate) fn area_bytes(queue_size: u16, max_segments: u16) -> u64 {
    AreaLayout::new(GuestAddress(0), queue_size, max_segments).size_bytes()
}

/// Identifies one of a queue's two rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// The first ring.
    A,
    /// The second ring.
    B,
}

impl Side {
    pub(crate) fn other(self) -> Self {
        match self {
            Self::A => Self::B,
            Self::B => Self::A,
        }
    }

    #[inline]
    pub(crate) fn number(self) -> usize {
        usize::from(self == Self::B)
    }
}

/// Computes the addresses of the area's parts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AreaLayout {
    start: u64,
    queue_size: u16,
    max_segments: u16,
}

impl AreaLayout {
    /// The layout for a queue of `queue_size` whose requests have up to `max_segments` buffers. `start` must
    /// be a multiple of 4096.
    pub(crate) fn new(start: GuestAddress, queue_size: u16, max_segments: u16) -> Self {
        Self { start: start.raw_value(), queue_size, max_segments }
    }

    /// Makes a new, empty ring in the area. Its tables may be as long as the area allows.
    ///
    /// # Errors
    /// [`RingFault`].
    pub(crate) fn make_ring(
        &self,
        side: Side,
        view: &MemoryView,
        features: RingFeatures,
    ) -> Result<DriverQueue, RingFault> {
        let mut ring = DriverQueue::new(view, self.ring(side), features)?;
        // The owner needs no signals until it goes to sleep.
        ring.disable_interrupts();
        Ok(ring.with_indirect_limit(self.max_segments + 2))
    }

    /// The area's size: a multiple of 4096.
    pub(crate) fn size_bytes(&self) -> u64 {
        (self.tables() + u64::from(self.queue_size) * self.table_bytes() - self.start).next_multiple_of(4096)
    }

    /// The addresses of a ring's three parts, split or packed (virtio 1.3 §2.7, §2.8).
    pub(crate) fn ring(&self, side: Side) -> RingLayout {
        let descriptors = self.start + side.number() as u64 * self.ring_bytes();
        let avail = descriptors + DESCRIPTOR_BYTES * u64::from(self.queue_size);
        // The device writes to the used ring, so the used ring has its own cache lines, apart from data that the device
        // only reads.
        let used = avail + (6 + 2 * u64::from(self.queue_size)).next_multiple_of(LINE_BYTES);
        RingLayout {
            queue_size: self.queue_size,
            descriptors: GuestAddress(descriptors),
            avail: GuestAddress(avail),
            used: GuestAddress(used),
        }
    }

    fn ring_bytes(&self) -> u64 {
        let size = u64::from(self.queue_size);
        let lines = |bytes: u64| bytes.next_multiple_of(LINE_BYTES);
        (DESCRIPTOR_BYTES * size + lines(6 + 2 * size) + lines(6 + 8 * size)).next_multiple_of(4096)
    }

    fn slots(&self) -> u64 {
        self.start + 2 * self.ring_bytes()
    }

    fn segments(&self) -> u64 {
        self.slots() + (SLOT_BYTES * usize::from(self.queue_size)) as u64
    }

    fn tables(&self) -> u64 {
        self.segments() + (SEGMENTS_BYTES * usize::from(self.queue_size)) as u64
    }

    /// An odd number of cache lines, so that neighbouring tables do not compete for the same cache sets.
    fn table_bytes(&self) -> u64 {
        let lines = (DESCRIPTOR_BYTES * (u64::from(self.max_segments) + 2)).div_ceil(LINE_BYTES);
        (lines | 1) * LINE_BYTES
    }
}

/// A queue's area, mapped.
#[derive(Debug)]
pub(crate) struct Area {
    layout: AreaLayout,
    /// A view of the area's region only, which contains all rings and tables.
    view: MemoryView,
    slot_words: SharedSlice<u64>,
    slot_bytes: SharedSlice<u8>,
    segment_words: SharedSlice<u64>,
    /// The ring whose status bytes are in use.
    pub side: Side,
}

impl Area {
    /// # Errors
    /// [`AccessError`] if the layout is not entirely inside `memory`.
    pub(crate) fn map(layout: AreaLayout, memory: Arc<GuestMemory>) -> Result<Self, AccessError> {
        let queue_size = usize::from(layout.queue_size);
        let (slots, segments) = (GuestAddress(layout.slots()), GuestAddress(layout.segments()));
        memory.check(layout.start, layout.size_bytes())?;
        Ok(Self {
            layout,
            slot_words: memory.shared_slice(slots, queue_size * SLOT_WORDS)?,
            slot_bytes: memory.shared_slice(slots, queue_size * SLOT_BYTES)?,
            segment_words: memory.shared_slice(segments, queue_size * SEGMENTS_WORDS)?,
            view: MemoryView::new(memory),
            side: Side::A,
        })
    }

    /// The view for a ring in this area.
    pub(crate) fn view(&self) -> &MemoryView {
        &self.view
    }

    /// Header of slot `slot`.
    #[inline]
    pub(crate) fn header(&self, slot: u16) -> GuestRange {
        GuestRange { addr: self.slot_addr(slot), len_bytes: HEADER_LEN }
    }

    /// Status byte of slot `slot`, for the ring in use.
    #[inline]
    pub(crate) fn status(&self, slot: u16) -> GuestRange {
        let addr = self.slot_addr(slot) + (STATUS_OFFSET_BYTES + self.side.number()) as u64;
        GuestRange { addr, len_bytes: 1 }
    }

    /// The first `count` segments of slot `slot` (at most [`MAX_SEGMENTS`]).
    pub(crate) fn segments(&self, slot: u16, count: usize) -> GuestRange {
        let addr = self.layout.segments() + (usize::from(slot) * SEGMENTS_BYTES) as u64;
        #[allow(clippy::cast_possible_truncation)] // at most `SEGMENTS_BYTES`
        let len_bytes = (count.min(MAX_SEGMENTS) * SEGMENT_BYTES) as u32;
        GuestRange { addr, len_bytes }
    }

    /// The address of a table of `entries` entries for slot `slot`.
    #[inline]
    pub(crate) fn table(&self, slot: u16, entries: usize) -> GuestAddress {
        if entries <= SHORT_TABLE {
            GuestAddress(self.slot_addr(slot) + LINE_BYTES)
        } else {
            GuestAddress(self.layout.tables() + u64::from(slot) * self.layout.table_bytes())
        }
    }

    /// Writes the header, and a status that the device must overwrite.
    #[inline]
    pub(crate) fn store_header(&self, slot: u16, header: RequestHeader) {
        let word = usize::from(slot) * SLOT_WORDS;
        // Relaxed: the later publication in the ring makes all earlier stores visible.
        self.slot_words.store(word, u64::from(header.kind), Relaxed);
        self.slot_words.store(word + 1, header.sector, Relaxed);
        self.slot_bytes.store(self.status_index(slot), NO_STATUS, Relaxed);
    }

    /// Writes segments, at most [`MAX_SEGMENTS`].
    pub(crate) fn store_segments(&self, slot: u16, segments: &[Segment]) {
        let first = usize::from(slot) * SEGMENTS_WORDS;
        for (at, segment) in segments.iter().take(MAX_SEGMENTS).enumerate() {
            let [low, high] = segment.to_words();
            self.segment_words.store(first + 2 * at, low, Relaxed);
            self.segment_words.store(first + 2 * at + 1, high, Relaxed);
        }
    }

    /// The status byte; valid only after the ring has shown that the device has completed the request.
    #[inline]
    pub(crate) fn load_status(&self, slot: u16) -> u8 {
        // Relaxed: the ring was read with acquire before.
        self.slot_bytes.load(self.status_index(slot), Relaxed)
    }

    #[inline]
    fn status_index(&self, slot: u16) -> usize {
        usize::from(slot) * SLOT_BYTES + STATUS_OFFSET_BYTES + self.side.number()
    }

    #[inline]
    fn slot_addr(&self, slot: u16) -> u64 {
        self.layout.slots() + (usize::from(slot) * SLOT_BYTES) as u64
    }
}
