//! The image's file in blocks of 4 KiB: blocks of tables are kept for reading, and every change is written at once.
//!
//! - A block whose write failed is forgotten: the next use reads what the file has.
//! - Memory: [`MAX_KEPT`] blocks, 2 MiB.

use std::collections::HashMap;
use std::io;
use std::ops::Range;

use crate::error::FormatError;
use crate::read_at::ReadAt;
use crate::write::error::WriteError;
use crate::write::interface::WriteAt;

/// The unit of the writer's reads and writes.
pub(super) const BLOCK_BYTES: usize = 4096;
const MAX_KEPT: usize = 512;
/// Long tables are read in pieces.
const PIECE_BYTES: usize = 16 * BLOCK_BYTES;

/// An offset's block.
pub(super) const fn block_of(offset: u64) -> u64 {
    offset - offset % BLOCK_BYTES as u64
}

/// A length in memory.
pub(super) fn in_memory(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

#[derive(Debug)]
pub(super) struct Blocks<F> {
    file: F,
    kept: HashMap<u64, Box<[u8]>>,
    file_bytes: u64,
}

impl<F: WriteAt> Blocks<F> {
    pub(super) fn new(file: F) -> Result<Self, WriteError> {
        let failed = |source| FormatError::Read { what: "length", offset: 0, source };
        let file_bytes = file.len_bytes().map_err(failed)?;
        Ok(Self { file, kept: HashMap::new(), file_bytes })
    }

    pub(super) const fn file(&self) -> &F {
        &self.file
    }

    pub(super) const fn file_bytes(&self) -> u64 {
        self.file_bytes
    }

    /// The block at `offset`, which begins one. What the file does not have of it is zeroes.
    pub(super) fn block(&mut self, what: &'static str, offset: u64) -> Result<&[u8], WriteError> {
        if !self.kept.contains_key(&offset) {
            let mut block = vec![0; BLOCK_BYTES].into_boxed_slice();
            self.read(what, offset, &mut block)?;
            self.keep(offset, block);
        }
        Ok(self.kept.get(&offset).map_or(&[], |block| block))
    }

    fn keep(&mut self, offset: u64, block: Box<[u8]>) {
        if self.kept.len() >= MAX_KEPT {
            self.kept.clear();
        }
        self.kept.insert(offset, block);
    }

    /// Reads whole blocks, past those that are kept.
    pub(super) fn read(&self, what: &'static str, offset: u64, buffer: &mut [u8]) -> Result<(), WriteError> {
        let failed = |source| FormatError::Read { what, offset, source };
        let read = self.file.read_at(offset, buffer).map_err(failed)?;
        buffer[read..].fill(0);
        Ok(())
    }

    /// Calls `visit` with index and value of each word of a table, which begins a block.
    pub(super) fn words(
        &self,
        what: &'static str,
        offset: u64,
        count: u64,
        mut visit: impl FnMut(u64, u64) -> Result<(), WriteError>,
    ) -> Result<(), WriteError> {
        let mut piece = vec![0; PIECE_BYTES];
        for first in (0..count).step_by(PIECE_BYTES / 8) {
            self.read(what, offset + first * 8, &mut piece)?;
            for (index, word) in (first..count).zip(piece.as_chunks::<8>().0) {
                visit(index, u64::from_be_bytes(*word))?;
            }
        }
        Ok(())
    }

    /// Changes a part of the block at `offset`.
    pub(super) fn update(
        &mut self,
        what: &'static str,
        offset: u64,
        change: impl FnOnce(&mut [u8]),
    ) -> Result<(), WriteError> {
        let mut block: Box<[u8]> = self.block(what, offset)?.into();
        change(&mut block);
        self.write(what, offset, &block)?;
        self.keep(offset, block);
        Ok(())
    }

    /// Changes parts of several blocks that follow each other, with one write. `change` gets all of them.
    pub(super) fn update_all(
        &mut self,
        what: &'static str,
        range: Range<u64>,
        change: impl FnOnce(&mut [u8]),
    ) -> Result<(), WriteError> {
        let mut bytes = Vec::with_capacity(in_memory(range.end - range.start));
        for offset in range.clone().step_by(BLOCK_BYTES) {
            bytes.extend_from_slice(self.block(what, offset)?);
        }
        change(&mut bytes);
        self.write(what, range.start, &bytes)?;
        for (offset, block) in range.step_by(BLOCK_BYTES).zip(bytes.chunks(BLOCK_BYTES)) {
            self.keep(offset, block.into());
        }
        Ok(())
    }

    /// Writes whole blocks.
    pub(super) fn write(&mut self, what: &'static str, offset: u64, data: &[u8]) -> Result<(), WriteError> {
        let end = offset + data.len() as u64;
        self.forget(offset..end);
        self.file.write_at(offset, data).map_err(failed("write", what, offset))?;
        self.file_bytes = self.file_bytes.max(end);
        Ok(())
    }

    pub(super) fn sync(&mut self) -> Result<(), WriteError> {
        self.file.sync_data().map_err(WriteError::Sync)
    }

    pub(super) fn set_len(&mut self, len_bytes: u64) -> Result<(), WriteError> {
        self.forget(len_bytes.min(self.file_bytes)..u64::MAX);
        self.file.set_len(len_bytes).map_err(failed("set", "file's length", len_bytes))?;
        self.file_bytes = len_bytes;
        Ok(())
    }

    pub(super) fn punch(&mut self, range: Range<u64>) -> Result<(), WriteError> {
        self.forget(range.clone());
        let len_bytes = range.end - range.start;
        self.file.punch_hole(range.start, len_bytes).map_err(failed("punch", "free clusters", range.start))
    }

    fn forget(&mut self, range: Range<u64>) {
        let blocks = (range.end - range.start) / BLOCK_BYTES as u64;
        if blocks > self.kept.len() as u64 {
            return self.kept.retain(|offset, _| !range.contains(offset));
        }
        range.step_by(BLOCK_BYTES).for_each(|offset| _ = self.kept.remove(&offset));
    }
}

fn failed(action: &'static str, what: &'static str, offset: u64) -> impl FnOnce(io::Error) -> WriteError {
    move |source| WriteError::Io { action, what, offset, source }
}

/// Reads of any offset and length, made of whole blocks.
#[derive(Debug)]
pub(super) struct AnyOffset<'a, F>(pub(super) &'a F);

impl<F: ReadAt> ReadAt for AnyOffset<'_, F> {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        let start = block_of(offset);
        let before = in_memory(offset - start);
        let mut blocks = vec![0; (before + buffer.len()).next_multiple_of(BLOCK_BYTES)];
        let read = self.0.read_at(start, &mut blocks)?;
        let count = read.saturating_sub(before).min(buffer.len());
        buffer[..count].copy_from_slice(&blocks[before..before + count]);
        Ok(count)
    }

    fn len_bytes(&self) -> io::Result<u64> {
        self.0.len_bytes()
    }
}
