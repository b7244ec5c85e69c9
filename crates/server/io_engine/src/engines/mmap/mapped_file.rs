//! One mapped file: which ranges can be copied, whether a copy is trusted, and the system calls that replace it
//! otherwise.
//!
//! `copy → note_touched → judge → trusts? → result | call_plainly`
//!
//! - `judge` detects that the file has become shorter during the batch. If the batch did not use the mapping's last
//!   page, an access to that page shows this (`FileMapping::touch_last_page`), otherwise one `fstat` does.
//! - On tmpfs, system calls serve the chunks that have holes (`presence.rs`).
//! - The mapping has the file's length at the time of mapping. System calls serve ranges beyond it, and a file that has
//!   grown is mapped again.
//! - A write beyond the end of a truncated file extends it, as with every other engine.
//! - If a file shrinks and grows back while a batch is copied, the batch's data is lost together with the older data. A
//!   write to the rest of the last page can be reported as successful although it is lost only if the file shrank
//!   before the batch began and grew back before the `fstat`.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use guest_mem::{FileMapping, MappingAccess};
use rustix::fs::{FallocateFlags, OFlags, fallocate, fcntl_getfl, fstat};
use rustix::io::Errno;

use super::copy::{self, MAX_COPY_BYTES};
use super::presence::{CHUNK_BYTES, Presence};
use crate::backend::{Buffers, Call, Verb};
use crate::choose::storage::Storage;
use crate::engines::plain;

#[derive(Debug)]
pub(super) struct MappedFile {
    file: Arc<File>,
    /// True if the page cache is the file's storage, false if it is on DAX.
    in_memory: bool,
    access: MappingAccess,
    /// `None`: the file is empty, or could not be mapped again.
    mapping: Option<FileMapping>,
    /// `None`: the kernel does not say which pages the file has, and copies fill holes.
    presence: Option<Arc<Presence>>,
    /// The log already reported that the file cannot be mapped again.
    has_warned: bool,
    is_touched: bool,
    /// A copy of this batch used the mapping's last page.
    used_last_page: bool,
    /// End offset up to which copies of the batch are trusted.
    trusted_end_bytes: u64,
}

impl MappedFile {
    /// # Errors
    /// [`io::ErrorKind::Unsupported`] if a page of the file may have to be read from a disk; errors of the kernel.
    pub fn new(file: &Arc<File>) -> io::Result<Self> {
        let storage = Storage::probe(file)?;
        if !storage.ram_backed && !storage.dax {
            return Err(unsupported());
        }
        let writable = fcntl_getfl(file)?.contains(OFlags::RDWR);
        let access = if writable { MappingAccess::ReadWrite } else { MappingAccess::ReadOnly };
        let file = Arc::clone(file);
        let mut mapped = Self {
            file,
            in_memory: storage.ram_backed,
            access,
            mapping: None,
            has_warned: false,
            presence: None,
            is_touched: false,
            used_last_page: false,
            trusted_end_bytes: 0,
        };
        mapped.map_anew()?;
        Ok(mapped)
    }

    pub fn file(&self) -> &Arc<File> {
        &self.file
    }

    /// Whether a sync has nothing to write back.
    pub fn is_memory(&self) -> bool {
        self.in_memory
    }

    /// # Safety
    /// Like [`IoBackend::queue`](crate::IoBackend::queue).
    #[inline]
    pub unsafe fn prefetch(&self, call: &Call) {
        let Some(mapping) = &self.mapping else { return };
        let in_file = mapping.hint_at(call.offset_bytes);
        // SAFETY: 1. the caller guarantees the array of buffers.
        let buffer = unsafe { copy::first_byte(&call.buffers) };
        match call.verb {
            Verb::Read => copy::prefetch(in_file, buffer),
            Verb::Write => copy::prefetch(buffer, in_file),
            Verb::Sync | Verb::Allocate | Verb::Discard => {}
        }
    }

    /// Copies the call's data if all of it is inside the mapping. Returns the bytes copied.
    ///
    /// # Safety
    /// Like [`IoBackend::queue`](crate::IoBackend::queue).
    #[inline]
    pub unsafe fn copy(&mut self, call: &Call) -> Option<u32> {
        let mapping = self.mapping.as_ref()?;
        let end_bytes = end_of(call);
        if end_bytes > mapping.len_bytes() || !self.has(mapping, call) {
            return None;
        }
        self.used_last_page |= end_bytes > mapping.last_page_bytes();
        let copied_bytes = match call.verb {
            // SAFETY: 1. the caller guarantees that the buffers are valid.
            Verb::Read => unsafe { copy::read(mapping, call.offset_bytes, &call.buffers) },
            // SAFETY: as above.
            Verb::Write if mapping.is_writable() => unsafe {
                copy::write(mapping, call.offset_bytes, &call.buffers)
            },
            Verb::Write | Verb::Sync | Verb::Allocate | Verb::Discard => return None,
        };
        Some(copied_bytes)
    }

    /// Whether a copy of this range allocates nothing.
    #[inline]
    fn has(&self, mapping: &FileMapping, call: &Call) -> bool {
        let Some(presence) = &self.presence else { return true };
        let (start, len_bytes) = (call.offset_bytes, call.len_bytes.min(MAX_COPY_BYTES as u64));
        presence.has(start, len_bytes) || presence.find_out(mapping, start, len_bytes)
    }

    /// Returns whether this is the batch's first copy of this file.
    #[inline]
    pub fn note_touched(&mut self) -> bool {
        !std::mem::replace(&mut self.is_touched, true)
    }

    /// Determines how much of the file's copies in this batch can be trusted. Returns whether all of them can.
    #[inline]
    pub fn judge(&mut self) -> bool {
        self.is_touched = false;
        // The length of the mapping that the copies used. Another mapping may replace it below.
        let copied_from_bytes = self.mapped_bytes();
        let used_last_page = std::mem::take(&mut self.used_last_page);
        let last_page =
            self.mapping.as_ref().filter(|mapping| !used_last_page && self.has_last_page(mapping));
        // The size after the copies. A file that is this long now was not shorter during the copies, unless it shrank
        // and grew again, and then its contents are lost anyway.
        self.trusted_end_bytes = match last_page {
            Some(mapping) => {
                mapping.touch_last_page();
                mapping.len_bytes()
            }
            None => size_of(&self.file).unwrap_or(0),
        };
        if self.mapping.as_ref().is_none_or(FileMapping::is_poisoned) {
            self.trusted_end_bytes = 0;
            self.map_again();
        }
        self.trusted_end_bytes > 0 && self.trusted_end_bytes >= copied_from_bytes
    }

    /// Whether an access to the last page allocates nothing.
    #[inline]
    fn has_last_page(&self, mapping: &FileMapping) -> bool {
        self.presence.as_ref().is_some_and(|presence| presence.has(mapping.last_page_bytes(), 1))
    }

    #[inline]
    pub fn trusts(&self, call: &Call) -> bool {
        end_of(call) <= self.trusted_end_bytes
    }

    /// Makes the system call that replaces a copy.
    ///
    /// # Safety
    /// Like [`IoBackend::queue`](crate::IoBackend::queue).
    #[cold]
    pub unsafe fn call_plainly(&mut self, call: &Call) -> i32 {
        let moves_data = matches!(call.verb, Verb::Read | Verb::Write);
        if moves_data && self.has_grown_to(end_of(call)) {
            self.map_again();
        }
        // SAFETY: 1. the caller guarantees that the buffers are valid.
        let result = unsafe { plain::execute(self.file.as_raw_fd(), &cut(call), 0) };
        if let (Verb::Write, Some(presence)) = (call.verb, &self.presence) {
            presence.written(call.offset_bytes, u64::try_from(result).unwrap_or(0));
        }
        if call.verb == Verb::Write && result == -libc::EINVAL {
            // SAFETY: as above.
            return unsafe { self.write_alone(call) };
        }
        result
    }

    /// Records, for the other workers too, which pages will be missing.
    pub fn note_allocate(&self, call: &Call) {
        if let Some(presence) = &self.presence {
            presence.punched(call.offset_bytes, call.len_bytes);
        }
    }

    /// hugetlbfs has no system calls that write, so this makes one copy and judges it separately.
    ///
    /// # Safety
    /// Like [`IoBackend::queue`](crate::IoBackend::queue).
    pub(super) unsafe fn write_alone(&mut self, call: &Call) -> i32 {
        // SAFETY: 1. the caller guarantees that the buffers are valid.
        let Some(copied_bytes) = (unsafe { self.copy(call) }) else { return -libc::EINVAL };
        // This `judge` says nothing about the batch's other copies, which used the mapping earlier.
        let of_the_batch = self.trusted_end_bytes;
        self.judge();
        let trusted = self.trusts(call);
        self.trusted_end_bytes = self.trusted_end_bytes.min(of_the_batch);
        #[allow(clippy::cast_possible_wrap)] // at most `MAX_COPY_BYTES`
        let copied_bytes = copied_bytes as i32;
        if trusted { copied_bytes } else { -libc::ENOSPC }
    }

    /// Whether a copy would serve this chunk.
    #[cfg(test)]
    pub fn has_chunk(&self, chunk: u64) -> bool {
        self.presence.as_ref().is_some_and(|presence| presence.has(chunk * CHUNK_BYTES, 1))
    }

    /// Length of the mapped part of the file.
    pub fn mapped_bytes(&self) -> u64 {
        self.mapping.as_ref().map_or(0, FileMapping::len_bytes)
    }

    fn has_grown_to(&self, end_bytes: u64) -> bool {
        end_bytes > self.mapped_bytes() && size_of(&self.file).is_ok_and(|size_bytes| end_bytes <= size_bytes)
    }

    /// Maps the file again after a change. Without a mapping, system calls serve all ranges.
    #[cold]
    fn map_again(&mut self) {
        let mapped = self.map_anew();
        match mapped {
            Err(error) if !self.has_warned => {
                self.has_warned = true;
                tracing::warn!(%error, "cannot map a memory-backed file again, so system calls serve it");
            }
            _ => {}
        }
    }

    fn map_anew(&mut self) -> io::Result<()> {
        self.mapping = None;
        if let Some(presence) = self.presence.take() {
            presence.forget();
        }
        let size_bytes = size_of(&self.file)?;
        if size_bytes > 0 {
            let mapping = FileMapping::of_file(&*self.file, size_bytes, self.access)?;
            if mapping.tells_pages() {
                self.presence = Some(self.presence_of(&mapping)?);
            }
            self.mapping = Some(mapping);
        }
        Ok(())
    }

    /// Allocates the last page, so that `judge` needs no system call, and finds out whether it is present.
    fn presence_of(&self, mapping: &FileMapping) -> io::Result<Arc<Presence>> {
        let presence = Presence::of_file(&self.file, mapping.len_bytes())?;
        let last_chunk = mapping.last_page_bytes() / CHUNK_BYTES * CHUNK_BYTES;
        let len_bytes = mapping.len_bytes() - last_chunk;
        // If the file system is full, `judge` makes a system call.
        if fallocate(&*self.file, FallocateFlags::KEEP_SIZE, last_chunk, len_bytes).is_ok() {
            mapping.touch_pages_from(last_chunk); // an allocated page counts as present once it was accessed
        }
        presence.find_out(mapping, last_chunk, len_bytes);
        Ok(presence)
    }
}

fn unsupported() -> io::Error {
    let why = "mmap is for files in memory (tmpfs, memfd) and DAX: on other files a page fault stops the worker; \
               use io_uring or threads";
    io::Error::new(io::ErrorKind::Unsupported, why)
}

#[inline]
fn size_of(file: &File) -> Result<u64, Errno> {
    Ok(u64::try_from(fstat(file)?.st_size).unwrap_or(0))
}

/// End offset of the largest range that one call can move.
#[inline]
fn end_of(call: &Call) -> u64 {
    call.offset_bytes.saturating_add(call.len_bytes.min(MAX_COPY_BYTES as u64))
}

/// Limits a system call to the length of a copy.
fn cut(call: &Call) -> Call {
    let Buffers::One { base, len_bytes } = call.buffers else { return *call };
    #[allow(clippy::cast_possible_truncation)] // a constant
    let len_bytes = len_bytes.min(MAX_COPY_BYTES as u32);
    Call { buffers: Buffers::One { base, len_bytes }, ..*call }
}
