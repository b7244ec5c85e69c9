//! Reads indirect descriptor tables anywhere in guest memory, for both ring formats.
//!
//! A driver chooses a new table address for every request, so tables cannot be mapped in advance. Instead
//! each memory region is mapped as one long row of words. Nearly every table is aligned and inside one
//! region; reading it takes two atomic loads per descriptor. Any other table is copied piece by piece.
//!
//! Spec: virtio 1.3 §2.7.5.3, §2.8.7.

use std::cell::Cell;
use std::sync::atomic::Ordering::Relaxed;

use guest_mem::{AccessError, Address, GuestRange, MemoryView, SharedSlice};

use crate::chain::{DESCRIPTOR_BYTES, Descriptor, NEXT};
use crate::fault::IndirectFault;

const WORD_BYTES: u64 = 8;

/// Number of entries in the table that `named_by` refers to. The table must not wrap around the address space and must
/// have at most `limit` entries. The WRITE flag is ignored (virtio 1.3 §2.7.5.3.2, §2.8.7).
#[inline]
pub(crate) fn check_indirect(
    named_by: &Descriptor,
    limit: u16,
    negotiated: bool,
) -> Result<u16, IndirectFault> {
    let len_bytes = named_by.range.len_bytes;
    let entries = len_bytes / DESCRIPTOR_BYTES;
    if !negotiated {
        return Err(IndirectFault::NotNegotiated);
    }
    if named_by.has(NEXT) {
        return Err(IndirectFault::WithNext);
    }
    if !len_bytes.is_multiple_of(DESCRIPTOR_BYTES) {
        return Err(IndirectFault::Length { len_bytes });
    }
    if entries == 0 {
        return Err(IndirectFault::Empty);
    }
    let addr = named_by.range.addr;
    if addr.checked_add(u64::from(len_bytes)).is_none() {
        let len_bytes = u64::from(len_bytes);
        return Err(IndirectFault::Unmapped(AccessError::Unmapped { addr, len_bytes }));
    }
    u16::try_from(entries)
        .ok()
        .filter(|&entries| entries <= limit)
        .ok_or(IndirectFault::TooLarge { entries, limit })
}

/// All guest memory, for reading tables.
#[derive(Debug)]
pub(crate) struct Tables {
    view: MemoryView,
    /// Sorted by address; regions that are not word-aligned are left out.
    rows: Box<[Row]>,
    /// Index of the row that the last lookup found.
    hint: Cell<usize>,
}

/// One memory region as words.
#[derive(Debug)]
struct Row {
    guest_addr: u64,
    words: SharedSlice<u64>,
}

/// One indirect table.
pub(crate) enum Table<'t> {
    /// A table inside one row: the row, and the index of the table's first word.
    Words(&'t SharedSlice<u64>, usize),
    /// Any other table: the address of its first descriptor.
    Copied(&'t MemoryView, u64),
}

impl Tables {
    pub fn new(view: MemoryView) -> Self {
        let memory = view.memory();
        let rows = memory.regions().iter().filter_map(|region| {
            let (start, size_bytes) = (region.spec().guest_addr, region.spec().size_bytes);
            let words = memory.shared_slice(start, usize::try_from(size_bytes / WORD_BYTES).ok()?).ok()?;
            Some(Row { guest_addr: start.raw_value(), words })
        });
        let rows = rows.collect();
        Self { view, rows, hint: Cell::new(0) }
    }

    /// The table at `range`.
    #[inline]
    pub fn open(&self, range: GuestRange) -> Table<'_> {
        let hit = self.rows.get(self.hint.get()).and_then(|row| row.find(range));
        hit.or_else(|| self.search(range)).unwrap_or(Table::Copied(&self.view, range.addr))
    }

    fn search(&self, range: GuestRange) -> Option<Table<'_>> {
        let after = self.rows.partition_point(|row| row.guest_addr <= range.addr);
        let index = after.checked_sub(1)?;
        let found = self.rows[index].find(range)?;
        self.hint.set(index);
        Some(found)
    }
}

impl Row {
    #[inline]
    fn find(&self, range: GuestRange) -> Option<Table<'_>> {
        let offset_bytes = range.addr.checked_sub(self.guest_addr)?;
        let room_bytes = (self.words.len() as u64 * WORD_BYTES).checked_sub(offset_bytes)?;
        let fits = offset_bytes.is_multiple_of(WORD_BYTES) && u64::from(range.len_bytes) <= room_bytes;
        #[allow(clippy::cast_possible_truncation)] // at most `words.len()`, if it fits
        fits.then_some(Table::Words(&self.words, (offset_bytes / WORD_BYTES) as usize))
    }
}

impl<'t> Table<'t> {
    /// The row and the index of the table's first word, unless the table must be copied.
    #[inline]
    pub fn as_words(&self) -> Option<(&'t SharedSlice<u64>, usize)> {
        if let Self::Words(words, first) = *self { Some((words, first)) } else { None }
    }

    /// The two words of descriptor `index`, which must be inside the table; each word is read once.
    #[inline]
    pub fn words(&self, index: u16) -> Result<(u64, u64), AccessError> {
        match *self {
            Table::Words(words, first) => {
                let at = first + 2 * usize::from(index);
                Ok((words.load(at, Relaxed), words.load(at + 1, Relaxed)))
            }
            Table::Copied(view, addr) => copy(view, addr + u64::from(index) * u64::from(DESCRIPTOR_BYTES)),
        }
    }
}

#[cold]
#[allow(clippy::cast_possible_truncation)] // splits the value into its words
fn copy(view: &MemoryView, addr: u64) -> Result<(u64, u64), AccessError> {
    let mut bytes = [0; DESCRIPTOR_BYTES as usize];
    view.read(addr, &mut bytes)?;
    let both = u128::from_le_bytes(bytes);
    Ok((both as u64, (both >> 64) as u64))
}
