//! A larger disk: the header's size, and a longer L1 table if the size needs one.
//!
//! `new L1 table behind all that has counts → sync → the header's three fields, in one sector → sync → the old table is freed`

use std::ops::Range;

use crate::error::Limit;
use crate::header::TableAt;
use crate::write::blocks::in_memory;
use crate::write::claim::merge::Allocation;
use crate::write::error::{WriteError, full};
use crate::write::interface::{Below, View, WriteAt};
use crate::write::writer::Writer;

/// Where the header's `size`, `l1_size` and `l1_table_offset` are.
const SIZE: Range<usize> = 24..32;
const L1_SIZE: Range<usize> = 36..40;
const L1_TABLE_OFFSET: Range<usize> = 40..48;
/// QEMU's limit.
const MAX_L1_BYTES: u64 = 32 << 20;
/// How often a place for the table is looked for: each refcount block on the way may take a cluster of it.
const MAX_ROUNDS: u32 = 1 << 16;

impl<F: WriteAt> Writer<F> {
    /// Uses only so much of the disk that the header describes.
    pub fn limit_disk(&mut self, size_bytes: u64) {
        self.header.size_bytes = self.header.size_bytes.min(size_bytes);
        self.l1.truncate(in_memory(self.geometry().l1_entries_for(self.header.size_bytes)));
    }

    /// Makes the guest's disk larger. The new part reads as zeroes, also where the backing file is longer than the disk was.
    ///
    /// # Errors
    /// The size is beyond the format, or the image fails. The disk has its old or its new size.
    pub fn grow_disk(
        &mut self,
        size_bytes: u64,
        below: &mut dyn Below,
        below_bytes: u64,
        view: &mut dyn View,
    ) -> Result<(), WriteError> {
        let before = self.header.size_bytes;
        if size_bytes <= before {
            return Ok(());
        }
        self.change(|writer| {
            writer.prepare(view)?;
            // Its snapshots do not say how large the disk was.
            if writer.geometry().version() < 3 && writer.header.snapshots.count > 0 {
                return Err(WriteError::Unsupported {
                    feature: "version 2 and snapshots, and another size,",
                });
            }
            let needed = writer.geometry().l1_entries_for(size_bytes);
            if needed * 8 > MAX_L1_BYTES {
                return Err(full("L1 table"));
            }
            if needed > u64::from(writer.header.l1.count) {
                writer.move_l1(needed, view)?;
            }
            writer.l1.resize(in_memory(needed), 0);
            Ok(())
        })?;
        self.header.size_bytes = size_bytes;
        let hidden = self.hide_below(before, below_bytes.min(size_bytes), below, view);
        if let Err(error) = hidden {
            self.header.size_bytes = before;
            return Err(error);
        }
        self.change(|writer| {
            writer.blocks.sync()?;
            writer
                .blocks
                .update("header", 0, |block| block[SIZE].copy_from_slice(&size_bytes.to_be_bytes()))?;
            writer.blocks.sync()
        })
    }

    /// What the backing file has behind the disk's old end must not show.
    fn hide_below(
        &mut self,
        from: u64,
        to: u64,
        below: &mut dyn Below,
        view: &mut dyn View,
    ) -> Result<(), WriteError> {
        let cluster_bytes = self.geometry().cluster_bytes();
        let whole = from.next_multiple_of(cluster_bytes);
        // The rest of the last cluster, of which a claim may have copied more than the disk had.
        let has_rest = from < whole
            && match self.allocation(from / cluster_bytes)?.0 {
                Allocation::Zero => false,
                Allocation::Unallocated => from < to && !below.is_zero(),
                Allocation::Data { .. } => true,
            };
        if has_rest {
            self.claim(std::slice::from_ref(&(from..whole)), below, view)?;
            let (_, entry) = self.entry(from / cluster_bytes)?;
            let mut content = vec![0; in_memory(cluster_bytes)];
            self.read_cluster(from / cluster_bytes, below, &mut content)?;
            content[in_memory(from % cluster_bytes)..].fill(0);
            let host = self.host_clusters(&entry).start << self.geometry().cluster_bits;
            self.change(|writer| writer.blocks.write("data", host, &content))?;
        }
        if below.is_zero() {
            return Ok(());
        }
        let (mut at, end) = (whole, to.next_multiple_of(cluster_bytes).min(self.header.size_bytes));
        while at < end {
            at = self.zero(at..end, true, below, view)?;
        }
        Ok(())
    }

    /// Moves the L1 table to a longer one, in which all further entries are empty.
    fn move_l1(&mut self, entries: u64, view: &mut dyn View) -> Result<(), WriteError> {
        let (bits, cluster_bytes) = (self.geometry().cluster_bits, self.geometry().cluster_bytes());
        let clusters = (entries * 8).div_ceil(cluster_bytes);
        if !self.metadata.has_room(clusters) {
            return Err(full("L1 table"));
        }
        let place = self.free_run(clusters, view)?;
        let counts: Vec<(u64, u64)> = place.clone().map(|cluster| (cluster, 1)).collect();
        self.counts.store(&mut self.blocks, &counts)?;
        let old = self.header.l1;
        let mut table = vec![0; in_memory(clusters * cluster_bytes)];
        self.blocks.words("L1 table", old.offset, old.count.into(), |index, entry| {
            table[in_memory(index * 8)..][..8].copy_from_slice(&entry.to_be_bytes());
            Ok(())
        })?;
        let offset = place.start << bits;
        self.blocks.write("L1 table", offset, &table)?;
        self.blocks.sync()?;
        let count = u32::try_from(entries).map_err(|_| full("L1 table"))?;
        self.update_header(|block| {
            block[L1_SIZE].copy_from_slice(&count.to_be_bytes());
            block[L1_TABLE_OFFSET].copy_from_slice(&offset.to_be_bytes());
        })?;
        self.blocks.sync()?;
        self.metadata.add(place)?;
        self.header.l1 = TableAt { offset, count };
        let old = old.offset >> bits..(old.offset + u64::from(old.count) * 8).div_ceil(cluster_bytes);
        let lowered = self.counts.lowered(&mut self.blocks, old.clone().map(|cluster| (cluster, 1)))?;
        self.metadata.remove(old.clone());
        self.reserve.lowest_free = self.reserve.lowest_free.min(old.start);
        self.counts.store(&mut self.blocks, &lowered)
    }

    /// Free clusters without a gap, which the file has, at its end.
    fn free_run(&mut self, clusters: u64, view: &mut dyn View) -> Result<Range<u64>, WriteError> {
        let mut start = self.file_clusters();
        for _ in 0..MAX_ROUNDS {
            let mut taken = None;
            for cluster in start..start + clusters {
                if !self.is_free(cluster, view)? {
                    taken = Some(cluster);
                    break;
                }
            }
            match taken {
                None => {
                    // A longer refcount table may lie behind.
                    self.grow(self.file_clusters().max(start + clusters), view)?;
                    return Ok(start..start + clusters);
                }
                Some(taken) => start = self.file_clusters().max(taken + 1),
            }
        }
        let limit = Limit::AtMost(MAX_ROUNDS.into());
        let (field, value) = ("number of clusters in use at the file's end", u64::from(MAX_ROUNDS) + 1);
        Err(WriteError::Damaged { field, place: start, value, limit })
    }
}
