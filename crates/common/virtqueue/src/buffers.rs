//! The buffers of a chain that a driver adds; stores them as an indirect table if the driver asks for one.

use guest_mem::{GuestRange, MemoryView};

use crate::AddError;
use crate::chain::{DESCRIPTOR_BYTES, NEXT, WRITE};

/// The buffers of one chain; their number is within the limit.
#[derive(Debug)]
pub(crate) struct Buffers<'r> {
    readable: &'r [GuestRange],
    writable: &'r [GuestRange],
    pub count: u16,
}

impl<'r> Buffers<'r> {
    #[inline]
    pub fn new(readable: &'r [GuestRange], writable: &'r [GuestRange], limit: u16) -> Result<Self, AddError> {
        let needed = readable.len() + writable.len();
        if needed == 0 {
            return Err(AddError::Empty);
        }
        let fits = u16::try_from(needed).ok().filter(|&count| count <= limit);
        let count = fits.ok_or(AddError::TooLong { needed, limit })?;
        Ok(Self { readable, writable, count })
    }

    /// The buffers' descriptors in order: WRITE is set on the writable ones, NEXT on all but the last.
    #[inline]
    pub fn with_flags(&self) -> impl Iterator<Item = (GuestRange, u16)> + use<'r> {
        let flagged = self.readable.iter().map(|&r| (r, 0)).chain(self.writable.iter().map(|&r| (r, WRITE)));
        let last = self.count - 1;
        flagged.zip(0..).map(move |((range, flags), i)| (range, if i < last { flags | NEXT } else { flags }))
    }

    #[inline]
    pub fn writable_bytes(&self) -> u64 {
        self.writable.iter().map(|range| u64::from(range.len_bytes)).sum()
    }
}

/// How many descriptors [`store_table`] writes per store.
const AT_ONCE: usize = 8;

/// Writes descriptors, two words each, to guest memory from `table_addr` on. Batches the stores, because each one looks
/// up its address.
///
/// # Errors
/// [`AddError::Table`]; part of the table may already be written.
#[inline]
pub(crate) fn store_table(
    view: &MemoryView,
    table_addr: u64,
    mut descriptors: impl Iterator<Item = (u64, u64)>,
) -> Result<(), AddError> {
    const ENTRY: usize = DESCRIPTOR_BYTES as usize;
    let mut bytes = [0; AT_ONCE * ENTRY];
    let mut addr = table_addr;
    loop {
        let mut filled = 0;
        for (entry, (low, high)) in bytes.chunks_exact_mut(ENTRY).zip(descriptors.by_ref()) {
            entry[..8].copy_from_slice(&low.to_le_bytes());
            entry[8..].copy_from_slice(&high.to_le_bytes());
            filled += ENTRY;
        }
        if filled == 0 {
            return Ok(());
        }
        view.store(addr, &bytes[..filled]).map_err(AddError::Table)?;
        addr = addr.wrapping_add(filled as u64);
        if filled < bytes.len() {
            return Ok(());
        }
    }
}
