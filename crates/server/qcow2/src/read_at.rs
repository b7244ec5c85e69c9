//! What this crate needs of a file.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// A file, or anything else with bytes at offsets.
pub trait ReadAt {
    /// Fills `buffer` from `offset`. Fewer bytes than its length mean that the file ends there.
    ///
    /// # Errors
    /// The bytes cannot be read.
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<usize>;

    /// The file's length.
    ///
    /// # Errors
    /// The length cannot be found out.
    fn len_bytes(&self) -> io::Result<u64>;
}

impl<T: ReadAt + ?Sized> ReadAt for &T {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        (**self).read_at(offset, buffer)
    }

    fn len_bytes(&self) -> io::Result<u64> {
        (**self).len_bytes()
    }
}

impl ReadAt for File {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        let mut done = 0;
        while done < buffer.len() {
            let Some(at) = offset.checked_add(done as u64) else { break };
            match FileExt::read_at(self, &mut buffer[done..], at) {
                Ok(0) => break,
                Ok(read) => done += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }

    /// Also of a block device, whose metadata has no length.
    fn len_bytes(&self) -> io::Result<u64> {
        let mut file = self;
        io::Seek::seek(&mut file, io::SeekFrom::End(0))
    }
}

impl ReadAt for [u8] {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        let rest = usize::try_from(offset).ok().and_then(|start| self.get(start..)).unwrap_or_default();
        let count = rest.len().min(buffer.len());
        buffer[..count].copy_from_slice(&rest[..count]);
        Ok(count)
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.len() as u64)
    }
}

impl ReadAt for Vec<u8> {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        self.as_slice().read_at(offset, buffer)
    }

    fn len_bytes(&self) -> io::Result<u64> {
        self.as_slice().len_bytes()
    }
}
