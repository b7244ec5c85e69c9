//! Collects data for adjacent host clusters, and writes it with one call. The memory is aligned, for direct I/O without
//! copies.

use crate::write::blocks::{BLOCK_BYTES, Blocks, in_memory};
use crate::write::error::WriteError;
use crate::write::interface::WriteAt;

/// The longest write. Clusters may be longer.
const MOST_BYTES: usize = 1 << 20;

/// Clusters that are filled one after the other.
#[derive(Debug, Default)]
pub(in crate::write) struct DataRun {
    memory: Vec<u8>,
    /// Where the aligned part of the memory begins.
    start: usize,
    /// Where the filled clusters belong.
    host_offset: u64,
    filled: usize,
}

impl DataRun {
    /// Memory for the content of the next cluster. Writes what there is if there is no room.
    pub(in crate::write) fn slot<F: WriteAt>(
        &mut self,
        cluster_bytes: u64,
        blocks: &mut Blocks<F>,
    ) -> Result<&mut [u8], WriteError> {
        let cluster_bytes = in_memory(cluster_bytes);
        let room = MOST_BYTES.max(cluster_bytes);
        if self.memory.len() < room + BLOCK_BYTES {
            self.memory = vec![0; room + BLOCK_BYTES];
            // If the memory cannot be aligned, the file's calls copy.
            self.start = self.memory.as_ptr().align_offset(BLOCK_BYTES).min(BLOCK_BYTES);
        }
        if self.filled + cluster_bytes > room {
            self.write(blocks)?;
        }
        let at = self.start + self.filled;
        Ok(&mut self.memory[at..at + cluster_bytes])
    }

    /// Adds the cluster whose content is in the slot. Writes those before if it does not follow them.
    pub(in crate::write) fn add<F: WriteAt>(
        &mut self,
        host_offset: u64,
        cluster_bytes: u64,
        blocks: &mut Blocks<F>,
    ) -> Result<(), WriteError> {
        let cluster_bytes = in_memory(cluster_bytes);
        if self.host_offset + self.filled as u64 != host_offset {
            let slot = self.start + self.filled;
            self.write(blocks)?;
            self.memory.copy_within(slot..slot + cluster_bytes, self.start);
            self.host_offset = host_offset;
        }
        self.filled += cluster_bytes;
        Ok(())
    }

    /// Writes all clusters that were added. After an error, it has none.
    pub(in crate::write) fn write<F: WriteAt>(&mut self, blocks: &mut Blocks<F>) -> Result<(), WriteError> {
        let filled = std::mem::take(&mut self.filled);
        if filled == 0 {
            return Ok(());
        }
        let written = blocks.write("data", self.host_offset, &self.memory[self.start..self.start + filled]);
        self.host_offset += filled as u64;
        written
    }

    /// Forgets clusters that were not written.
    pub(in crate::write) fn clear(&mut self) {
        self.filled = 0;
    }
}
