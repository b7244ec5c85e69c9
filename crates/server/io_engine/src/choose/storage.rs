//! Probes the properties of an open file that determine how an engine should read and write it.
//!
//! - Makes four or five system calls (microseconds). Writes nothing, reads no block, and touches no cached page.
//! - The result holds only for this open file: with other flags, the same file may have other properties.
//!
//! `disk_image` determines sizes and alignment.

use std::fmt;
use std::fs::File;
use std::io;
use std::io::IoSliceMut;

use rustix::fs::{
    AtFlags, FileType, OFlags, StatxAttributes, StatxFlags, fcntl_get_seals, fcntl_getfl, fstat, statx,
};
use rustix::io::{Errno, ReadWriteFlags, preadv2};

/// An offset beyond the end of every file: a read there returns 0 before the kernel looks up a page or a block. Aligned
/// for `O_DIRECT`, and far enough below 2^63 to pass the kernel's check of offset and length.
const BEHIND_ANY_END: u64 = 1 << 62;
const SCRATCH_BYTES: usize = 4096;

/// Aligned for `O_DIRECT`.
#[repr(align(4096))]
struct Scratch([u8; SCRATCH_BYTES]);

/// The properties of an open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Storage {
    /// The file is open with `O_DIRECT`.
    pub direct: bool,
    /// The page cache is the storage: tmpfs, a memfd, hugetlbfs. Calls wait for a device only if pages were swapped
    /// out.
    pub ram_backed: bool,
    /// The file is on tmpfs and open for writing, and the kernel can tell its holes from its pages (mincore(2)).
    pub tells_pages: bool,
    /// The data is mapped directly from persistent memory, without page cache or device waits.
    pub dax: bool,
    /// Reads accept `RWF_NOWAIT`.
    pub nowait_reads: bool,
    /// Whether writes accept `RWF_NOWAIT`. `None`: only a write would show it (ext4 accepts the flag with `O_DIRECT`
    /// and refuses it through the page cache).
    pub nowait_writes: Option<bool>,
    /// The file is a block device.
    pub block_device: bool,
}

impl Storage {
    /// Probes `file`.
    ///
    /// # Errors
    /// Errors of `fcntl` and `fstat`. They do not occur on an open file.
    pub fn probe(file: &File) -> io::Result<Self> {
        let nowait_reads = takes_nowait_reads(file);
        Ok(Self {
            direct: fcntl_getfl(file)?.contains(OFlags::DIRECT),
            ram_backed: has_seals(file),
            tells_pages: is_writable_and_tells_pages(file),
            dax: is_dax(file),
            nowait_reads,
            // The kernel first checks one bit of the open file (`FMODE_NOWAIT`), the same for both directions. The file
            // system may refuse one direction later.
            nowait_writes: if nowait_reads { None } else { Some(false) },
            block_device: FileType::from_raw_mode(fstat(file)?.st_mode) == FileType::BlockDevice,
        })
    }
}

/// `F_GET_SEALS` succeeds on shmem and hugetlbfs files, sealed or not, and returns `EINVAL` for all others (fcntl(2)).
fn has_seals(file: &File) -> bool {
    fcntl_get_seals(file).is_ok()
}

/// Calls the file system last, because it may be a program that does not respond. Files with seals are safe: only tmpfs
/// and hugetlbfs have them.
fn is_writable_and_tells_pages(file: &File) -> bool {
    let is_writable = fcntl_getfl(file).is_ok_and(|flags| flags.contains(OFlags::RDWR));
    is_writable && has_seals(file) && guest_mem::tells_pages(file)
}

/// `STATX_ATTR_DAX` (statx(2), Linux 5.8). A kernel without it counts as having no DAX.
fn is_dax(file: &File) -> bool {
    let status = statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::empty());
    status.is_ok_and(|status| status.stx_attributes.contains(StatxAttributes::DAX))
}

/// The kernel refuses the flag with `EOPNOTSUPP` before it checks offset and length (preadv2(2)). Any other result
/// means that it accepts the flag.
fn takes_nowait_reads(file: &File) -> bool {
    let mut scratch = Scratch([0; SCRATCH_BYTES]);
    let mut buffers = [IoSliceMut::new(&mut scratch.0)];
    match preadv2(file, &mut buffers, BEHIND_ANY_END, ReadWriteFlags::NOWAIT) {
        Ok(_) | Err(Errno::AGAIN | Errno::INTR) => true,
        Err(_) => false,
    }
}

impl fmt::Display for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match (self.ram_backed, self.dax, self.block_device) {
            (true, _, _) => "in memory",
            (_, true, _) => "persistent memory (DAX)",
            (_, _, true) => "block device",
            _ => "file",
        };
        let cache = if self.direct { "bypassing the page cache" } else { "through the page cache" };
        let writes = match self.nowait_writes {
            None => "maybe",
            Some(true) => "yes",
            Some(false) => "no",
        };
        let reads = if self.nowait_reads { "yes" } else { "no" };
        write!(f, "{kind}, {cache}; non-blocking calls: reads {reads}, writes {writes}")
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Seek, Write};
    use std::os::unix::fs::OpenOptionsExt;

    use rustix::fs::{MemfdFlags, memfd_create};
    use xtask::skip::{Reason, skip};

    use super::*;

    /// A file beside the test program, which is on a real disk on most machines.
    fn on_disk(flags: i32) -> Option<(tempfile::TempDir, File)> {
        let program = std::env::current_exe().unwrap();
        let folder = tempfile::tempdir_in(program.parent().unwrap()).unwrap();
        let path = folder.path().join("probed");
        std::fs::write(&path, [7; 8192]).unwrap();
        let opened = File::options().read(true).write(true).custom_flags(flags).open(path);
        if let Err(error) = &opened {
            skip(Reason::NoDirectIo(program.parent().unwrap().display().to_string()), error);
        }
        Some((folder, opened.ok()?))
    }

    #[test]
    fn memfd_is_in_memory_and_refuses_nowait_in_both_directions() {
        let mut file = File::from(memfd_create("probed", MemfdFlags::CLOEXEC).unwrap());
        file.write_all(&[7; 8192]).unwrap();
        let storage = Storage::probe(&file).unwrap();
        assert!(storage.ram_backed && !storage.direct && !storage.dax && !storage.block_device, "{storage}");
        assert!(storage.tells_pages);
        let mut bytes = [0; 1];
        let mut buffers = [IoSliceMut::new(&mut bytes)];
        let taken = preadv2(&file, &mut buffers, 0, ReadWriteFlags::NOWAIT) != Err(Errno::OPNOTSUPP);
        assert_eq!((storage.nowait_reads, storage.nowait_writes), (taken, (!taken).then_some(false)));
    }

    #[test]
    fn file_on_disk_is_not_in_memory_and_takes_nowait_reads_exactly_if_the_kernel_does() {
        let Some((_folder, file)) = on_disk(0) else { return };
        let storage = Storage::probe(&file).unwrap();
        println!("{storage}");
        let mut bytes = [0; 1];
        let mut buffers = [IoSliceMut::new(&mut bytes)];
        let taken = preadv2(&file, &mut buffers, 0, ReadWriteFlags::NOWAIT) != Err(Errno::OPNOTSUPP);
        assert_eq!(storage.nowait_reads, taken);
        assert!(!storage.direct && !storage.block_device, "{storage}");
    }

    #[test]
    fn file_opened_past_the_page_cache_says_so() {
        let Some((_folder, file)) = on_disk(libc::O_DIRECT) else { return };
        assert!(Storage::probe(&file).unwrap().direct);
    }

    #[test]
    fn probing_leaves_position_contents_and_times_as_they_are() {
        let Some((_folder, mut file)) = on_disk(0) else { return };
        let before = fstat(&file).unwrap();
        Storage::probe(&file).unwrap();
        let after = fstat(&file).unwrap();
        let times = |s: &rustix::fs::Stat| (s.st_size, s.st_blocks, s.st_mtime, s.st_mtime_nsec);
        assert_eq!(times(&after), times(&before));
        assert_eq!(file.stream_position().unwrap(), 0);
    }

    #[test]
    fn pipe_is_probed_without_an_error() {
        let (reader, _writer) = std::io::pipe().unwrap();
        let storage = Storage::probe(&File::from(std::os::fd::OwnedFd::from(reader))).unwrap();
        assert!(!storage.ram_backed && !storage.nowait_reads, "{storage}");
    }
}
