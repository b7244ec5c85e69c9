//! Changes fields of the header, each in one sector, so that a crash leaves the old or the new value.

use crate::big_endian::u64_at;
use crate::header::TableAt;
use crate::header::features::{CORRUPT, DIRTY, KNOWN_AUTOCLEAR};
use crate::repair::error::RepairError;
use crate::repair::sectors::{SECTOR_BYTES, Target, read, sync, write_changed};

/// `refcount_table_offset`, which `refcount_table_clusters` follows.
const REFCOUNT_TABLE_OFFSET: usize = 48;
const INCOMPATIBLE: usize = 72;
const AUTOCLEAR: usize = 88;

/// A program that changes an image clears the bits that it does not know.
pub(super) fn clear_unknown_autoclear<F: Target>(file: &F) -> Result<(), RepairError> {
    change(file, |header| keep_bits(header, AUTOCLEAR, KNOWN_AUTOCLEAR)).map(drop)
}

/// Clears the bits that say that tables may be wrong. Returns whether one was set.
pub(super) fn clear_marks<F: Target>(file: &F) -> Result<bool, RepairError> {
    change(file, |header| keep_bits(header, INCOMPATIBLE, !(DIRTY | CORRUPT)))
}

/// Names another refcount table, which is durable. `count`: its clusters.
pub(super) fn name_refcount_table<F: Target>(file: &F, at: TableAt) -> Result<(), RepairError> {
    change(file, |header| {
        header[REFCOUNT_TABLE_OFFSET..][..8].copy_from_slice(&at.offset.to_be_bytes());
        header[REFCOUNT_TABLE_OFFSET + 8..][..4].copy_from_slice(&at.count.to_be_bytes());
    })
    .map(drop)
}

/// Version 2 has no feature bits.
fn keep_bits(header: &mut [u8; SECTOR_BYTES], at: usize, kept: u64) {
    if header[4..8] == 3_u32.to_be_bytes() {
        let bits = u64_at(header, at) & kept;
        header[at..at + 8].copy_from_slice(&bits.to_be_bytes());
    }
}

/// Writes the header's first sector if it changes, and syncs it. Returns whether it does.
fn change<F: Target>(file: &F, change: impl Fn(&mut [u8; SECTOR_BYTES])) -> Result<bool, RepairError> {
    let both = || {
        let old = read(file, "header", 0, SECTOR_BYTES as u64)?;
        let mut new = [0; SECTOR_BYTES];
        new.copy_from_slice(&old);
        change(&mut new);
        Ok::<_, RepairError>((old, new))
    };
    let (old, new) = both()?;
    if old == new {
        return Ok(false);
    }
    // This may change the header itself.
    file.prepare()?;
    let (old, new) = both()?;
    write_changed(file, "header", 0, &old, &new)?;
    sync(file)?;
    Ok(true)
}
