//! Visits everything that an image refers to: header, L1 and L2 tables, snapshots, bitmaps, reference counts.
//!
//! The walk repeats for each window of counters. Findings about entries are reported in the first. What a repair must know
//! besides the findings is noted in [`Obstacles`].

use crate::check::counts::{Counts, User};
use crate::check::finding::{CheckReport, Finding, Severity};
use crate::check::lenient;
use crate::check::obstacles::Obstacles;
use crate::check::refcounts::Refcounts;
use crate::error::{FormatError, read_padded};
use crate::geometry::Geometry;
use crate::header::TableAt;
use crate::image::Image;
use crate::read_at::ReadAt;
use crate::tables::refcounts::RefcountTableEntry;
use crate::tables::{
    BadEntry, CompressedCluster, EntryProblem, L1Entry, L2Entry, RawL2Entry, StandardCluster, Table,
};

/// Long tables are read in pieces.
const PIECE_ENTRIES: u64 = 8192;

pub(crate) struct Walk<'a, F> {
    pub(crate) image: &'a Image<F>,
    pub(crate) counts: Counts,
    geometry: Geometry,
    file_bytes: u64,
    pub(crate) refcounts: Refcounts<'a, F>,
    pub(super) report: CheckReport,
    pub(crate) obstacles: Obstacles,
    found: &'a mut dyn FnMut(&Finding),
}

impl<'a, F: ReadAt> Walk<'a, F> {
    pub(super) fn new(image: &'a Image<F>, file_bytes: u64, found: &'a mut dyn FnMut(&Finding)) -> Self {
        let (refcounts, failed) = Refcounts::read(image.file(), image.header(), file_bytes);
        let geometry = image.header().geometry;
        let clusters = file_bytes.div_ceil(geometry.cluster_bytes());
        let total_clusters = image.header().size_bytes.div_ceil(geometry.cluster_bytes());
        let (counts, obstacles) = (Counts::new(clusters), Obstacles::default());
        let report = CheckReport { total_clusters, ..CheckReport::default() };
        let mut walk = Self { image, counts, geometry, file_bytes, refcounts, report, obstacles, found };
        failed.map(Finding::Unreadable).iter().for_each(|finding| walk.tell(finding));
        walk
    }

    /// Counts the references of the header, the mapping, the snapshots and the bitmaps into the window.
    pub(super) fn references(&mut self) {
        let header = self.image.header();
        self.refer("header", 0, self.geometry.cluster_bytes(), User::Table);
        self.l1_table(header.l1, true);
        self.snapshots();
        self.bitmaps();
    }

    /// Counts the references of the refcount table into the window.
    pub(super) fn refcount_references(&mut self) {
        let (at, cluster_bytes) = (self.image.header().refcount_table, self.geometry.cluster_bytes());
        let table_bytes = u64::from(at.count) * cluster_bytes;
        let mut is_usable = self.refer_only("refcount table", at.offset, table_bytes, User::Refcounts);
        for index in 0..self.refcounts.entries() {
            let value = self.refcounts.entry(index);
            is_usable &= match RefcountTableEntry::decode(value, &self.geometry).map(|entry| entry.block) {
                Ok(None) => true,
                Ok(Some(block)) => self.refer_only("refcount block", block, cluster_bytes, User::Refcounts),
                Err(problem) => {
                    self.bad(at.offset, BadEntry { table: Table::Refcount, index, value, problem });
                    false
                }
            };
        }
        self.obstacles.unusable_counts |= !is_usable;
    }

    fn snapshots(&mut self) {
        let at = self.image.header().snapshots;
        let mut snapshots = self.image.snapshots();
        for snapshot in snapshots.by_ref() {
            match snapshot {
                Ok(snapshot) => self.l1_table(snapshot.l1, false),
                Err(error @ FormatError::Read { .. }) => self.tell_first(Finding::Unreadable(error)),
                Err(error) => self.tell_first(Finding::Broken(error)),
            }
        }
        self.refer("snapshot table", at.offset, snapshots.table_bytes(), User::Table);
    }

    /// `active`: not a snapshot's, so that its copied bits mean something.
    fn l1_table(&mut self, at: TableAt, active: bool) {
        if !self.refer("L1 table", at.offset, u64::from(at.count) * 8, User::Table) {
            return;
        }
        self.entries("L1 table", at.offset, at.count.into(), |walk, index, value| {
            let (entry, problem) = lenient::l1_entry(value, &walk.geometry);
            if let Some(problem) = problem {
                walk.bad(at.offset, BadEntry { table: Table::L1, index, value, problem });
                walk.obstacles.unknown_references |= entry.is_none();
            }
            let Some(L1Entry { l2_table: Some(table), copied }) = entry else { return };
            if active {
                walk.copied(Table::L1, index, value, copied, table);
                // Two entries for one table: where the other table is, is not known.
                let cluster = table >> walk.geometry.cluster_bits;
                walk.obstacles.unknown_references |= walk.counts.has(cluster, User::L2Table);
            }
            if walk.refer("L2 table", table, walk.geometry.cluster_bytes(), User::L2Table) {
                walk.l2_table(table, index, active);
            }
        });
    }

    fn l2_table(&mut self, table: u64, l1_index: u64, active: bool) {
        let mut bytes = vec![0; usize::try_from(self.geometry.cluster_bytes()).unwrap_or(usize::MAX)];
        if let Err(error) = read_padded(self.image.file(), "L2 table", table, &mut bytes) {
            return self.tell_first(Finding::Unreadable(error));
        }
        let counts_guests = active && self.counts.is_first();
        let mut expected = None;
        for index in 0..self.geometry.l2_entries() {
            let at = usize::try_from(index).unwrap_or(usize::MAX);
            let raw = RawL2Entry::at(&bytes, at, &self.geometry).unwrap_or_default();
            let guest = ((l1_index << self.geometry.l2_entries_bits()) | u64::from(index))
                << self.geometry.cluster_bits;
            let (entry, problem) = lenient::l2_entry(raw, &self.geometry);
            if let Some(problem) = problem.or(self.identity(entry, guest)) {
                let bad = BadEntry { table: Table::L2, index: index.into(), value: raw.cluster, problem };
                self.bad(table, bad);
                self.obstacles.unknown_references |= entry.is_none();
            }
            match entry {
                Some(L2Entry::Compressed(cluster)) => self.compressed(cluster, counts_guests),
                Some(L2Entry::Standard(StandardCluster { host_offset: Some(offset), copied, .. })) => {
                    self.data(offset, counts_guests, &mut expected);
                    if active {
                        self.copied(Table::L2, index.into(), raw.cluster, copied, offset);
                    }
                }
                _ => {}
            }
        }
    }

    fn compressed(&mut self, cluster: CompressedCluster, counts_guests: bool) {
        self.refer("compressed data", cluster.host_offset, cluster.len_bytes(), User::Compressed);
        if counts_guests {
            self.report.allocated_clusters += 1;
            self.report.compressed_clusters += 1;
            self.report.fragmented_clusters += 1;
        }
    }

    /// Data in an external file are at the guest's offset.
    fn identity(&self, entry: Option<L2Entry>, guest_offset: u64) -> Option<EntryProblem> {
        match entry {
            Some(L2Entry::Standard(StandardCluster { host_offset: Some(offset), .. }))
                if self.geometry.has_external_data() && offset != guest_offset =>
            {
                Some(EntryProblem::NotIdentity { offset, guest_offset })
            }
            _ => None,
        }
    }

    /// `expected`: where the next cluster would have to be in order not to count as fragmented.
    fn data(&mut self, offset: u64, counts_guests: bool, expected: &mut Option<u64>) {
        let cluster_bytes = self.geometry.cluster_bytes();
        if counts_guests {
            self.report.allocated_clusters += 1;
            self.report.fragmented_clusters += u64::from(expected.is_some_and(|expected| expected != offset));
            *expected = Some(offset + cluster_bytes);
        }
        if !self.geometry.has_external_data() {
            self.refer("data", offset, cluster_bytes, User::Data);
        }
    }

    /// The copied bit says that the stored count is 1.
    fn copied(&mut self, table: Table, index: u64, value: u64, copied: bool, offset: u64) {
        if !self.counts.is_first() {
            return;
        }
        // Clusters of an external file are not counted.
        let is_outside = table == Table::L2 && self.geometry.has_external_data();
        let refcount =
            if is_outside { Ok(1) } else { self.refcounts.of(offset >> self.geometry.cluster_bits) };
        match refcount {
            Ok(refcount) if (refcount == 1) != copied => {
                self.tell(&Finding::Copied { table, index, value, refcount });
            }
            Ok(_) => {}
            Err(error) => self.tell(&Finding::Unreadable(error)),
        }
    }

    /// Calls `visit` with index and value of each entry.
    pub(crate) fn entries(
        &mut self,
        what: &'static str,
        offset: u64,
        count: u64,
        mut visit: impl FnMut(&mut Self, u64, u64),
    ) {
        let mut piece = vec![0; usize::try_from(count.min(PIECE_ENTRIES) * 8).unwrap_or_default()];
        let mut first = 0;
        while first < count {
            let entries = (count - first).min(PIECE_ENTRIES);
            let bytes = &mut piece[..usize::try_from(entries * 8).unwrap_or_default()];
            if let Err(error) = read_padded(self.image.file(), what, offset + first * 8, bytes) {
                return self.tell_first(Finding::Unreadable(error));
            }
            for (index, entry) in (first..).zip(bytes.as_chunks::<8>().0) {
                visit(self, index, u64::from_be_bytes(*entry));
            }
            first += entries;
        }
    }

    /// Counts a reference to each cluster of a range. Returns false, and counts nothing, if the range is past the end of
    /// the file: the last cluster of the file may be shorter than a cluster.
    pub(super) fn refer(&mut self, what: &'static str, offset: u64, len_bytes: u64, user: User) -> bool {
        let is_inside = self.refer_only(what, offset, len_bytes, user);
        self.obstacles.unknown_references |= !is_inside;
        is_inside
    }

    /// The same for the refcount table and its blocks, without which all references are known.
    fn refer_only(&mut self, what: &'static str, offset: u64, len_bytes: u64, user: User) -> bool {
        let Some(last) = len_bytes.checked_sub(1) else { return true };
        let cluster_bits = self.geometry.cluster_bits;
        let clusters = self.file_bytes.div_ceil(self.geometry.cluster_bytes());
        let last = offset.checked_add(last).map_or(u64::MAX, |last| last >> cluster_bits);
        if last >= clusters {
            self.tell_first(Finding::Outside { what, offset, len_bytes });
            return false;
        }
        for cluster in offset >> cluster_bits..=last {
            self.counts.add(cluster, user);
        }
        true
    }

    /// Compares the window's counters with the stored counts.
    pub(super) fn compare(&mut self) {
        self.find_shared_counts();
        let std::ops::Range { mut start, end } = self.counts.range();
        let block_bits = self.geometry.refcount_block_bits();
        while start < end {
            let index = start >> block_bits;
            let end_of_block = ((index + 1) << block_bits).min(end);
            let has_block = self.refcounts.has_block(index);
            for cluster in start..end_of_block {
                if has_block || self.counts.is_used(cluster) {
                    self.compare_one(cluster);
                    self.obstacles.missing_blocks |= !has_block;
                }
            }
            start = end_of_block;
        }
    }

    /// A count that is stored in a cluster of something else cannot be changed.
    fn find_shared_counts(&mut self) {
        let (at, range) = (self.image.header().refcount_table, self.counts.range());
        let first = at.offset >> self.geometry.cluster_bits;
        let blocks = (0..self.refcounts.entries()).filter_map(|index| self.refcounts.block_offset(index));
        let blocks = blocks.map(|offset| offset >> self.geometry.cluster_bits);
        let mut clusters = (first..first + u64::from(at.count)).chain(blocks);
        let is_shared = clusters.any(|cluster| range.contains(&cluster) && self.counts.of(cluster).0 != 1);
        self.obstacles.unusable_counts |= is_shared;
    }

    fn compare_one(&mut self, cluster: u64) {
        let (references, is_overlap) = self.counts.of(cluster);
        // An entry leads to the wrong cluster, unless it is one of the refcount table, which can be built anew.
        self.obstacles.unknown_references |= is_overlap && !self.counts.has(cluster, User::Refcounts);
        let refcount = match self.refcounts.of(cluster) {
            Ok(refcount) => refcount,
            Err(error) => return self.tell(&Finding::Unreadable(error)),
        };
        if refcount != 0 || references != 0 {
            self.report.image_end_bytes = (cluster + 1) << self.geometry.cluster_bits;
        }
        if refcount != references {
            self.tell(&Finding::Refcount { cluster, refcount, references });
        } else if is_overlap {
            self.tell(&Finding::Overlap { cluster, references });
        }
    }

    /// Where the next window begins that has stored counts.
    pub(super) fn next_window_with_counts(&self) -> Option<u64> {
        let (end, bits) = (self.counts.range().end, self.geometry.refcount_block_bits());
        let clusters = self.file_bytes.div_ceil(self.geometry.cluster_bytes());
        // A block may begin in this window and end in the next.
        let first = (end >> bits..self.refcounts.entries()).find(|index| self.refcounts.has_block(*index))?;
        let cluster = (first << bits).max(end);
        (cluster < clusters).then(|| self.counts.window_of(cluster))
    }

    pub(super) fn bad(&mut self, table_offset: u64, bad: BadEntry) {
        self.tell_first(Finding::Entry { table_offset, bad });
    }

    /// Reports what each walk finds again.
    pub(super) fn tell_first(&mut self, finding: Finding) {
        let is_unread = matches!(finding, Finding::Broken(_) | Finding::Unreadable(_));
        self.obstacles.unknown_references |= is_unread;
        self.obstacles.unreadable |= matches!(finding, Finding::Unreadable(_));
        if self.counts.is_first() {
            self.tell(&finding);
        }
    }

    fn tell(&mut self, finding: &Finding) {
        match finding.severity() {
            Severity::Corruption => self.report.corruptions += 1,
            Severity::Leak => self.report.leaks += 1,
            Severity::CheckError => {
                self.obstacles.unreadable = true;
                self.report.check_errors += 1;
            }
        }
        (self.found)(finding);
    }
}
