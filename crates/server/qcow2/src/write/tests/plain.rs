//! A file in memory without a model.

use std::cell::{Cell, RefCell};
use std::io;

use crate::read_at::ReadAt;
use crate::write::interface::WriteAt;

/// A file without a model.
#[derive(Debug, Default)]
pub struct Plain {
    pub bytes: RefCell<Vec<u8>>,
    /// No call succeeds.
    pub is_away: Cell<bool>,
}

impl Plain {
    fn check(&self) -> io::Result<()> {
        if self.is_away.get() { Err(io::ErrorKind::NotConnected.into()) } else { Ok(()) }
    }
}

/// A hostile image must not make the file longer than this.
const MAX_BYTES: u64 = 64 << 20;

impl ReadAt for Plain {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        self.check()?;
        self.bytes.borrow().as_slice().read_at(offset, buffer)
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.bytes.borrow().len() as u64)
    }
}

impl WriteAt for Plain {
    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.check()?;
        let bytes = &mut *self.bytes.borrow_mut();
        let end = offset as usize + data.len();
        bytes.resize(bytes.len().max(end), 0);
        bytes[offset as usize..end].copy_from_slice(data);
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        self.check()
    }

    fn set_len(&self, len_bytes: u64) -> io::Result<()> {
        if len_bytes > MAX_BYTES {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.bytes.borrow_mut().resize(len_bytes as usize, 0);
        Ok(())
    }

    fn punch_hole(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        self.write_at(offset, &vec![0; len_bytes as usize])
    }
}
