//! For jobs that merge an image with its backing file: what is allocated in the image, and whole clusters of content.
//!
//! ```text
//! stream: clusters that need the backing file → claim
//! commit: allocation → read_cluster ─▶ the backing file: overwrite | zero
//! ```

use std::ops::Range;

use crate::error::Limit;
use crate::tables::{L2Entry, RawL2Entry, StandardCluster};
use crate::write::blocks::{BLOCK_BYTES, in_memory};
use crate::write::claim::Wanted;
use crate::write::error::WriteError;
use crate::write::interface::{Below, View, WriteAt};
use crate::write::writer::Writer;

/// What is allocated in an image for a guest's cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Allocation {
    /// All of it comes from the backing file.
    Unallocated,
    /// All of it reads as zeroes.
    Zero,
    /// Data; of extended L2 entries perhaps only a part.
    Data {
        /** A part comes from the backing file. */
        needs_below: bool,
    },
}

impl<F: WriteAt> Writer<F> {
    /// What is allocated for a guest's cluster, and its entry for the view.
    ///
    /// # Errors
    /// A table cannot be read, or breaks the format.
    pub fn allocation(&mut self, cluster_index: u64) -> Result<(Allocation, RawL2Entry), WriteError> {
        // An entry that no guest has asked for must not end all changes.
        let (raw, entry) = self.entry(cluster_index)?;
        let all = u32::MAX >> (u32::BITS - self.geometry().subclusters());
        let has = match entry {
            L2Entry::Standard(StandardCluster { allocated: 0, zero: 0, .. }) => Allocation::Unallocated,
            L2Entry::Standard(cluster) if cluster.zero == all => Allocation::Zero,
            L2Entry::Standard(cluster) => {
                Allocation::Data { needs_below: cluster.allocated | cluster.zero != all }
            }
            L2Entry::Compressed(_) => Allocation::Data { needs_below: false },
        };
        Ok((has, raw))
    }

    /// Reads what the guest reads of one cluster, with zeroes past the disk's end. `content`: one cluster.
    ///
    /// # Errors
    /// The image or what lies below it cannot be read.
    pub fn read_cluster(
        &mut self,
        cluster_index: u64,
        below: &mut dyn Below,
        content: &mut [u8],
    ) -> Result<(), WriteError> {
        let (_, entry) = self.entry(cluster_index)?;
        if !self.read_content(&Wanted { cluster_index, entry }, below, content)? {
            content.fill(0);
        }
        let inside = self.header.size_bytes.saturating_sub(self.guest_offset(cluster_index));
        if let Some(past) = content.get_mut(in_memory(inside)..) {
            past.fill(0);
        }
        Ok(())
    }

    /// Writes the guest's bytes, and claims their clusters first. Offset and length are multiples of 4 KiB; the last block of
    /// the disk may reach past its end.
    ///
    /// # Errors
    /// The image or what lies below it fails. Each sector has its old or its new content.
    pub fn overwrite(
        &mut self,
        guest_offset: u64,
        data: &[u8],
        below: &mut dyn Below,
        view: &mut dyn View,
    ) -> Result<(), WriteError> {
        let end = self.header.size_bytes.next_multiple_of(BLOCK_BYTES as u64);
        let range = guest_offset..end.min(guest_offset + data.len() as u64);
        self.claim(std::slice::from_ref(&range), below, view)?;
        self.change(|writer| writer.write_claimed(range, data))
    }

    fn write_claimed(&mut self, range: Range<u64>, data: &[u8]) -> Result<(), WriteError> {
        let cluster_bytes = self.geometry().cluster_bytes();
        let (mut at, mut rest) = (range.start, data);
        while at < range.end {
            let (cluster_index, in_cluster) = (at / cluster_bytes, at % cluster_bytes);
            let len = (cluster_bytes - in_cluster).min(range.end - at);
            let (raw, entry) = self.entry(cluster_index)?;
            let host = match entry {
                L2Entry::Standard(cluster) if raw.is_in_place(&self.geometry()) => cluster.host_offset,
                _ => None,
            };
            let Some(host) = host else {
                return Err(WriteError::Damaged {
                    field: "L2 entry of the guest's cluster",
                    place: self.guest_offset(cluster_index),
                    value: raw.cluster,
                    limit: Limit::Words("the entry that was just written"),
                });
            };
            let (part, after) = rest.split_at_checked(in_memory(len)).unwrap_or((rest, &[]));
            self.blocks.write("data", host + in_cluster, part)?;
            (at, rest) = (at + len, after);
        }
        Ok(())
    }
}
