//! The file under repair. Before the first change it is synced, and unknown autoclear bits are cleared.
//!
//! The check may have read what a program wrote that was killed before its sync. A change that is durable before such a
//! write would belong to an image that a power loss undoes.

use std::cell::Cell;
use std::io;

use crate::read_at::ReadAt;
use crate::repair::error::RepairError;
use crate::repair::header::clear_unknown_autoclear;
use crate::repair::sectors::{Target, sync};
use crate::write::WriteAt;

/// The file under repair.
pub(super) struct Prepared<'a, F> {
    file: &'a F,
    is_ready: Cell<bool>,
}

impl<'a, F: WriteAt> Prepared<'a, F> {
    pub(super) fn new(file: &'a F) -> Self {
        Self { file, is_ready: Cell::new(false) }
    }
}

impl<F: WriteAt> Target for Prepared<'_, F> {
    fn prepare(&self) -> Result<(), RepairError> {
        if self.is_ready.replace(true) {
            return Ok(());
        }
        sync(self)?;
        clear_unknown_autoclear(self)
    }
}

impl<F: WriteAt> ReadAt for Prepared<'_, F> {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        self.file.read_at(offset, buffer)
    }

    fn len_bytes(&self) -> io::Result<u64> {
        self.file.len_bytes()
    }
}

impl<F: WriteAt> WriteAt for Prepared<'_, F> {
    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.file.write_at(offset, data)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn set_len(&self, len_bytes: u64) -> io::Result<()> {
        self.file.set_len(len_bytes)
    }

    fn punch_hole(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        self.file.punch_hole(offset, len_bytes)
    }
}
