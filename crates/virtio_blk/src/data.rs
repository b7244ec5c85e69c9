//! The data part of a request: a chain's buffers without the bytes of header and status.
//!
//! Not here: where header and status end (`request.rs`), pointers for the kernel (`guest_mem`).

use guest_mem::{AccessError, GuestRange, MemoryView};

/// Buffers of a chain from some byte to some other; borrows them, copies nothing.
#[derive(Clone, Copy, Debug)]
pub struct Data<'c> {
    /// Only those that hold a byte of it.
    ranges: &'c [GuestRange],
    /// Bytes of the first range that come before.
    skip_bytes: u32,
    /// Bytes after the end are the last range's.
    len_bytes: u64,
}

impl<'c> Data<'c> {
    /// All of `ranges`, which are `len_bytes` long together; none is empty.
    #[inline]
    pub(crate) fn new(ranges: &'c [GuestRange], len_bytes: u64) -> Self {
        Self { ranges, skip_bytes: 0, len_bytes }
    }

    /// Without the last byte, and that byte's address. `None` if there is none.
    #[inline]
    pub(crate) fn split_last_byte(mut self) -> Option<(Self, u64)> {
        let (last, before) = self.ranges.split_last()?;
        if last.len_bytes == 1 {
            self.ranges = before;
        }
        self.len_bytes -= 1;
        // Past the end of the address space nothing is mapped: saturating keeps it so.
        Some((self, last.addr.saturating_add(u64::from(last.len_bytes - 1))))
    }

    /// Copies the first bytes into `out` and goes on after them. At most [`Data::len_bytes`].
    #[inline]
    pub(crate) fn take(&mut self, view: &MemoryView, out: &mut [u8]) -> Result<(), AccessError> {
        match self.ranges.split_first() {
            // A header of its own, as nearly all are.
            Some((first, rest)) if self.skip_bytes == 0 && first.len_bytes as usize == out.len() => {
                view.read(first.addr, out)?;
                self.ranges = rest;
                self.len_bytes -= u64::from(first.len_bytes);
                Ok(())
            }
            _ => self.take_parts(view, out),
        }
    }

    #[cold]
    fn take_parts(&mut self, view: &MemoryView, out: &mut [u8]) -> Result<(), AccessError> {
        let mut filled = 0;
        for part in self.prefix(out.len() as u64).ranges() {
            let end = filled + part.len_bytes as usize;
            view.read(part.addr, &mut out[filled..end])?;
            filled = end;
        }
        self.skip(out.len() as u64);
        Ok(())
    }

    /// The first `len_bytes`, or all if there are fewer.
    fn prefix(self, len_bytes: u64) -> Self {
        Self { len_bytes: self.len_bytes.min(len_bytes), ..self }
    }

    #[inline]
    fn skip(&mut self, bytes: u64) {
        self.len_bytes -= bytes;
        let mut skip_bytes = u64::from(self.skip_bytes) + bytes;
        while let Some((first, rest)) = self.ranges.split_first()
            && skip_bytes >= u64::from(first.len_bytes)
        {
            skip_bytes -= u64::from(first.len_bytes);
            self.ranges = rest;
        }
        #[allow(clippy::cast_possible_truncation)] // less than the first range's length
        let first_skip_bytes = skip_bytes as u32;
        self.skip_bytes = first_skip_bytes;
    }

    /// Length.
    #[inline]
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Whether there is none.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len_bytes == 0
    }

    /// The buffers, in order; none is empty.
    #[inline]
    #[must_use]
    pub fn ranges(&self) -> DataRanges<'c> {
        let (ranges, skip_bytes, left_bytes) = (self.ranges.iter(), self.skip_bytes, self.len_bytes);
        DataRanges { ranges, skip_bytes, left_bytes }
    }

    /// How many [`Data::ranges`] there are.
    #[inline]
    #[must_use]
    pub fn count(&self) -> usize {
        if self.is_empty() { 0 } else { self.ranges.len() }
    }

    /// Copies `bytes` to the start of the data, as many as fit; returns how many did.
    ///
    /// # Errors
    /// [`AccessError`] if a buffer is not in memory; earlier ones are stored then.
    pub fn store(&self, view: &MemoryView, bytes: &[u8]) -> Result<u32, AccessError> {
        let mut stored = 0;
        for part in self.prefix(bytes.len() as u64).ranges() {
            let from = stored as usize;
            view.store(part.addr, &bytes[from..from + part.len_bytes as usize])?;
            stored += part.len_bytes;
        }
        Ok(stored)
    }
}

/// Iterator over the buffers of [`Data`].
#[derive(Clone, Debug)]
pub struct DataRanges<'c> {
    ranges: std::slice::Iter<'c, GuestRange>,
    skip_bytes: u32,
    left_bytes: u64,
}

impl Iterator for DataRanges<'_> {
    type Item = GuestRange;

    #[inline]
    fn next(&mut self) -> Option<GuestRange> {
        if self.left_bytes == 0 {
            return None;
        }
        let range = self.ranges.next()?;
        let skip_bytes = std::mem::take(&mut self.skip_bytes);
        let here_bytes = range.len_bytes - skip_bytes;
        let len_bytes = u32::try_from(self.left_bytes).map_or(here_bytes, |left| left.min(here_bytes));
        self.left_bytes -= u64::from(len_bytes);
        // The skipped bytes were read, hence mapped; saturating keeps the unmappable unmapped all the same.
        Some(GuestRange { addr: range.addr.saturating_add(u64::from(skip_bytes)), len_bytes })
    }
}
