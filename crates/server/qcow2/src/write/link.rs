//! Writes L2 entries, and gives the active L1 table L2 tables of its own.
//!
//! ```text
//! new L2 table: zeroes, or a copy of a table that a snapshot has, too → (sync) → L1 entry → view
//! L2 entries: one write for all that are in the same 4 KiB, or close by in the table → view → the old host clusters are unlinked
//! ```
//!
//! - What an entry leads to is durable before the entry is written: reserve clusters are, and copies are synced.
//! - An entry whose write failed may be in the file. The view gets what the file has. The new cluster is never used for
//!   anything else, unless the file system was full, and the old ones are leaked.

use std::collections::BTreeSet;
use std::ops::Range;

use crate::error::Limit;
use crate::tables::{L1Entry, RawL2Entry};
use crate::write::blocks::{BLOCK_BYTES, block_of, in_memory};
use crate::write::error::{WriteError, full};
use crate::write::interface::{View, WriteAt};
use crate::write::writer::Writer;

/// How far a block may be after the one before, to be written with it: one write of 32 KiB takes less time than two of 4 KiB.
const MOST_TO_NEXT: u64 = 8 * BLOCK_BYTES as u64;

/// A new entry for a guest's cluster.
#[derive(Debug)]
pub(super) struct Change {
    pub(super) cluster_index: u64,
    pub(super) entry: RawL2Entry,
    /// A cluster that came from the reserve for it.
    pub(super) host: Option<Host>,
    /// The host clusters that lose a reference.
    pub(super) unlinks: Range<u64>,
}

/// A cluster that came from the reserve.
#[derive(Debug, Clone, Copy)]
pub(super) struct Host {
    pub(super) cluster: u64,
    /// It has data, and must be synced before an entry leads to it.
    pub(super) has_data: bool,
}

/// An L2 table that no L1 entry names yet.
#[derive(Debug)]
pub(super) struct NewTable {
    l1_index: u64,
    host: Host,
    /// The table that it replaces.
    old: Option<u64>,
}

/// All that a batch changes.
#[derive(Debug, Default)]
pub(super) struct Batch {
    /// Ascending by cluster.
    pub(super) changes: Vec<Change>,
    pub(super) tables: Vec<NewTable>,
}

impl Batch {
    /// Whether a sync must come before the tables are linked.
    pub(super) fn tables_have_data(&self) -> bool {
        self.tables.iter().any(|table| table.host.has_data)
    }

    fn hosts(&self) -> impl Iterator<Item = Host> {
        self.tables.iter().map(|table| table.host).chain(self.changes.iter().filter_map(|change| change.host))
    }
}

impl<F: WriteAt> Writer<F> {
    /// The L1 entries whose tables a change of these clusters needs and that are missing or shared. The other tables
    /// must be the active table's own. Fails, before anything is written, if there would be too many tables.
    pub(super) fn tables_needed(
        &mut self,
        cluster_indices: impl Iterator<Item = u64>,
    ) -> Result<BTreeSet<u64>, WriteError> {
        let l1_indices: BTreeSet<u64> = cluster_indices.map(|index| self.l1_index(index)).collect();
        let mut needed = BTreeSet::new();
        for l1_index in l1_indices {
            let entry = self.l1_entry(l1_index)?;
            match entry.l2_table {
                Some(table) if entry.copied => self.check_own(table)?,
                _ => _ = needed.insert(l1_index),
            }
        }
        if self.metadata.has_room(needed.len() as u64) { Ok(needed) } else { Err(full("set of L2 tables")) }
    }

    /// Nothing but one L1 entry leads to a table that is changed in place.
    fn check_own(&mut self, table: u64) -> Result<(), WriteError> {
        let cluster = table >> self.geometry().cluster_bits;
        let (limit, place) = (Limit::Only(1), table);
        let value = self.counts.of(&mut self.blocks, cluster)?;
        if value != 1 {
            return Err(WriteError::Damaged { field: "refcount of the L2 table", place, value, limit });
        }
        let value = self.metadata.l2_references(cluster).into();
        if value != 1 {
            let field = "number of L1 entries with the L2 table";
            return Err(WriteError::Damaged { field, place, value, limit });
        }
        Ok(())
    }

    /// Makes a table for each of these L1 entries. A shared table's entries are copied, and not synced.
    pub(super) fn new_tables(
        &mut self,
        l1_indices: &BTreeSet<u64>,
        batch: &mut Batch,
    ) -> Result<(), WriteError> {
        for l1_index in l1_indices {
            let old = self.l1_entry(*l1_index)?.l2_table;
            let host = self.take_host()?;
            batch.tables.push(NewTable { l1_index: *l1_index, host, old });
            if let (Some(old), Some(table)) = (old, batch.tables.last_mut()) {
                table.host.has_data = true;
                let mut entries = vec![0; in_memory(self.geometry().cluster_bytes())];
                self.blocks.read("L2 table", old, &mut entries)?;
                self.blocks.write("L2 table", host.cluster << self.geometry().cluster_bits, &entries)?;
            }
        }
        Ok(())
    }

    /// A cluster of the reserve, which the caller filled.
    pub(super) fn take_host(&mut self) -> Result<Host, WriteError> {
        let cluster = self.reserve.take().ok_or_else(|| WriteError::Stopped {
            reason: "the reserve is smaller than a change needs".into(),
        })?;
        self.note_taken(std::iter::once(cluster));
        Ok(Host { cluster, has_data: false })
    }

    /// Runs the part of a change that publishes nothing. If it fails, gives back the clusters that it took.
    pub(super) fn prepared(
        &mut self,
        prepare: impl FnOnce(&mut Self, &mut Batch) -> Result<(), WriteError>,
    ) -> Result<Batch, WriteError> {
        let mut batch = Batch::default();
        match prepare(self, &mut batch) {
            Ok(()) => Ok(batch),
            Err(error) => {
                self.give_back(&batch);
                Err(error)
            }
        }
    }

    /// No entry was written that leads to these clusters.
    fn give_back(&mut self, batch: &Batch) {
        for host in batch.hosts() {
            if host.has_data {
                self.unlinked.data.push(host.cluster);
            } else {
                self.reserve.put_back(host.cluster);
            }
        }
    }

    /// Publishes a batch, whose copies are durable: L1 entries, then L2 entries.
    pub(super) fn publish(&mut self, mut batch: Batch, view: &mut dyn View) -> Result<(), WriteError> {
        while let Some(table) = batch.tables.pop() {
            if let Err(error) = self.link_table(&table, view) {
                self.give_back(&batch);
                return Err(error);
            }
        }
        while !batch.changes.is_empty() {
            let end = self.close_together(&batch.changes);
            let group: Vec<Change> = batch.changes.drain(..end).collect();
            if let Err(error) = self.link(&group, view) {
                self.give_back(&batch);
                return Err(error);
            }
        }
        Ok(())
    }

    fn block_of_entry(&self, change: &Change) -> Option<u64> {
        self.place(change.cluster_index).ok().flatten().map(block_of)
    }

    /// How many of the first changes are written together: they are in one block, or in the next ones of the same table
    /// with small gaps.
    fn close_together(&self, changes: &[Change]) -> usize {
        let bits = self.geometry().cluster_bits;
        let blocks: Vec<Option<u64>> = changes.iter().map(|change| self.block_of_entry(change)).collect();
        let is_gap = |pair: &&[Option<u64>]| match pair {
            [Some(one), Some(next)] => one >> bits != next >> bits || next - one > MOST_TO_NEXT,
            _ => pair[0] != pair[1],
        };
        blocks.windows(2).position(|pair| is_gap(&pair)).map_or(changes.len(), |at| at + 1)
    }

    /// Lets an L1 entry name a table with the same content as the one before.
    fn link_table(&mut self, table: &NewTable, view: &mut dyn View) -> Result<(), WriteError> {
        let bits = self.geometry().cluster_bits;
        let entry = L1Entry::own(table.host.cluster << bits);
        let at = self.header.l1.offset + table.l1_index * 8;
        let start = in_memory(at - block_of(at));
        self.blocks.update("L1 table", block_of(at), |block| {
            block[start..start + 8].copy_from_slice(&entry.to_be_bytes());
        })?;
        if let Some(stored) = self.l1.get_mut(in_memory(table.l1_index)) {
            *stored = entry;
        }
        self.metadata.add_l2(table.host.cluster)?;
        view.l1_changed(table.l1_index, entry);
        if let Some(old) = table.old {
            self.metadata.unlink_l2(old >> bits);
            self.unlinked.tables.push(old >> bits);
        }
        Ok(())
    }

    /// Writes entries that are close together. Blocks between them are written as they are.
    fn link(&mut self, changes: &[Change], view: &mut dyn View) -> Result<(), WriteError> {
        let geometry = self.geometry();
        let mut places = Vec::with_capacity(changes.len());
        for change in changes {
            places.extend(self.place(change.cluster_index)?);
        }
        let (Some(first), Some(last)) = (places.first(), places.last()) else { return Ok(()) };
        let (start, end) = (block_of(*first), block_of(*last) + BLOCK_BYTES as u64);
        let written = self.blocks.update_all("L2 table", start..end, |bytes| {
            for (change, at) in changes.iter().zip(&places) {
                change.entry.store(bytes, in_memory(at - start), &geometry);
            }
        });
        if let Err(error) = written {
            self.show_stored(changes, error.is_full(), view);
            return Err(error);
        }
        for change in changes {
            view.l2_changed(change.cluster_index, change.entry);
            self.unlinked.data.extend(change.unlinks.clone());
        }
        Ok(())
    }

    /// After a write that failed, the file has the old or the new entry. The view gets the one that the file has: a guest
    /// that wrote in place by the other one would lose its data. If the file cannot be read, the view forgets the entry.
    ///
    /// `is_full`: the write has not reached the disk, and will not. So what the old entries do not lead to is free.
    fn show_stored(&mut self, changes: &[Change], is_full: bool, view: &mut dyn View) {
        for change in changes {
            let Ok(stored) = self.raw_entry(change.cluster_index) else {
                view.l2_unknown(change.cluster_index);
                continue;
            };
            view.l2_changed(change.cluster_index, stored);
            if is_full && stored != change.entry {
                self.unlinked.data.extend(change.host.map(|host| host.cluster));
            }
        }
    }
}
