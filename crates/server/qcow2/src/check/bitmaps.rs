//! Bitmaps are only visited: their directory, their tables, and the clusters that these name.

use crate::big_endian::{u16_at, u32_at, u64_at};
use crate::check::counts::User;
use crate::check::finding::Finding;
use crate::check::walk::Walk;
use crate::error::{FormatError, Limit, read_whole};
use crate::geometry::Geometry;
use crate::read_at::ReadAt;
use crate::tables::{BadEntry, EntryProblem, Table};

const FIXED_BYTES: usize = 24;
/// Bits 9 to 55.
const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;
/// Without an offset: the cluster is all ones.
const ALL_ONES: u64 = 1;
/// QEMU's limit.
const MAX_TABLE_ENTRIES: u64 = 0x0800_0000;
const MAX_OFFSET: u64 = i64::MAX as u64 - 8 * MAX_TABLE_ENTRIES;

impl<F: ReadAt> Walk<'_, F> {
    pub(super) fn bitmaps(&mut self) {
        let Some(at) = self.image.header().extensions.bitmaps else { return };
        if !self.refer("bitmap directory", at.directory_offset, at.directory_bytes, User::Table) {
            return;
        }
        let mut offset = at.directory_offset;
        for _ in 0..at.count {
            match self.bitmap(offset, at.directory_offset + at.directory_bytes) {
                Ok(next) => offset = next,
                Err(error @ FormatError::Read { .. }) => return self.tell_first(Finding::Unreadable(error)),
                Err(error) => return self.tell_first(Finding::Broken(error)),
            }
        }
    }

    /// Visits one bitmap. Returns where the next entry of the directory is.
    fn bitmap(&mut self, offset: u64, end: u64) -> Result<u64, FormatError> {
        let geometry = self.image.header().geometry;
        let mut fixed = [0; FIXED_BYTES];
        read_whole(self.image.file(), "bitmap directory", offset, &mut fixed)?;
        let (table, entries) = (u64_at(&fixed, 0), u64::from(u32_at(&fixed, 8)));
        Limit::AtMost(MAX_TABLE_ENTRIES).check("bitmap_table_size", entries)?;
        Limit::NonzeroMultipleOf(geometry.cluster_bytes()).check("bitmap_table_offset", table)?;
        Limit::AtMost(MAX_OFFSET).check("bitmap_table_offset", table)?;
        let variable = u64::from(u16_at(&fixed, 18)) + u64::from(u32_at(&fixed, 20));
        let next = offset + (FIXED_BYTES as u64 + variable).next_multiple_of(8);
        Limit::AtMost(end).check("end of an entry of the bitmap directory", next)?;
        if self.refer("bitmap table", table, entries * 8, User::Table) {
            self.entries("bitmap table", table, entries, |walk, index, value| {
                match decode(value, &geometry) {
                    Ok(None) => {}
                    Ok(Some(offset)) => {
                        _ = walk.refer("bitmap", offset, geometry.cluster_bytes(), User::Table)
                    }
                    Err(problem) => {
                        walk.bad(table, BadEntry { table: Table::Bitmap, index, value, problem });
                        walk.obstacles.unknown_references = true;
                    }
                }
            });
        }
        Ok(next)
    }
}

fn decode(value: u64, geometry: &Geometry) -> Result<Option<u64>, EntryProblem> {
    let offset = value & OFFSET_MASK;
    let allowed = if offset == 0 { ALL_ONES } else { OFFSET_MASK };
    if value & !allowed != 0 {
        return Err(EntryProblem::Reserved { bits: value & !allowed });
    }
    if geometry.in_cluster(offset) != 0 {
        return Err(EntryProblem::Unaligned { offset, cluster_bytes: geometry.cluster_bytes() });
    }
    Ok((offset != 0).then_some(offset))
}
