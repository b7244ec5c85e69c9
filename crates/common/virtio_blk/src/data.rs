//! The data part of a request: a chain's buffers without the bytes of header and status.

use guest_mem::{AccessError, GuestRange, MemoryView};

/// A byte range of a chain's buffers; borrows them and copies nothing.
#[derive(Clone, Copy, Debug)]
pub struct Data<'c> {
    /// Only ranges that hold at least one byte of the data.
    ranges: &'c [GuestRange],
    /// Bytes at the start of the first range that do not belong to the data.
    skip_bytes: u32,
    /// Length of the data; bytes of the last range beyond it do not belong to the data.
    len_bytes: u64,
}

impl<'c> Data<'c> {
    /// All of `ranges`, whose lengths add up to `len_bytes`; none is empty.
    #[inline]
    pub(crate) fn new(ranges: &'c [GuestRange], len_bytes: u64) -> Self {
        Self { ranges, skip_bytes: 0, len_bytes }
    }

    /// Splits off the last byte: returns the rest and that byte's address. `None` if the data is empty.
    #[inline]
    pub(crate) fn split_last_byte(mut self) -> Option<(Self, u64)> {
        let (last, before) = self.ranges.split_last()?;
        if last.len_bytes == 1 {
            self.ranges = before;
        }
        self.len_bytes -= 1;
        // Nothing is mapped past the end of the address space, and saturating keeps such an address unmapped.
        Some((self, last.addr.saturating_add(u64::from(last.len_bytes - 1))))
    }

    /// Takes the first two words if they have a buffer of their own, as the header of nearly all requests has.
    /// Otherwise returns `None` and leaves the data unchanged, and the caller can use [`Data::take`].
    #[inline]
    pub(crate) fn take_words(&mut self, view: &MemoryView) -> Option<[u64; 2]> {
        let (first, rest) = self.ranges.split_first()?;
        if self.skip_bytes != 0 || first.len_bytes != 16 {
            return None;
        }
        let words = view.word_pair(first.addr)?;
        self.ranges = rest;
        self.len_bytes -= 16;
        Some(words)
    }

    /// Copies the first bytes into `out` and advances past them. `out` must not be longer than [`Data::len_bytes`].
    pub(crate) fn take(&mut self, view: &MemoryView, out: &mut [u8]) -> Result<(), AccessError> {
        let mut filled = 0;
        for part in self.prefix(out.len() as u64).ranges() {
            let end = filled + part.len_bytes as usize;
            view.read(part.addr, &mut out[filled..end])?;
            filled = end;
        }
        self.skip(out.len() as u64);
        Ok(())
    }

    /// The first `len_bytes`, or all of the data if it is shorter.
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

    /// Length in bytes.
    #[inline]
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Whether the data is empty.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len_bytes == 0
    }

    /// The buffer, if there is exactly one, as in most requests.
    #[inline]
    #[must_use]
    pub fn only_range(&self) -> Option<GuestRange> {
        let [range] = self.ranges else { return None };
        #[allow(clippy::cast_possible_truncation)] // at most the range's length
        let len_bytes = self.len_bytes as u32;
        // Saturating: see `DataRanges::next`.
        Some(GuestRange { addr: range.addr.saturating_add(u64::from(self.skip_bytes)), len_bytes })
    }

    /// The buffers, in order; none is empty.
    #[inline]
    #[must_use]
    pub fn ranges(&self) -> DataRanges<'c> {
        let (ranges, skip_bytes, left_bytes) = (self.ranges.iter(), self.skip_bytes, self.len_bytes);
        DataRanges { ranges, skip_bytes, left_bytes }
    }

    /// Number of buffers in [`Data::ranges`].
    #[inline]
    #[must_use]
    pub fn count(&self) -> usize {
        if self.is_empty() { 0 } else { self.ranges.len() }
    }

    /// Copies `bytes` to the start of the data, as many as fit; returns the number of bytes copied.
    ///
    /// # Errors
    /// [`AccessError`] if a buffer is not in memory; earlier buffers have then been stored.
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
        #[allow(clippy::cast_possible_truncation)] // at most the range's length
        let len_bytes = self.left_bytes.min(u64::from(range.len_bytes - skip_bytes)) as u32;
        self.left_bytes -= u64::from(len_bytes);
        // The skipped bytes were read, so they are mapped. Saturating keeps an unmapped address unmapped in
        // any case.
        Some(GuestRange { addr: range.addr.saturating_add(u64::from(skip_bytes)), len_bytes })
    }
}
