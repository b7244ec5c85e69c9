//! A whole file mapped for copies in and out. The `mmap` engine uses it for images in memory.
//!
//! `file → FileMapping → copy_to / copy_from → guest memory`
//!
//! - Another process may truncate the file at any time. A copy then completes on zero pages of this process
//!   (`sigbus.rs`), and the mapping is poisoned: no part of it refers to the file any more. The caller checks
//!   [`FileMapping::is_poisoned`] after a copy, and maps the file again.
//! - The same happens when a page is not available: a full tmpfs, no free huge page, faulty memory.
//! - The mapping hands out no `&[u8]`, because other users of the file may write it at the same time. It only copies
//!   bytes.

use std::io;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::atomic::{Ordering, compiler_fence, fence};

use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::backing::{TMPFS, fs_type_and_page_bytes};
use crate::sigbus;

/// The copies that a mapping permits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MappingAccess {
    /// Copies out of the file.
    ReadOnly,
    /// Copies both ways; the file must be open for both.
    ReadWrite,
}

/// A mapping of a file from its start, shared with every other user of the file.
#[derive(Debug)]
pub struct FileMapping {
    base: NonNull<u8>,
    len_bytes: usize,
    /// `len_bytes` rounded up to whole pages of the file.
    mapped_bytes: usize,
    /// Page size of the file's mappings.
    page_bytes: usize,
    access: MappingAccess,
    /// Whether the kernel reports which pages the file has.
    tells_pages: bool,
    guard: sigbus::Guard,
}

/// Limit of pages per call of `mincore`.
const PAGES_AT_ONCE: usize = 32;

// SAFETY: 1. `base` points to memory that only this value unmaps, in `drop`, on any thread; 2. bytes are
// copied through it, never referred to.
unsafe impl Send for FileMapping {}

impl FileMapping {
    /// Maps the first `len_bytes` of `file`, which must have that many.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] if the length is 0 or exceeds the address space; otherwise the kernel's error.
    pub fn of_file(file: impl AsFd, len_bytes: u64, access: MappingAccess) -> io::Result<Self> {
        let (_, page_bytes) = fs_type_and_page_bytes(&file)?;
        let in_pages =
            len_bytes.checked_next_multiple_of(page_bytes).and_then(|bytes| usize::try_from(bytes).ok());
        let in_pages = in_pages.filter(|&bytes| bytes > 0 && isize::try_from(bytes).is_ok());
        let mapped_bytes = in_pages.ok_or(io::ErrorKind::InvalidInput)?;
        let base = map(&file, mapped_bytes, access)?;
        let guard = sigbus::Guard::register(base.as_ptr().addr(), mapped_bytes);
        #[allow(clippy::cast_possible_truncation)] // not more than `mapped_bytes`
        let (len_bytes, page_bytes) = (len_bytes as usize, page_bytes as usize);
        let tells_pages = access == MappingAccess::ReadWrite && tells_pages(&file);
        Ok(Self { base, len_bytes, mapped_bytes, page_bytes, access, tells_pages, guard })
    }

    /// The requested length; the file may have become shorter or longer since.
    #[inline]
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes as u64
    }

    /// Whether [`FileMapping::copy_from`] may be called.
    #[inline]
    #[must_use]
    pub fn is_writable(&self) -> bool {
        self.access == MappingAccess::ReadWrite
    }

    /// Whether an access found no page behind the mapping. The mapping then consists of zero pages of this process, and
    /// bytes copied earlier cannot be told from bytes copied later.
    #[inline]
    #[must_use]
    pub fn is_poisoned(&self) -> bool {
        // The handler runs on the copying thread, in the middle of a copy: this check must not move before
        // the copy.
        compiler_fence(Ordering::SeqCst);
        self.guard.is_poisoned()
    }

    /// Whether [`FileMapping::has_pages`] knows which pages the file has.
    #[must_use]
    pub fn tells_pages(&self) -> bool {
        self.tells_pages
    }

    /// Whether the file has all its pages in this range, which starts at a multiple of the page size. A page that was
    /// swapped out counts as missing. Pages beyond the end do not count.
    #[must_use]
    pub fn has_pages(&self, offset_bytes: u64, len_bytes: u64) -> bool {
        if !self.tells_pages {
            return false; // besides, its pages may differ in size from those that mincore(2) counts
        }
        let end_bytes = offset_bytes.saturating_add(len_bytes).min(self.mapped_bytes as u64);
        let mut at = offset_bytes;
        while at < end_bytes {
            let mut present = [0_u8; PAGES_AT_ONCE];
            #[allow(clippy::cast_possible_truncation)] // both inside the mapping
            let (start, here_bytes) =
                (at as usize, (end_bytes - at).min((PAGES_AT_ONCE * self.page_bytes) as u64) as usize);
            let first = self.base.as_ptr().wrapping_add(start);
            // SAFETY: 1. the range is inside the mapping, and the kernel only reads page tables; 2. the array has a byte
            // for each of its pages.
            let asked = unsafe { libc::mincore(first.cast(), here_bytes, present.as_mut_ptr()) };
            let pages = here_bytes.div_ceil(self.page_bytes);
            if asked != 0 || present[..pages].iter().any(|page| page & 1 == 0) {
                return false;
            }
            at += here_bytes as u64;
        }
        true
    }

    /// Offset of the last page.
    #[must_use]
    pub fn last_page_bytes(&self) -> u64 {
        (self.mapped_bytes - self.page_bytes) as u64
    }

    /// Accesses the last page. If the file no longer has that page, the mapping is poisoned.
    ///
    /// The kernel removes the pages beyond a new end from all mappings before it clears the rest of the page that
    /// contains the end. So bytes that were copied before this access, except from the last page, were copied before
    /// anything was cleared.
    #[inline]
    pub fn touch_last_page(&self) {
        // The copies' loads come before this access. Their stores have ended too when the kernel removes a page,
        // because it waits until no processor uses the old translation.
        fence(Ordering::Acquire);
        self.touch(self.mapped_bytes - self.page_bytes);
    }

    /// Accesses each page from `offset_bytes` to the end of the mapping.
    pub fn touch_pages_from(&self, offset_bytes: u64) {
        let first = usize::try_from(offset_bytes).unwrap_or(usize::MAX);
        (first..self.mapped_bytes).step_by(self.page_bytes).for_each(|at| self.touch(at));
    }

    #[inline]
    fn touch(&self, at: usize) {
        debug_assert!(at < self.mapped_bytes, "the caller stays inside the mapping");
        // SAFETY: 1. the byte is inside the mapping.
        let byte = unsafe { self.base.as_ptr().add(at) };
        // SAFETY: 1. the byte is inside the mapping, and the handler replaces a missing page; 2. volatile: must happen
        // although the value is not used.
        unsafe { byte.read_volatile() };
    }

    /// The address of a byte, to prefetch it. For bytes outside the mapping, the address is meaningless.
    #[inline]
    #[must_use]
    pub fn hint_at(&self, offset_bytes: u64) -> *const u8 {
        #[allow(clippy::cast_possible_truncation)] // a hint
        self.base.as_ptr().wrapping_add(offset_bytes as usize)
    }

    /// Copies `len_bytes` of the file from `offset_bytes` on to `to`.
    ///
    /// # Safety
    /// `to` must be mapped and writable for `len_bytes`, or registered with the SIGBUS handler as guest
    /// memory is, and no reference in this program may point to those bytes.
    ///
    /// # Panics
    /// If the range is not entirely inside [`FileMapping::len_bytes`].
    #[inline]
    pub unsafe fn copy_to(&self, offset_bytes: u64, to: *mut u8, len_bytes: usize) {
        let from = self.at(offset_bytes, len_bytes);
        // SAFETY: 1. `from`: `at` checked the range, and the handler replaces a missing page; 2. `to`: the caller
        // guarantees it; 3. the two do not overlap: they are separate mappings; 4. other processes and guests may write
        // both at the same time. No reference to either exists in this program, so the compiler assumes nothing about
        // them; the bytes may be torn, and any bytes are valid.
        unsafe { std::ptr::copy_nonoverlapping(from, to, len_bytes) };
    }

    /// Copies `len_bytes` from `from` into the file from `offset_bytes` on.
    ///
    /// # Safety
    /// `from` must be mapped and readable for `len_bytes`, or registered with the SIGBUS handler as guest
    /// memory is, and no code in this program may write to those bytes at the same time.
    ///
    /// # Panics
    /// If the range is not entirely inside [`FileMapping::len_bytes`], or the mapping is read-only.
    #[inline]
    pub unsafe fn copy_from(&self, offset_bytes: u64, from: *const u8, len_bytes: usize) {
        assert!(self.is_writable(), "the mapping is read-only");
        let to = self.at(offset_bytes, len_bytes);
        // SAFETY: as in `copy_to`, in the other direction.
        unsafe { std::ptr::copy_nonoverlapping(from, to, len_bytes) };
    }

    #[inline]
    fn at(&self, offset_bytes: u64, len_bytes: usize) -> *mut u8 {
        let inside =
            (self.len_bytes as u64).checked_sub(offset_bytes).is_some_and(|room| len_bytes as u64 <= room);
        assert!(inside, "copy outside the mapping");
        #[allow(clippy::cast_possible_truncation)] // not more than `len_bytes`
        let offset = offset_bytes as usize;
        // SAFETY: 1. checked above: not beyond the end of the mapping.
        unsafe { self.base.as_ptr().add(offset) }
    }
}

/// Whether the kernel reports which pages of this file exist.
///
/// On tmpfs, mincore(2) reports this to the file's owner and to processes that the file's mode allows to write it,
/// however they have opened it. To all others, it reports that every page exists. On other file systems, it reports
/// what is mapped.
pub fn tells_pages(file: impl AsFd) -> bool {
    // Offset of a page beyond the end of any file.
    const BEHIND_ANY_END: u64 = 1 << 62;
    let Ok((TMPFS, page_bytes)) = fs_type_and_page_bytes(&file) else { return false };
    let page_bytes = usize::try_from(page_bytes).unwrap_or(usize::MAX);
    // SAFETY: 1. the kernel chooses the address, so no existing mapping is replaced.
    let mapped = unsafe {
        rustix::mm::mmap(
            std::ptr::null_mut(),
            page_bytes,
            ProtFlags::READ,
            MapFlags::SHARED | MapFlags::NORESERVE,
            &file,
            BEHIND_ANY_END,
        )
    };
    let Ok(page) = mapped else { return false };
    let mut present = 1_u8;
    // SAFETY: 1. one page, mapped above, and one byte for it; the page is not accessed.
    let asked = unsafe { libc::mincore(page, page_bytes, &raw mut present) };
    // SAFETY: 1. mapped above, and used by nothing else.
    let unmapped = unsafe { rustix::mm::munmap(page, page_bytes) };
    debug_assert!(unmapped.is_ok());
    asked == 0 && present & 1 == 0
}

fn map(file: impl AsFd, mapped_bytes: usize, access: MappingAccess) -> io::Result<NonNull<u8>> {
    let protection = match access {
        MappingAccess::ReadOnly => ProtFlags::READ,
        MappingAccess::ReadWrite => ProtFlags::READ | ProtFlags::WRITE,
    };
    let flags = MapFlags::SHARED | MapFlags::NORESERVE;
    // SAFETY: 1. the kernel chooses the address, so no existing mapping is replaced.
    let address =
        unsafe { rustix::mm::mmap(std::ptr::null_mut(), mapped_bytes, protection, flags, file, 0) }?;
    // The guest's disk must not appear in core dumps; if the kernel refuses, continue anyway.
    // SAFETY: 1. the range was mapped above; the advice changes no content.
    let _ = unsafe { rustix::mm::madvise(address, mapped_bytes, Advice::LinuxDontDump) };
    NonNull::new(address.cast()).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

impl Drop for FileMapping {
    fn drop(&mut self) {
        self.guard.unregister();
        // SAFETY: 1. mapped by `of_file` with this length; 2. copies borrow this value, so none is running.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.mapped_bytes) };
        debug_assert!(unmapped.is_ok());
    }
}
