//! Changes entries of L1 and L2 tables: copied bits, and entries without data that break the format.
//!
//! Each L2 table is changed in the window of clusters to which it belongs, where it is known what else uses it.

use crate::check::lenient;
use crate::check::walk::Walk;
use crate::check::{Scope, each_window};
use crate::error::FormatError;
use crate::geometry::Geometry;
use crate::header::TableAt;
use crate::image::Image;
use crate::repair::error::{RepairError, expect_known, expect_read};
use crate::repair::report::{Event, Note};
use crate::repair::sectors::{SECTOR_BYTES, Target, read, sync, write_changed};
use crate::tables::{BadEntry, COPIED, EntryProblem, L2Entry, RawL2Entry, StandardCluster, Table};

/// Long tables are changed in pieces, each in one cluster.
const MAX_PIECE_BYTES: u64 = 64 << 10;
/// Of an extended L2 entry: subclusters that read as zeroes.
const ZERO_SUBCLUSTERS: u64 = (u32::MAX as u64) << 32;

/// Which copied bits are changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Bits {
    /// Those that are clear although the count is 1. Only if all counts are the numbers of references.
    pub(super) set: bool,
    /// Those that are set although the count is not 1.
    pub(super) clear: bool,
}

impl Bits {
    const fn allow(self, copied: bool) -> bool {
        if copied { self.set } else { self.clear }
    }
}

/// Makes clusters read as zeroes whose entries are wrong, but say that there are no data, also in snapshots. Returns
/// whether there are any.
pub(super) fn zero<F: Target>(file: &F, tell: &mut dyn FnMut(Event<'_>)) -> Result<bool, RepairError> {
    let image = Image::open(file)?;
    let mut is_changed = false;
    each_window(&image, Scope::All, &mut |_| {}, |walk| {
        expect_read(walk.obstacles)?;
        for l1 in std::iter::once(Ok(image.header().l1)).chain(snapshot_l1_tables(&image)) {
            let l1 = l1?;
            is_changed |= each_l2_table(walk, l1, &mut |_, table_offset, index, raw| {
                let (new, problem) = zeroed(raw, &image.header().geometry)?;
                let bad = BadEntry { table: Table::L2, index, value: raw.cluster, problem };
                tell(Event::Note(Note::Zeroed { table_offset, bad }));
                Some(new)
            })?;
        }
        expect_read(walk.obstacles)
    })?;
    if is_changed {
        sync(file)?;
    }
    Ok(is_changed)
}

/// Tables that the snapshot table does not name because it is broken are left out.
fn snapshot_l1_tables<F: Target>(image: &Image<F>) -> impl Iterator<Item = Result<TableAt, FormatError>> {
    image.snapshots().map(|snapshot| snapshot.map(|snapshot| snapshot.l1)).filter(|l1| match l1 {
        Ok(_) => true,
        Err(error) => matches!(error, FormatError::Read { .. }),
    })
}

/// What `qemu-img check` stores, too: only an offset inside of a cluster is removed.
fn zeroed(raw: RawL2Entry, geometry: &Geometry) -> Option<(RawL2Entry, EntryProblem)> {
    let problem = L2Entry::decode(raw, geometry).err()?;
    let EntryProblem::Unaligned { .. } = problem else { return None };
    if geometry.has_extended_l2() {
        let has_data = raw.subclusters & !ZERO_SUBCLUSTERS != 0;
        let new = RawL2Entry { cluster: 0, subclusters: raw.subclusters };
        return (!has_data).then_some((new, problem));
    }
    let is_zero = geometry.has_zero_flag() && raw.cluster & 1 != 0;
    is_zero.then_some((RawL2Entry::zeroes(None, geometry), problem))
}

/// Corrects the copied bits of the active tables, by the stored counts.
pub(super) fn correct_copied<F: Target>(file: &F, bits: Bits) -> Result<(), RepairError> {
    let image = Image::open(file)?;
    let (l1, geometry) = (image.header().l1, image.header().geometry);
    let mut is_changed = false;
    each_window(&image, Scope::All, &mut |_| {}, |walk| {
        expect_read(walk.obstacles)?;
        if bits.set {
            expect_known(walk.obstacles)?;
        }
        is_changed |= copied_l1(walk, l1, bits)?;
        is_changed |= each_l2_table(walk, l1, &mut |walk, _, _, raw| {
            let Some(L2Entry::Standard(StandardCluster { host_offset: Some(offset), copied, .. })) =
                lenient::l2_entry(raw, &geometry).0
            else {
                return None;
            };
            // Clusters of an external file are not counted.
            let is_own = geometry.has_external_data() || is_own(walk, offset)?;
            let new = RawL2Entry { cluster: raw.cluster ^ COPIED, ..raw };
            (is_own != copied && bits.allow(is_own)).then_some(new)
        })?;
        expect_read(walk.obstacles)
    })?;
    if is_changed {
        sync(file)?;
    }
    Ok(())
}

/// Whether the stored count of a cluster is 1. `None`: it cannot be read.
fn is_own<F: Target>(walk: &mut Walk<'_, F>, offset: u64) -> Option<bool> {
    let cluster = offset >> walk.image.header().geometry.cluster_bits();
    walk.refcounts.of(cluster).ok().map(|count| count == 1)
}

/// Whether the cluster of a table is in the window, and nothing else uses it.
fn is_exclusive<F: Target>(walk: &Walk<'_, F>, offset: u64) -> bool {
    let cluster = offset >> walk.image.header().geometry.cluster_bits();
    walk.counts.range().contains(&cluster) && !walk.counts.of(cluster).1
}

/// Corrects the part of the L1 table that is in the window.
fn copied_l1<F: Target>(walk: &mut Walk<'_, F>, at: TableAt, bits: Bits) -> Result<bool, RepairError> {
    let geometry = walk.image.header().geometry;
    let (piece_bytes, table_bytes) = (geometry.cluster_bytes().min(MAX_PIECE_BYTES), u64::from(at.count) * 8);
    let mut is_changed = false;
    for start in (0..table_bytes).step_by(usize::try_from(piece_bytes).unwrap_or(usize::MAX)) {
        let offset = at.offset + start;
        if !is_exclusive(walk, offset) {
            continue;
        }
        let len_bytes = (table_bytes - start).min(piece_bytes);
        let old =
            read(walk.image.file(), "L1 table", offset, len_bytes.next_multiple_of(SECTOR_BYTES as u64))?;
        let mut new = old.clone();
        let entries = usize::try_from(len_bytes / 8).unwrap_or(usize::MAX);
        for entry in new.as_chunks_mut::<8>().0.iter_mut().take(entries) {
            let value = u64::from_be_bytes(*entry);
            let Some((table, copied)) =
                lenient::l1_entry(value, &geometry).0.and_then(|entry| Some((entry.l2_table?, entry.copied)))
            else {
                continue;
            };
            let Some(is_own) = is_own(walk, table) else { continue };
            if is_own != copied && bits.allow(is_own) {
                *entry = (value ^ COPIED).to_be_bytes();
            }
        }
        is_changed |= write_changed(walk.image.file(), "L1 table", offset, &old, &new)?;
    }
    Ok(is_changed)
}

/// What an entry becomes: by the offset of its table, its index there, and its value. `None`: it stays.
type Change<'c, 'w, F> = dyn FnMut(&mut Walk<'w, F>, u64, u64, RawL2Entry) -> Option<RawL2Entry> + 'c;

/// Changes the L2 tables in the window to which an L1 table leads. Returns whether any has changed.
fn each_l2_table<'w, F: Target>(
    walk: &mut Walk<'w, F>,
    l1: TableAt,
    change: &mut Change<'_, 'w, F>,
) -> Result<bool, RepairError> {
    let mut result = Ok(false);
    walk.entries("L1 table", l1.offset, l1.count.into(), |walk, _, value| {
        let geometry = walk.image.header().geometry;
        let table = lenient::l1_entry(value, &geometry).0.and_then(|entry| entry.l2_table);
        let Some(offset) = table.filter(|offset| is_exclusive(walk, *offset)) else { return };
        if let Ok(is_changed) = &mut result {
            match l2_table(walk, offset, change) {
                Ok(more) => *is_changed |= more,
                Err(error) => result = Err(error),
            }
        }
    });
    result
}

fn l2_table<'w, F: Target>(
    walk: &mut Walk<'w, F>,
    offset: u64,
    change: &mut Change<'_, 'w, F>,
) -> Result<bool, RepairError> {
    let geometry = walk.image.header().geometry;
    let old = read(walk.image.file(), "L2 table", offset, geometry.cluster_bytes())?;
    let mut new = old.clone();
    for index in 0..geometry.l2_entries() {
        let at = usize::try_from(index).unwrap_or(usize::MAX);
        let raw = RawL2Entry::at(&old, at, &geometry).unwrap_or_default();
        if let Some(changed) = change(walk, offset, index.into(), raw) {
            let at = u64::from(index) * geometry.l2_entry_bytes();
            changed.store(&mut new, usize::try_from(at).unwrap_or(usize::MAX), &geometry);
        }
    }
    write_changed(walk.image.file(), "L2 table", offset, &old, &new)
}
