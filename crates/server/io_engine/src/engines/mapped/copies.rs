//! Reads that cannot go into the guest's memory: compressed clusters, parts of blocks, parts of many small buffers; and
//! writes of many small buffers.
//!
//! `whole blocks → scratch memory → (decompressed) → the guest's buffers`, `the guest's buffers → scratch memory → blocks`

use std::collections::VecDeque;
use std::io;

use disk_image::Volume;
use disk_image::volume::CompressedPlace;
use guest_mem::{IoVecs, PieceCursor};
use qcow2::{CompressedCluster, DecompressError, Decompressor};

use super::scratch::Scratch;

/// Copies of a disk that are read at a time, if their memory does not exceed [`MOST_BYTES`].
const MAX_COPIES: usize = 8;
/// Memory for copies of a disk, unless one alone takes more.
const MOST_BYTES: u64 = 2 << 20;
/// The shortest buffer.
const LEAST_BYTES: u64 = 64 << 10;

/// The copies of a disk.
pub(super) struct Copies {
    pub list: Vec<Copy>,
    pub free: Vec<u32>,
    pub scratch: Scratch,
    /// Copies whose compressed data has been read.
    pub ready: VecDeque<u32>,
    /// The longest data that are copied at a time.
    pub most_bytes: u64,
    decompressors: Vec<Option<Decompressor>>,
    /// Compressed data, and the cluster that was decompressed last.
    data: Vec<u8>,
    cluster: Vec<u8>,
    cluster_is: Option<(usize, CompressedCluster)>,
}

/// A read into scratch memory, or a write from there.
pub(super) struct Copy {
    pub op: u32,
    pub is_write: bool,
    /// From the op's start.
    pub start_bytes: u64,
    pub len_bytes: u64,
    /// Where the guest's bytes go.
    pub cursor: PieceCursor,
    pub file: usize,
    /// The first byte that is wanted, or the first of the compressed data, in the buffer.
    pub skip_bytes: u64,
    /// What the file had.
    pub valid_bytes: u64,
    pub compressed: Option<CompressedPlace>,
    pub buffers: IoVecs,
}

impl Copies {
    /// `cluster_bytes`: the largest; `block_bytes`: the largest block of a file.
    pub fn new(cluster_bytes: u64, block_bytes: u64) -> io::Result<Self> {
        // The format allows that compressed data is longer than its cluster, but less than twice as long.
        let most_bytes = (2 * cluster_bytes).max(LEAST_BYTES);
        let buffer_bytes = most_bytes + 2 * block_bytes;
        let copies = (MOST_BYTES / buffer_bytes).clamp(1, MAX_COPIES as u64);
        let copy = || Copy {
            op: 0,
            is_write: false,
            start_bytes: 0,
            len_bytes: 0,
            cursor: PieceCursor::default(),
            file: 0,
            skip_bytes: 0,
            valid_bytes: 0,
            compressed: None,
            buffers: IoVecs::with_capacity(1),
        };
        Ok(Self {
            list: (0..copies).map(|_| copy()).collect(),
            #[allow(clippy::cast_possible_truncation)] // at most MAX_COPIES
            free: (0..copies as u32).collect(),
            scratch: Scratch::new(copies, buffer_bytes)?,
            ready: VecDeque::with_capacity(MAX_COPIES),
            most_bytes,
            decompressors: Vec::new(),
            data: Vec::new(),
            cluster: Vec::new(),
            cluster_is: None,
        })
    }

    /// The cluster, if it is the one that was decompressed last.
    pub fn decompressed(&self, place: &CompressedPlace) -> Option<&[u8]> {
        (self.cluster_is == Some((place.layer, place.cluster))).then_some(&self.cluster)
    }

    /// Decompresses what the copy has read.
    pub fn decompress(&mut self, index: u32, volume: &Volume) -> Result<(), DecompressError> {
        let copy = &self.list[index as usize];
        let Some(place) = copy.compressed else { return Ok(()) };
        let Some((compression, cluster_bytes)) = volume.compression(place.layer) else { return Ok(()) };
        if self.cluster_is == Some((place.layer, place.cluster)) {
            return Ok(());
        }
        self.cluster_is = None;
        self.data.resize(usize::try_from(place.cluster.len_bytes()).unwrap_or(usize::MAX), 0);
        self.scratch.read(index as usize, copy.skip_bytes, copy.valid_bytes, &mut self.data);
        self.cluster.resize(usize::try_from(cluster_bytes).unwrap_or(usize::MAX), 0);
        if self.decompressors.len() <= place.layer {
            self.decompressors.resize_with(place.layer + 1, || None);
        }
        let decompressor =
            self.decompressors[place.layer].get_or_insert_with(|| Decompressor::new(compression));
        decompressor.decompress(&self.data, &mut self.cluster)?;
        self.cluster_is = Some((place.layer, place.cluster));
        Ok(())
    }

    /// Copies the buffers' bytes from `cursor` on to scratch memory. False: the guest's memory has lost pages.
    pub fn store(
        &mut self,
        index: u32,
        buffers: &IoVecs,
        cursor: &mut PieceCursor,
        len_bytes: u64,
        piece: &mut IoVecs,
    ) -> bool {
        self.data.clear();
        let mut left = len_bytes;
        while left > 0 {
            let part_bytes = buffers.part(cursor, left, piece);
            assert!(part_bytes > 0, "the buffers are as long as the range");
            let start = self.data.len();
            self.data.resize(start + usize::try_from(part_bytes).unwrap_or(usize::MAX), 0);
            piece.copy_out(&mut self.data[start..]);
            left -= part_bytes;
        }
        piece.release();
        self.scratch.write(index as usize, &self.data);
        !buffers.is_poisoned()
    }

    /// Copies what was read as it is to a place outside of scratch memory.
    pub fn data(&mut self, index: u32) -> &[u8] {
        let copy = &self.list[index as usize];
        self.data.resize(usize::try_from(copy.len_bytes).unwrap_or(usize::MAX), 0);
        self.scratch.read(index as usize, copy.skip_bytes, copy.valid_bytes, &mut self.data);
        &self.data
    }
}
