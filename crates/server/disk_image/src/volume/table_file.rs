//! A file of a disk for calls that wait: while it is opened, and for the metadata thread. Direct I/O gets aligned memory.
//!
//! Guests' data take another way (`io_engine`).

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use qcow2::{ReadAt, WriteAt};
use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use crate::geometry::Alignment;

/// The longest call with direct I/O.
const CALL_BYTES: usize = 64 << 10;

/// An open file.
#[derive(Clone, Debug)]
pub(crate) struct TableFile {
    file: Arc<File>,
    alignment: Alignment,
}

/// Memory for one call of direct I/O.
struct Aligned {
    memory: Vec<u8>,
    start: usize,
}

impl Aligned {
    fn new(unit: usize) -> Self {
        let memory = vec![0_u8; CALL_BYTES + unit];
        let start = memory.as_ptr().align_offset(unit);
        Self { memory, start }
    }

    fn bytes(&mut self) -> io::Result<&mut [u8]> {
        let bytes = self.memory.get_mut(self.start..self.start + CALL_BYTES);
        bytes.ok_or_else(|| io::ErrorKind::OutOfMemory.into())
    }
}

impl TableFile {
    pub fn new(file: Arc<File>, alignment: Alignment) -> Self {
        Self { file, alignment }
    }

    fn unit(&self) -> usize {
        self.alignment.offset_bytes.max(self.alignment.memory_bytes) as usize
    }

    /// Whether a call needs no other memory.
    fn is_aligned(&self, memory: &[u8], offset: u64) -> bool {
        let (unit, memory_unit) =
            (u64::from(self.alignment.offset_bytes), self.alignment.memory_bytes as usize);
        offset.is_multiple_of(unit)
            && (memory.len() as u64).is_multiple_of(unit)
            && memory.as_ptr().addr().is_multiple_of(memory_unit)
    }

    /// Reads into memory that needs no copies.
    fn read_direct(&self, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        let (unit, mut done) = (self.unit(), 0);
        while done < buffer.len() {
            match FileExt::read_at(&*self.file, &mut buffer[done..], offset + done as u64) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
                Ok(0) => break,
                Ok(read) => done += read,
            }
            // The file ends inside of a block.
            if !done.is_multiple_of(unit) {
                break;
            }
        }
        Ok(done)
    }

    /// Reads whole blocks.
    fn read_blocks(&self, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        let unit = self.unit();
        let mut memory = Aligned::new(unit);
        let blocks = memory.bytes()?;
        let mut done = 0;
        while done < buffer.len() {
            let at = offset + done as u64;
            let skip = usize::try_from(at % unit as u64).unwrap_or_default();
            let read = match FileExt::read_at(&*self.file, blocks, at - skip as u64) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                read => read?,
            };
            let found = blocks.get(skip..read).unwrap_or_default();
            if found.is_empty() {
                break;
            }
            let count = found.len().min(buffer.len() - done);
            buffer[done..done + count].copy_from_slice(&found[..count]);
            done += count;
        }
        Ok(done)
    }
}

impl ReadAt for TableFile {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        if self.is_aligned(buffer, offset) {
            self.read_direct(offset, buffer)
        } else {
            self.read_blocks(offset, buffer)
        }
    }

    fn len_bytes(&self) -> io::Result<u64> {
        ReadAt::len_bytes(&*self.file)
    }
}

/// The writer's offsets and lengths are multiples of every alignment, so only the memory must be aligned.
impl WriteAt for TableFile {
    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        if self.is_aligned(data, offset) {
            return self.file.write_all_at(data, offset);
        }
        let mut memory = Aligned::new(self.unit());
        let blocks = memory.bytes()?;
        let mut at = offset;
        for part in data.chunks(CALL_BYTES) {
            blocks[..part.len()].copy_from_slice(part);
            self.file.write_all_at(&blocks[..part.len()], at)?;
            at += part.len() as u64;
        }
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn set_len(&self, len_bytes: u64) -> io::Result<()> {
        self.file.set_len(len_bytes)
    }

    fn punch_hole(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        loop {
            match rustix::fs::fallocate(&*self.file, hole, offset, len_bytes) {
                Err(Errno::INTR) => {}
                Err(Errno::OPNOTSUPP | Errno::NOSYS) => break,
                done => return Ok(done?),
            }
        }
        // The file system cannot free space.
        let zeroes = vec![0; CALL_BYTES];
        let mut done = 0;
        while done < len_bytes {
            let count = usize::try_from(len_bytes - done).unwrap_or(usize::MAX).min(CALL_BYTES);
            self.write_at(offset + done, &zeroes[..count])?;
            done += count as u64;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    fn check(file: File, alignment: Alignment) {
        let file = TableFile::new(Arc::new(file), alignment);
        let data: Vec<u8> = (0..200_u32 << 10).map(|at| (at / 512).to_le_bytes()[0]).collect();
        file.set_len(1 << 20).unwrap();
        file.write_at(8192, &data).unwrap();
        let mut read = vec![1; data.len() + 4096];
        assert_eq!(file.read_at(4096, &mut read).unwrap(), read.len());
        assert!(read[..4096].iter().all(|byte| *byte == 0) && read[4096..] == data);
        file.punch_hole(12_288, 4096).unwrap();
        let mut read = [1; 100];
        file.read_at(12_300, &mut read).unwrap();
        assert_eq!(read, [0; 100]);
        assert_eq!(file.read_at((1 << 20) - 50, &mut read).unwrap(), 50);
        assert_eq!(file.len_bytes().unwrap(), 1 << 20);
        check_aligned_memory(&file);
    }

    /// What needs no copies for direct I/O, also at the end of a file that ends inside of a block.
    fn check_aligned_memory(file: &TableFile) {
        let mut memory = vec![7; 5 * 4096];
        let start = memory.as_ptr().align_offset(4096);
        let aligned = &mut memory[start..start + 4 * 4096];
        file.write_at(4 * 4096, aligned).unwrap();
        file.file.set_len(7 * 4096 + 100).unwrap();
        aligned.fill(1);
        assert_eq!(file.read_at(4 * 4096, aligned).unwrap(), 3 * 4096 + 100);
        assert!(aligned[..3 * 4096 + 100].iter().all(|byte| *byte == 7));
        assert_eq!(file.read_at(8 * 4096, aligned).unwrap(), 0);
    }

    #[test]
    fn file_in_the_page_cache_keeps_what_is_written() {
        check(tempfile::tempfile().unwrap(), Alignment::BUFFERED);
    }

    #[test]
    fn calls_through_aligned_memory_do_the_same() {
        let file = tempfile::tempfile().unwrap();
        assert!(file.metadata().unwrap().is_file() && file.metadata().unwrap().nlink() == 0);
        check(file, Alignment { memory_bytes: 512, offset_bytes: 4096 });
    }
}
