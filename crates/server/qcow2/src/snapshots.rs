//! The table of internal snapshots.
//!
//! `file → one entry after the other, of variable length → Snapshot`; the table is read in steps, so that its length is
//! bounded by what this program keeps of it.

use crate::big_endian::{u16_at, u32_at, u64_at};
use crate::error::{FormatError, Limit, read_whole};
use crate::header::{Header, TableAt};
use crate::read_at::ReadAt;

const FIXED_BYTES: usize = 40;
/// QEMU's limit for the data of an entry that it does not know.
const MAX_EXTRA_BYTES: u64 = 1024;
/// QEMU's limit for the table.
const MAX_TABLE_BYTES: u64 = 1024 * 65_536;
/// QEMU's limit, as for the active table.
const MAX_L1_ENTRIES: u64 = (32 << 20) / 8;
/// Extra data up to the size of the snapshot's disk.
const EXTRA_V3_BYTES: u64 = 16;

/// An internal snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// Its L1 table. `count`: its entries.
    pub l1: TableAt,
    /// The user's number or word for it.
    pub id: String,
    /// The user's name for it.
    pub name: String,
    /// When it was taken, in seconds since 1970.
    pub taken_s: u32,
    /// The rest of that time.
    pub taken_ns: u32,
    /// How long the guest had been running.
    pub guest_ran_ns: u64,
    /// The guest's memory and devices. 0: not saved.
    pub vm_state_bytes: u64,
    /// The guest's disk at that time. `None`: the image does not say.
    pub size_bytes: Option<u64>,
}

/// Reads the snapshot table, entry by entry.
#[derive(Debug)]
pub struct Snapshots<'a, F: ?Sized> {
    file: &'a F,
    header: &'a Header,
    index: u32,
    offset: u64,
}

impl<'a, F: ReadAt + ?Sized> Snapshots<'a, F> {
    /// The snapshots of the image in `file`, whose header is `header`.
    pub fn new(file: &'a F, header: &'a Header) -> Self {
        Self { file, header, index: 0, offset: header.snapshots.offset }
    }

    /// The bytes of the table up to here; after the last entry, its length.
    #[must_use]
    pub fn table_bytes(&self) -> u64 {
        self.offset - self.header.snapshots.offset
    }

    fn read(&mut self) -> Result<Snapshot, FormatError> {
        let (index, what, at) = (self.index, "snapshot table", self.offset);
        let mut fixed = [0; FIXED_BYTES];
        read_whole(self.file, what, at, &mut fixed)?;
        let id_bytes = u64::from(u16_at(&fixed, 12));
        let name_bytes = u64::from(u16_at(&fixed, 14));
        let extra_bytes = u64::from(u32_at(&fixed, 36));
        Limit::AtMost(MAX_EXTRA_BYTES).check_snapshot(index, "extra_data_size", extra_bytes)?;
        let least = if self.header.geometry.version() >= 3 { EXTRA_V3_BYTES } else { 0 };
        Limit::AtLeast(least).check_snapshot(index, "extra_data_size", extra_bytes)?;
        let variable_bytes = extra_bytes + id_bytes + name_bytes;
        let mut variable = vec![0; usize::try_from(variable_bytes).unwrap_or_default()];
        read_whole(self.file, what, at + FIXED_BYTES as u64, &mut variable)?;
        let end = at + (FIXED_BYTES as u64 + variable_bytes).next_multiple_of(8);
        let table_bytes = end - self.header.snapshots.offset;
        Limit::AtMost(MAX_TABLE_BYTES).check_snapshot(index, "end of the table", table_bytes)?;
        let snapshot = snapshot(&fixed, &variable, extra_bytes, id_bytes);
        self.check(index, &snapshot)?;
        (self.offset, self.index) = (end, index + 1);
        Ok(snapshot)
    }

    fn check(&self, index: u32, snapshot: &Snapshot) -> Result<(), FormatError> {
        let cluster_bytes = self.header.geometry.cluster_bytes();
        let entries = u64::from(snapshot.l1.count);
        Limit::AtMost(MAX_L1_ENTRIES).check_snapshot(index, "l1_size", entries)?;
        let aligned = Limit::MultipleOf(cluster_bytes);
        aligned.check_snapshot(index, "l1_table_offset", snapshot.l1.offset)?;
        let highest = i64::MAX as u64 - entries * 8;
        Limit::AtMost(highest).check_snapshot(index, "l1_table_offset", snapshot.l1.offset)
    }
}

impl<F: ReadAt + ?Sized> Iterator for Snapshots<'_, F> {
    type Item = Result<Snapshot, FormatError>;

    /// After an error, there are no more.
    fn next(&mut self) -> Option<Self::Item> {
        if self.index >= self.header.snapshots.count {
            return None;
        }
        let read = self.read();
        if read.is_err() {
            self.index = u32::MAX;
        }
        Some(read)
    }
}

/// `variable`: the extra data, the id, the name.
fn snapshot(fixed: &[u8], variable: &[u8], extra_bytes: u64, id_bytes: u64) -> Snapshot {
    let split = |bytes: u64| usize::try_from(bytes).unwrap_or_default();
    let (extra, names) = variable.split_at(split(extra_bytes).min(variable.len()));
    let (id, name) = names.split_at(split(id_bytes).min(names.len()));
    let extra_at = |at: usize| (extra.len() >= at + 8).then(|| u64_at(extra, at));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Snapshot {
        l1: TableAt { offset: u64_at(fixed, 0), count: u32_at(fixed, 8) },
        id: text(id),
        name: text(name),
        taken_s: u32_at(fixed, 16),
        taken_ns: u32_at(fixed, 20),
        guest_ran_ns: u64_at(fixed, 24),
        vm_state_bytes: extra_at(0).unwrap_or_else(|| u32_at(fixed, 32).into()),
        size_bytes: extra_at(8),
    }
}
