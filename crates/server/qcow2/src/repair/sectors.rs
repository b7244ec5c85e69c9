//! Reads and writes parts of tables in whole sectors, so that each of their entries is old or new after a crash.

use crate::error::{FormatError, read_padded};
use crate::repair::error::RepairError;
use crate::write::WriteAt;

/// What a disk writes as a whole.
pub(super) const SECTOR_BYTES: usize = 512;

/// A file that is changed only after [`prepare`](Self::prepare).
pub(super) trait Target: WriteAt {
    /// What comes before the first change. It does nothing when it is called again.
    fn prepare(&self) -> Result<(), RepairError>;
}

impl<T: Target> Target for &T {
    fn prepare(&self) -> Result<(), RepairError> {
        (**self).prepare()
    }
}

/// Reads a part of a table. What the file does not have of it is zeroes.
pub(super) fn read<F: WriteAt>(
    file: &F,
    what: &'static str,
    offset: u64,
    len_bytes: u64,
) -> Result<Vec<u8>, FormatError> {
    let mut bytes = vec![0; usize::try_from(len_bytes).unwrap_or(usize::MAX)];
    read_padded(file, what, offset, &mut bytes)?;
    Ok(bytes)
}

/// Writes from the first to the last sector that has changed. Returns whether there are any.
pub(super) fn write_changed<F: Target>(
    file: &F,
    what: &'static str,
    offset: u64,
    old: &[u8],
    new: &[u8],
) -> Result<bool, RepairError> {
    let sectors = || old.chunks(SECTOR_BYTES).zip(new.chunks(SECTOR_BYTES));
    let is_changed = |(old, new): (&[u8], &[u8])| old != new;
    let Some(first) = sectors().position(is_changed) else { return Ok(false) };
    let unchanged = old.chunks(SECTOR_BYTES).rev().zip(new.chunks(SECTOR_BYTES).rev());
    let after = unchanged.take_while(|(old, new)| old == new).count();
    let end = new.len().saturating_sub(after * SECTOR_BYTES);
    let start = first * SECTOR_BYTES;
    let part = new.get(start..end).unwrap_or_default();
    let at = offset.saturating_add(start as u64);
    file.prepare()?;
    file.write_at(at, part).map_err(|source| RepairError::Io { what, offset: at, source })?;
    Ok(true)
}

/// Makes the file longer.
pub(super) fn grow<F: Target>(file: &F, len_bytes: u64) -> Result<(), RepairError> {
    file.prepare()?;
    file.set_len(len_bytes).map_err(|source| RepairError::Grow { len_bytes, source })
}

/// Makes durable what was written.
pub(super) fn sync<F: WriteAt>(file: &F) -> Result<(), RepairError> {
    file.sync_data().map_err(RepairError::Sync)
}
