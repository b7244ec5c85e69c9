//! The writer's state, how it begins, and how it reads entries.

use std::ops::Range;

use crate::compressed::Decompressor;
use crate::error::{FormatError, Limit};
use crate::geometry::Geometry;
use crate::header::Header;
use crate::image::Image;
use crate::tables::{BadEntry, L1Entry, L2Entry, RawL2Entry, Table};
use crate::write::blocks::{Blocks, block_of, in_memory};
use crate::write::claim::data_run::DataRun;
use crate::write::error::WriteError;
use crate::write::interface::{View, WriteAt};
use crate::write::metadata::Metadata;
use crate::write::open;
use crate::write::space::counts::Counts;
use crate::write::space::reclaim::state::Reclaim;
use crate::write::space::reserve::Reserve;

/// The only owner of an image's tables and reference counts. Synchronous: one thread calls it.
#[derive(Debug)]
pub struct Writer<F> {
    pub(super) blocks: Blocks<F>,
    pub(super) header: Header,
    pub(super) l1: Vec<u64>,
    pub(super) counts: Counts,
    pub(super) metadata: Metadata,
    pub(super) reserve: Reserve,
    pub(super) unlinked: Unlinked,
    /// A search for leaked clusters.
    pub(super) reclaim: Option<Box<Reclaim>>,
    /// A write has failed although there was room. Its change may be in the file or not, and what it leaked may be in use.
    pub(super) has_failed_write: bool,
    /// The autoclear bits are clear, and the file ends with a cluster.
    pub(super) is_prepared: bool,
    pub(super) decompressor: Decompressor,
    /// Memory for compressed data.
    pub(super) compressed: Vec<u8>,
    /// Memory for copies.
    pub(super) run: DataRun,
    stopped: Option<Stop>,
}

/// The error that ended all changes.
#[derive(Debug)]
struct Stop {
    reason: String,
    /// Earlier writes may be lost, or it is unknown what the header has.
    is_lost: bool,
}

impl Stop {
    fn after(error: &WriteError) -> Option<Self> {
        let is_lost = match error {
            WriteError::Sync(_) | WriteError::Header(_) => true,
            WriteError::Damaged { .. } => false,
            _ => return None,
        };
        Some(Self { reason: error.to_string(), is_lost })
    }

    fn error(&self) -> WriteError {
        WriteError::Stopped { reason: self.reason.clone() }
    }
}

/// Host clusters to which an entry led, which may still be in use by requests that began before.
#[derive(Debug, Default)]
pub struct Unlinked {
    /// Each reference that is gone.
    pub(super) data: Vec<u64>,
    /// The same for L2 tables.
    pub(super) tables: Vec<u64>,
}

impl Unlinked {
    pub(super) fn is_empty(&self) -> bool {
        self.data.is_empty() && self.tables.is_empty()
    }

    pub(super) fn clusters(&self) -> impl Iterator<Item = u64> {
        self.data.iter().chain(&self.tables).copied()
    }
}

impl<F: WriteAt> Writer<F> {
    /// Reads the image, and checks that it can be written. Writes nothing.
    ///
    /// # Errors
    /// As [`Writer::new`]; header or L1 table break the format.
    pub fn open(file: F) -> Result<Self, WriteError> {
        let (file, header, l1) = Image::open(file)?.into_parts();
        Self::new(file, header, l1)
    }

    /// Checks that the image can be written. Writes nothing. `l1`: that of [`Image::l1`](crate::Image::l1).
    ///
    /// # Errors
    /// The image has a feature with which it is only read, its tables overlap, or they cannot be read.
    pub fn new(file: F, header: Header, l1: Vec<u64>) -> Result<Self, WriteError> {
        open::check_features(&header)?;
        let blocks = Blocks::new(file)?;
        let counts = Counts::read(&blocks, &header)?;
        let metadata = open::metadata(&blocks, &header, &counts)?;
        let decompressor = Decompressor::new(header.compression);
        let reserve = Reserve::new(&header.geometry);
        Ok(Self {
            blocks,
            header,
            l1,
            counts,
            metadata,
            reserve,
            unlinked: Unlinked::default(),
            reclaim: None,
            has_failed_write: false,
            is_prepared: false,
            decompressor,
            compressed: Vec::new(),
            run: DataRun::default(),
            stopped: None,
        })
    }

    /// The header, as it is now.
    pub const fn header(&self) -> &Header {
        &self.header
    }

    /// The L1 table as far as the disk needs it, in the host's byte order.
    pub fn l1(&self) -> &[u64] {
        &self.l1
    }

    /// The file.
    pub const fn file(&self) -> &F {
        self.blocks.file()
    }

    /// The entries of adjacent clusters of the guest, for the view. An entry that leads into a table, to free space or
    /// past the file's end comes with a reserved bit set, so that decoding it fails. One that claims a shared cluster for
    /// itself comes without that claim.
    ///
    /// With an entry, a guest can write in place. So the autoclear bits are clear before the first is returned.
    ///
    /// # Errors
    /// A table cannot be read, or the header cannot be written.
    pub fn slice(
        &mut self,
        first_cluster_index: u64,
        entries: &mut [RawL2Entry],
        view: &mut dyn View,
    ) -> Result<(), WriteError> {
        self.change(|writer| writer.prepare(view))?;
        for (index, entry) in (first_cluster_index..).zip(entries) {
            let raw = self.raw_entry(index)?;
            *entry = match L2Entry::decode(raw, &self.header.geometry) {
                Ok(decoded) => self.counted(raw, &decoded)?.unwrap_or_else(|| raw.refused()),
                // The view's users decode it, too.
                Err(_) => raw,
            };
        }
        Ok(())
    }

    /// The entry as its clusters' counts allow it. `None`: it leads into a table, to free space or past the file's end.
    fn counted(&mut self, raw: RawL2Entry, decoded: &L2Entry) -> Result<Option<RawL2Entry>, WriteError> {
        let clusters = self.host_clusters(decoded);
        if self.is_misplaced(&clusters) {
            return Ok(None);
        }
        let mut is_shared = false;
        for cluster in clusters {
            match self.counts.of(&mut self.blocks, cluster)? {
                0 => return Ok(None),
                count => is_shared |= count > 1,
            }
        }
        Ok(Some(if is_shared { raw.shared() } else { raw }))
    }

    /// Makes durable what was written before, also after damage of the tables has ended all changes.
    ///
    /// # Errors
    /// It may be lost: all later changes fail.
    pub fn sync(&mut self) -> Result<(), WriteError> {
        match &self.stopped {
            Some(stop) if stop.is_lost => Err(stop.error()),
            _ => {
                let result = self.blocks.sync();
                self.stopped = result.as_ref().err().and_then(Stop::after).or(self.stopped.take());
                result
            }
        }
    }

    /// Whether an earlier error ended all changes.
    pub(super) fn check_goes_on(&self) -> Result<(), WriteError> {
        self.stopped.as_ref().map_or(Ok(()), |stop| Err(stop.error()))
    }

    /// Runs a change, unless an earlier error ended them all.
    pub(super) fn change<T>(
        &mut self,
        change: impl FnOnce(&mut Self) -> Result<T, WriteError>,
    ) -> Result<T, WriteError> {
        self.check_goes_on()?;
        let result = change(self);
        self.has_failed_write |= matches!(&result, Err(error @ WriteError::Io { .. }) if !error.is_full());
        self.stopped = result.as_ref().err().and_then(Stop::after);
        result
    }

    /// Changes fields of the header that are in one sector.
    pub(super) fn update_header(&mut self, change: impl FnOnce(&mut [u8])) -> Result<(), WriteError> {
        // After an error, the file has the old or the new fields.
        self.blocks.update("header", 0, change).map_err(|error| match error {
            WriteError::Io { source, .. } => WriteError::Header(source),
            other => other,
        })
    }

    pub(super) const fn geometry(&self) -> Geometry {
        self.header.geometry
    }

    pub(super) const fn guest_offset(&self, cluster_index: u64) -> u64 {
        cluster_index << self.header.geometry.cluster_bits
    }

    pub(super) const fn l1_index(&self, cluster_index: u64) -> u64 {
        cluster_index >> self.header.geometry.l2_entries_bits()
    }

    pub(super) fn l1_entry(&self, index: u64) -> Result<L1Entry, WriteError> {
        let value = self.l1.get(in_memory(index)).copied().unwrap_or_default();
        let bad = |problem| BadEntry { table: Table::L1, index, value, problem };
        Ok(L1Entry::decode(value, &self.header.geometry).map_err(bad).map_err(FormatError::Entry)?)
    }

    /// Where the entry of a guest's cluster is in the file. `None`: there is no table for it.
    pub(super) fn place(&self, cluster_index: u64) -> Result<Option<u64>, WriteError> {
        let geometry = self.geometry();
        let in_table = cluster_index & (u64::from(geometry.l2_entries()) - 1);
        let table = self.l1_entry(self.l1_index(cluster_index))?.l2_table;
        Ok(table.map(|table| table + in_table * geometry.l2_entry_bytes()))
    }

    /// The entry of a guest's cluster, as the file has it.
    pub(super) fn raw_entry(&mut self, cluster_index: u64) -> Result<RawL2Entry, WriteError> {
        let Some(at) = self.place(cluster_index)? else { return Ok(RawL2Entry::default()) };
        let geometry = self.geometry();
        let index = (at - block_of(at)) / geometry.l2_entry_bytes();
        let block = self.blocks.block("L2 table", block_of(at))?;
        Ok(RawL2Entry::at(block, in_memory(index), &geometry).unwrap_or_default())
    }

    /// The entry of a guest's cluster, as its counts allow it, and decoded.
    pub(super) fn entry(&mut self, cluster_index: u64) -> Result<(RawL2Entry, L2Entry), WriteError> {
        let raw = self.raw_entry(cluster_index)?;
        let geometry = self.geometry();
        let in_table = cluster_index & (u64::from(geometry.l2_entries()) - 1);
        let bad = |problem| BadEntry { table: Table::L2, index: in_table, value: raw.cluster, problem };
        let entry = L2Entry::decode(raw, &geometry).map_err(bad).map_err(FormatError::Entry)?;
        let Some(counted) = self.counted(raw, &entry)? else {
            return Err(WriteError::Damaged {
                field: "L2 entry of the guest's cluster",
                place: self.guest_offset(cluster_index),
                value: raw.cluster,
                limit: Limit::Words("a host cluster in the file that is neither a table's nor free"),
            });
        };
        let entry = L2Entry::decode(counted, &geometry).map_err(bad).map_err(FormatError::Entry)?;
        Ok((counted, entry))
    }

    /// The host clusters to which an entry leads.
    pub(super) fn host_clusters(&self, entry: &L2Entry) -> Range<u64> {
        let bits = self.header.geometry.cluster_bits;
        match entry {
            L2Entry::Compressed(cluster) => {
                let last = cluster.host_offset + cluster.len_bytes() - 1;
                cluster.host_offset >> bits..(last >> bits) + 1
            }
            L2Entry::Standard(cluster) => match cluster.host_offset {
                Some(offset) => offset >> bits..(offset >> bits) + 1,
                None => 0..0,
            },
        }
    }

    pub(super) fn is_misplaced(&self, clusters: &Range<u64>) -> bool {
        clusters.end > self.file_clusters()
            || clusters
                .clone()
                .any(|cluster| self.metadata.contains(cluster) || self.reserve.contains(cluster))
    }

    /// Clusters of the file; the last may be shorter.
    pub(super) fn file_clusters(&self) -> u64 {
        self.blocks.file_bytes().div_ceil(self.geometry().cluster_bytes())
    }
}
