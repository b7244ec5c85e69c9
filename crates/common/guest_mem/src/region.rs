//! One region of guest memory: part of a file that a front-end passed, mapped into this process.
//!
//! - Sizes are checked before mapping: no address or offset may wrap, and no region may be larger than its file.
//! - A region that a front-end passed is charged to its disk (`quota.rs`) while it is mapped, and its file
//!   must be memory (`backing.rs`).
//! - The fd and its offset are kept: after a live upgrade, the new server maps the same memory again.
//! - Huge pages: `mmap` requires offset and length in multiples of the file's page size, so the mapping may be larger
//!   than the region; only the region is reachable.
//! - Under Miri a region is on the heap, so that the code above it can be interpreted.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU8;

use rustix::fs::{FileType, fstat};
#[cfg(not(miri))]
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags};
use vm_memory::{Address, GuestAddress};

use crate::backing::{Backing, is_at_hand, name_of_other};
use crate::quota::{Charge, PassedFd, QuotaError, Resource};
use crate::sigbus;

/// The addresses of a region, as announced by a front-end (vhost-user "memory region description").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionSpec {
    /// First guest-physical address.
    pub guest_addr: GuestAddress,
    /// Length in bytes; not necessarily a multiple of a page.
    pub size_bytes: u64,
    /// Address of the first byte in the front-end's address space (rings are announced with such addresses).
    pub user_addr: u64,
    /// Offset of the region in the passed file.
    pub file_offset_bytes: u64,
}

/// Why a region cannot be mapped.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// The region has no bytes.
    #[error("memory region at guest address {guest_addr:#x} is empty")]
    Empty {
        /** Guest address of the region. */
        guest_addr: u64,
    },
    /// Guest address, user address or file offset wraps around.
    #[error("memory region's {what} {start:#x} plus its size {size_bytes:#x} exceeds 64 bits")]
    Overflow {
        /** Guest address, user address or file offset. */
        what: &'static str,
        /** Start of the range. */
        start: u64,
        /** Size of the region. */
        size_bytes: u64,
    },
    /// The passed file does not contain the whole region.
    #[error(
        "memory region at guest address {guest_addr:#x} ends at byte {end_bytes} of its file, which has only {file_bytes} bytes"
    )]
    BeyondFile {
        /** Guest address of the region. */
        guest_addr: u64,
        /** Offset plus size. */
        end_bytes: u64,
        /** Size of the file, from `fstat`. */
        file_bytes: u64,
    },
    /// An access to a page of the file may have to wait.
    #[error(
        "memory region at guest address {guest_addr:#x} is {file}, and an access to its pages may block: share a memfd, or a file \
         on tmpfs or hugetlbfs (QEMU: memory-backend-memfd; libvirt: <source type='memfd'/>)"
    )]
    NotMemory {
        /** Guest address of the region. */
        guest_addr: u64,
        /** The kind of file. */
        file: String,
    },
    /// The disk has used up its share of the process's address space or mappings.
    #[error(
        "memory region at guest address {guest_addr:#x} with {size_bytes} bytes exceeds the disk's share \
         of this process's resources"
    )]
    Quota {
        /** Guest address of the region. */
        guest_addr: u64,
        /** Size of the region. */
        size_bytes: u64,
        /** The exhausted limit. */
        #[source]
        source: QuotaError,
    },
    /// `fstat` or `mmap` failed.
    #[error("cannot map the memory region of {size_bytes} bytes at guest address {guest_addr:#x}")]
    Io {
        /** Guest address of the region. */
        guest_addr: u64,
        /** Size of the region. */
        size_bytes: u64,
        /** The kernel's error. */
        #[source]
        source: io::Error,
    },
}

/// One mapped region; unmapped when its last user drops it.
pub struct Region {
    spec: RegionSpec,
    fd: Arc<OwnedFd>,
    /// Device and inode of the file, to recognise the same region when it is announced again.
    file_id: (u64, u64),
    /// The region's first byte, inside `mapping`.
    base: NonNull<u8>,
    mapping: NonNull<u8>,
    mapping_bytes: usize,
    guard: sigbus::Guard,
    /// The charges are released after unmapping and closing. Our own regions are not charged.
    _charges: Option<[Charge; 2]>,
    /// The passed descriptor, which is charged until it is closed.
    _passed: Option<PassedFd>,
}

// SAFETY: 1. `base` and `mapping` point to memory that only this value unmaps, in `drop`; 2. all accesses through them
// are atomic or volatile, from any thread.
unsafe impl Send for Region {}
// SAFETY: as for `Send`; a method hands out the mapped bytes only as atomics.
unsafe impl Sync for Region {}

impl Region {
    /// Maps `spec` from one of our own files, shared and writable.
    ///
    /// # Errors
    /// [`MapError`]; nothing stays mapped.
    pub fn map(spec: RegionSpec, fd: Arc<OwnedFd>) -> Result<Self, MapError> {
        Self::map_charged(spec, fd, None)
    }

    /// Maps `spec` from a file that a front-end passed. The file must be memory and is charged to the
    /// front-end's disk.
    ///
    /// # Errors
    /// [`MapError`]; nothing stays mapped or charged.
    pub fn map_passed(spec: RegionSpec, fd: PassedFd) -> Result<Self, MapError> {
        if !is_at_hand(&fd) {
            return Err(MapError::NotMemory {
                guest_addr: spec.guest_addr.raw_value(),
                file: name_of_other(&fd),
            });
        }
        Self::map_charged(spec, Arc::clone(fd.shared()), Some(fd))
    }

    fn map_charged(spec: RegionSpec, fd: Arc<OwnedFd>, passed: Option<PassedFd>) -> Result<Self, MapError> {
        let end_bytes = check_sizes(&spec)?;
        let failed = |source: io::Error| MapError::Io {
            guest_addr: spec.guest_addr.raw_value(),
            size_bytes: spec.size_bytes,
            source,
        };
        let stat = fstat(&fd).map_err(|e| failed(e.into()))?;
        let file_type = FileType::from_raw_mode(stat.st_mode);
        let backing = Backing::of(&fd, file_type).map_err(failed)?;
        if passed.is_some() && !backing.is_memory() {
            let (guest_addr, file) = (spec.guest_addr.raw_value(), backing.name());
            return Err(MapError::NotMemory { guest_addr, file });
        }
        let file_bytes = u64::try_from(stat.st_size).unwrap_or(0);
        // Only regular files and memfds have a meaningful size; devices do not.
        if file_type == FileType::RegularFile && end_bytes > file_bytes {
            let guest_addr = spec.guest_addr.raw_value();
            return Err(MapError::BeyondFile { guest_addr, end_bytes, file_bytes });
        }
        let page_bytes = backing.page_bytes();
        let lead_bytes = spec.file_offset_bytes % page_bytes;
        let too_large = || failed(io::ErrorKind::OutOfMemory.into());
        let mapping_bytes = spec
            .size_bytes
            .checked_add(lead_bytes)
            .and_then(|bytes| bytes.checked_next_multiple_of(page_bytes))
            .and_then(|bytes| usize::try_from(bytes).ok())
            .filter(|&bytes| isize::try_from(bytes).is_ok())
            .ok_or_else(too_large)?;
        let charge = passed.as_ref().map(|passed| charges(&spec, passed.charge(), mapping_bytes as u64));
        let charges = charge.transpose()?;
        let mapping = map_shared(&fd, spec.file_offset_bytes - lead_bytes, mapping_bytes).map_err(failed)?;
        let lead = usize::try_from(lead_bytes).map_err(|_| too_large())?;
        // SAFETY: 1. `lead_bytes < page_bytes <= mapping_bytes`, so the result lies inside the mapping.
        let base = unsafe { mapping.add(lead) };
        let guard = sigbus::Guard::register(mapping.as_ptr() as usize, mapping_bytes);
        // st_dev and st_ino have different widths on other architectures.
        #[allow(clippy::unnecessary_cast)]
        let file_id = (stat.st_dev as u64, stat.st_ino as u64);
        Ok(Self {
            spec,
            fd,
            file_id,
            base,
            mapping,
            mapping_bytes,
            guard,
            _charges: charges,
            _passed: passed,
        })
    }

    /// A region of fresh, zeroed memory of our own (a memfd), for a driver or a test to pass on.
    ///
    /// # Errors
    /// [`MapError`] if the kernel has no memory for it.
    #[cfg(not(miri))]
    pub fn from_memfd(guest_addr: GuestAddress, size_bytes: u64) -> Result<Self, MapError> {
        let failed = |source: rustix::io::Errno| MapError::Io {
            guest_addr: guest_addr.raw_value(),
            size_bytes,
            source: source.into(),
        };
        let fd = memfd_create("bareblk-memory", MemfdFlags::CLOEXEC).map_err(failed)?;
        ftruncate(&fd, size_bytes).map_err(failed)?;
        // This process has no second address space, so guest addresses also serve as user addresses.
        let user_addr = guest_addr.raw_value();
        Self::map(RegionSpec { guest_addr, size_bytes, user_addr, file_offset_bytes: 0 }, Arc::new(fd))
    }

    /// Under Miri, which cannot map files: a region on the heap with an empty file.
    ///
    /// # Errors
    /// [`MapError`] if there is no memory for it.
    #[cfg(miri)]
    pub fn from_memfd(guest_addr: GuestAddress, size_bytes: u64) -> Result<Self, MapError> {
        let user_addr = guest_addr.raw_value();
        let spec = RegionSpec { guest_addr, size_bytes, user_addr, file_offset_bytes: 0 };
        check_sizes(&spec)?;
        let failed =
            |source: io::Error| MapError::Io { guest_addr: guest_addr.raw_value(), size_bytes, source };
        let mapping_bytes =
            usize::try_from(size_bytes).map_err(|_| failed(io::ErrorKind::OutOfMemory.into()))?;
        let (unused, _) = io::pipe().map_err(failed)?;
        let mapping = heap::allocate(mapping_bytes).map_err(failed)?;
        let guard = sigbus::Guard::register(mapping.as_ptr() as usize, mapping_bytes);
        let fd = Arc::new(unused.into());
        Ok(Self {
            spec,
            fd,
            file_id: (0, 0),
            base: mapping,
            mapping,
            mapping_bytes,
            guard,
            _charges: None,
            _passed: None,
        })
    }

    /// The region's specification, as the front-end sent it.
    #[must_use]
    pub fn spec(&self) -> &RegionSpec {
        &self.spec
    }

    /// The passed file, kept so that it can be passed on.
    #[must_use]
    pub fn fd(&self) -> &Arc<OwnedFd> {
        &self.fd
    }

    /// First address after the region.
    #[must_use]
    pub fn guest_end(&self) -> u64 {
        self.spec.guest_addr.raw_value() + self.spec.size_bytes
    }

    /// Whether `spec`, backed by `fd`, announces the same memory again.
    #[must_use]
    pub fn is_same(&self, spec: &RegionSpec, fd: impl AsFd) -> bool {
        #[allow(clippy::unnecessary_cast)]
        let same_file =
            is_at_hand(&fd) && fstat(fd).is_ok_and(|s| (s.st_dev as u64, s.st_ino as u64) == self.file_id);
        same_file && *spec == self.spec
    }

    /// Whether an access found no page behind the mapping, because the file was truncated.
    #[must_use]
    pub fn is_poisoned(&self) -> bool {
        self.guard.is_poisoned()
    }

    /// The region's host address and length, for registration with a kernel that pins the pages. The contents
    /// may change at any moment; the range is mapped as long as this value lives.
    #[must_use]
    pub fn host_range(&self) -> (NonNull<u8>, u64) {
        (self.base, self.spec.size_bytes)
    }

    /// The region's bytes, which other processes may access at the same time.
    pub(crate) fn shared_bytes(&self) -> &[AtomicU8] {
        #[allow(clippy::cast_possible_truncation)] // `map` made sure that the size fits `usize`
        let len = self.spec.size_bytes as usize;
        // SAFETY: 1. valid: `size_bytes` bytes from `base` lie inside the mapping, and a byte needs no alignment;
        // 2. alive: the mapping lives as long as `self`, hence this borrow; 3. shared: the type is an atomic.
        unsafe { std::slice::from_raw_parts(self.base.cast().as_ptr(), len) }
    }

    /// The region's addresses; valid as long as this value lives.
    pub(crate) fn span(&self) -> Span {
        let RegionSpec { guest_addr, size_bytes, .. } = self.spec;
        Span { guest_addr: guest_addr.raw_value(), size_bytes, base: self.base }
    }

    /// Guest address of a host address inside this region.
    pub(crate) fn guest_of(&self, host: usize) -> Option<u64> {
        let offset_bytes = host.checked_sub(self.base.as_ptr() as usize)? as u64;
        (offset_bytes < self.spec.size_bytes).then(|| self.spec.guest_addr.raw_value() + offset_bytes)
    }
}

/// The addresses of one region, copied so that a translation need not access the region.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    guest_addr: u64,
    size_bytes: u64,
    base: NonNull<u8>,
}

// SAFETY: 1. a plain address; the user of the address ensures that the region still exists.
unsafe impl Send for Span {}

impl Span {
    /// A span that contains no address.
    pub(crate) const NOWHERE: Self = Self { guest_addr: 0, size_bytes: 0, base: NonNull::dangling() };

    /// Returns the host address of `addr` and the number of bytes from there to the region's end, if `addr` is in the
    /// region.
    #[inline]
    pub(crate) fn at(self, addr: u64) -> Option<(NonNull<u8>, u64)> {
        let offset_bytes = addr.wrapping_sub(self.guest_addr);
        if offset_bytes >= self.size_bytes {
            return None;
        }
        #[allow(clippy::cast_possible_truncation)] // `map` made sure that the size fits `usize`
        let offset = offset_bytes as usize;
        // SAFETY: 1. `offset < size_bytes`, and `base + size_bytes` is inside the mapping.
        Some((unsafe { self.base.add(offset) }, self.size_bytes - offset_bytes))
    }
}

/// Returns the file offset at which the region ends.
fn check_sizes(spec: &RegionSpec) -> Result<u64, MapError> {
    let size_bytes = spec.size_bytes;
    if size_bytes == 0 {
        return Err(MapError::Empty { guest_addr: spec.guest_addr.raw_value() });
    }
    let fits = |what, start: u64| {
        start.checked_add(size_bytes).ok_or(MapError::Overflow { what, start, size_bytes })
    };
    fits("guest address", spec.guest_addr.raw_value())?;
    fits("user address", spec.user_addr)?;
    fits("file offset", spec.file_offset_bytes)
}

/// The charges for a mapping, without its descriptor.
fn charges(spec: &RegionSpec, descriptor: &Charge, mapping_bytes: u64) -> Result<[Charge; 2], MapError> {
    let (guest_addr, size_bytes) = (spec.guest_addr.raw_value(), spec.size_bytes);
    let charge = |resource, amount| {
        descriptor.further(resource, amount).map_err(|source| MapError::Quota {
            guest_addr,
            size_bytes,
            source,
        })
    };
    let (mapping, space) = (charge(Resource::Mappings, 1)?, charge(Resource::AddressSpace, mapping_bytes)?);
    Ok([mapping, space])
}

fn map_shared(fd: &OwnedFd, offset_bytes: u64, length_bytes: usize) -> io::Result<NonNull<u8>> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    let flags = MapFlags::SHARED | MapFlags::NORESERVE;
    // SAFETY: 1. the kernel chooses the address, so no existing mapping is replaced.
    let address =
        unsafe { rustix::mm::mmap(std::ptr::null_mut(), length_bytes, protection, flags, fd, offset_bytes) }?;
    // Guest data must not appear in core dumps; if the kernel refuses, continue anyway.
    // SAFETY: 1. the range was mapped above; the advice changes no content.
    let _ = unsafe { rustix::mm::madvise(address, length_bytes, Advice::LinuxDontDump) };
    NonNull::new(address.cast()).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

impl Drop for Region {
    fn drop(&mut self) {
        self.guard.unregister();
        #[cfg(miri)]
        // SAFETY: 1. allocated by `from_memfd` with this length; 2. as below.
        unsafe {
            heap::free(self.mapping, self.mapping_bytes);
        }
        #[cfg(not(miri))]
        // SAFETY: 1. mapped by `map` with this length; 2. nothing borrows from it once the region is dropped:
        // slices and iovecs hold the `GuestMemory` that holds the region.
        let unmapped = unsafe { rustix::mm::munmap(self.mapping.as_ptr().cast(), self.mapping_bytes) };
        #[cfg(not(miri))]
        debug_assert!(unmapped.is_ok());
    }
}

/// Page-aligned memory for regions under Miri.
#[cfg(miri)]
mod heap {
    use std::alloc::{Layout, alloc_zeroed, dealloc};
    use std::io;
    use std::ptr::NonNull;

    const PAGE_BYTES: usize = 4096;

    fn layout(size_bytes: usize) -> io::Result<Layout> {
        Layout::from_size_align(size_bytes, PAGE_BYTES).map_err(|_| io::ErrorKind::OutOfMemory.into())
    }

    pub(super) fn allocate(size_bytes: usize) -> io::Result<NonNull<u8>> {
        assert!(size_bytes != 0, "checked by the caller");
        // SAFETY: 1. the size is not zero, as asserted above.
        let address = unsafe { alloc_zeroed(layout(size_bytes)?) };
        NonNull::new(address).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
    }

    /// # Safety
    /// `address` is from `allocate` with this size, and no longer in use.
    pub(super) unsafe fn free(address: NonNull<u8>, size_bytes: usize) {
        if let Ok(layout) = layout(size_bytes) {
            // SAFETY: 1. the caller guarantees this.
            unsafe { dealloc(address.as_ptr(), layout) };
        }
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region").field("spec", &self.spec).finish_non_exhaustive()
    }
}
