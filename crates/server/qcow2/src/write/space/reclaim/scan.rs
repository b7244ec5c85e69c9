//! Visits the L2 entries of the active L1 table and of all snapshots', in pieces.
//!
//! - The place in a table is an L1 entry and an L2 entry, not a table: the active L1 entry may lead to a copy of the table
//!   when the next piece is read.
//! - Nothing changes or frees a table that a snapshot has. So, in the snapshots' L1 tables, it is visited once. Under the
//!   active L1 table, the place of a table that was visited may have another one later.

use crate::big_endian::u64_at;
use crate::header::TableAt;
use crate::tables::{BadEntry, L1Entry, L2Entry, RawL2Entry, Table};
use crate::write::blocks::{block_of, in_memory};
use crate::write::interface::WriteAt;
use crate::write::space::reclaim::error::{ReclaimError, damaged};
use crate::write::space::reclaim::state::{Reclaim, Scan};
use crate::write::writer::Writer;

impl<F: WriteAt> Writer<F> {
    /// Visits the next entries. Returns whether all were visited.
    pub(super) fn scan(&mut self, reclaim: &mut Reclaim) -> Result<bool, ReclaimError> {
        let mut left = reclaim.step.entries;
        while left > 0 {
            let Some(l1) = reclaim.scan.l1(&self.header) else { return Ok(true) };
            if reclaim.scan.l1_index >= l1.count.into() {
                reclaim.scan.next_table();
                left -= 1;
                continue;
            }
            match self.l2_table(&reclaim.scan, l1)? {
                Some(table) if !reclaim.scan.visited.contains(&table) => {
                    let seen = self.scan_piece(reclaim, table, left)?;
                    left = left.saturating_sub(seen);
                }
                _ => {
                    reclaim.scan.next_entry();
                    left -= 1;
                }
            }
        }
        Ok(false)
    }

    /// The offset of the L2 table to which the L1 entry leads now.
    fn l2_table(&mut self, scan: &Scan, l1: TableAt) -> Result<Option<u64>, ReclaimError> {
        let (at, index) = (l1.offset + scan.l1_index * 8, scan.l1_index);
        let value = u64_at(self.blocks.block("L1 table", block_of(at))?, in_memory(at - block_of(at)));
        let bad = |problem| ReclaimError::Entry {
            table_offset: l1.offset,
            bad: BadEntry { table: Table::L1, index, value, problem },
        };
        let table = L1Entry::decode(value, &self.geometry()).map_err(bad)?.l2_table;
        match table {
            Some(table) if self.metadata.l2_references(table >> self.geometry().cluster_bits) == 0 => {
                Err(damaged("L1 entry", at, value, "an L2 table that it led to when the image was opened"))
            }
            table => Ok(table),
        }
    }

    /// Visits entries of one table, up to its end or about `most`. Returns how many.
    fn scan_piece(&mut self, reclaim: &mut Reclaim, table: u64, most: u64) -> Result<u64, ReclaimError> {
        let geometry = self.geometry();
        let (first, entries) = (reclaim.scan.l2_index, u64::from(geometry.l2_entries()));
        // Pieces begin and end with blocks.
        let end = entries.min(first + most.next_multiple_of(512));
        let offset = table + first * geometry.l2_entry_bytes();
        let mut bytes = vec![0; in_memory((end - first) * geometry.l2_entry_bytes())];
        self.blocks.read("L2 table", offset, &mut bytes)?;
        for index in first..end {
            let raw = RawL2Entry::at(&bytes, in_memory(index - first), &geometry).unwrap_or_default();
            self.visit(reclaim, table, index, raw)?;
        }
        reclaim.scan.l2_index = end;
        if end == entries {
            if reclaim.scan.is_snapshots() {
                reclaim.scan.visited.insert(table);
            }
            reclaim.scan.next_entry();
        }
        Ok(end - first)
    }

    fn visit(
        &self,
        reclaim: &mut Reclaim,
        table_offset: u64,
        index: u64,
        raw: RawL2Entry,
    ) -> Result<(), ReclaimError> {
        if raw == RawL2Entry::default() {
            return Ok(());
        }
        let value = raw.cluster;
        let bad = |problem| ReclaimError::Entry {
            table_offset,
            bad: BadEntry { table: Table::L2, index, value, problem },
        };
        let clusters = self.host_clusters(&L2Entry::decode(raw, &self.geometry()).map_err(bad)?);
        if self.is_misplaced(&clusters) {
            let at = table_offset + index * self.geometry().l2_entry_bytes();
            return Err(damaged("L2 entry", at, value, "a host cluster in the file that is no table's"));
        }
        clusters.for_each(|cluster| reclaim.used.insert(cluster));
        Ok(())
    }
}
