//! Reads a fuzzer's input as numbers, and builds seeds.
//!
//! Past the end all bytes are zero, so every input is valid.

/// The unread part of an input.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    /// All of `bytes`.
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// Whether nothing is left.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The next byte, without consuming it.
    #[must_use]
    pub fn peek(&self) -> Option<&u8> {
        self.0.first()
    }

    /// The next byte.
    pub fn u8(&mut self) -> u8 {
        let [byte] = self.array();
        byte
    }

    /// The next two bytes.
    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    /// The next four bytes.
    pub fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    /// The next eight bytes.
    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    /// The next byte, as an index below `count`.
    pub fn below(&mut self, count: usize) -> usize {
        usize::from(self.u8()) % count.max(1)
    }

    /// Up to `len` bytes, fewer at the end.
    pub fn take(&mut self, len: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        taken
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        let taken = self.take(N);
        bytes[..taken.len()].copy_from_slice(taken);
        bytes
    }
}

/// Builds a seed, which [`Input`] reads.
#[derive(Clone, Debug, Default)]
pub struct Seed(Vec<u8>);

impl Seed {
    /// Starts with these bytes.
    #[must_use]
    pub fn new(bytes: &[u8]) -> Self {
        Self(bytes.to_vec())
    }

    /// Appends these bytes.
    #[must_use]
    pub fn and(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }

    /// The finished seed.
    #[must_use]
    pub fn bytes(self) -> Vec<u8> {
        self.0
    }
}
