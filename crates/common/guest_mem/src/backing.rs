//! Decides which files may back guest memory: only files whose pages are either present or permanently missing.
//!
//! - An access to an absent page waits for the file system. With tmpfs (which includes memfds) and hugetlbfs
//!   the page either exists or raises a SIGBUS, which we handle; DAX is memory itself. With any other file
//!   the access may wait for a disk, a network, or a program (FUSE, also below overlayfs) that never answers,
//!   and it would block a worker.
//! - DAX is accepted only on ext4, XFS and devices: FUSE supports DAX too, but asks its program for every page.

use std::io;
use std::os::fd::AsFd;

use rustix::fs::{AtFlags, FileType, Statx, StatxAttributes, StatxFlags, fcntl_get_seals, fstatfs, statx};

/// `f_type` of hugetlbfs in `statfs(2)`; a memfd with `MFD_HUGETLB` reports it too.
const HUGETLBFS: u64 = 0x9584_58f6;
/// `f_type` of tmpfs, memfds and System V shared memory.
pub(crate) const TMPFS: u64 = 0x0102_1994;
const EXT4: u64 = 0xef53;
const XFS: u64 = 0x5846_5342;

/// Names of file systems, for messages.
const KNOWN: [(u64, &str); 12] = [
    (TMPFS, "tmpfs"),
    (HUGETLBFS, "hugetlbfs"),
    (EXT4, "ext2, ext3 or ext4"),
    (XFS, "XFS"),
    (0x9123_683e, "btrfs"),
    (0x2fc1_2fc1, "ZFS"),
    (0x794c_7630, "overlayfs"),
    (0x6573_5546, "FUSE"),
    (0x6969, "NFS"),
    (0x0102_1997, "9p"),
    (0x00c3_6400, "Ceph"),
    (0x0904_1934, "anon_inode"),
];

/// The file properties that decide whether its mapping is real memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Backing {
    /// The file system's magic number, from `statfs`.
    fs_type: u64,
    /// Page size of the file's mappings.
    page_bytes: u64,
    is_regular: bool,
    is_device: bool,
    is_dax: bool,
}

/// Whether a file is memory. Avoids asking the file system, which may be a program that does not answer: only tmpfs and
/// hugetlbfs support seals, and DAX shows in attributes that the kernel has cached.
pub(crate) fn is_at_hand(fd: impl AsFd) -> bool {
    fcntl_get_seals(&fd).is_ok() || known_attributes(&fd).is_ok_and(|statx| is_dax(&statx))
}

fn known_attributes(fd: impl AsFd) -> io::Result<Statx> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    Ok(statx(fd, c"", flags, StatxFlags::TYPE)?)
}

fn is_dax(statx: &Statx) -> bool {
    statx.stx_attributes.contains(StatxAttributes::DAX)
}

/// The kind of a file that is not memory, for messages. Asks only file systems with a device of their own, because
/// those answer without a program.
pub(crate) fn name_of_other(fd: impl AsFd) -> String {
    let Ok(known) = known_attributes(&fd) else { return "a file of unknown kind".to_owned() };
    let file_type = FileType::from_raw_mode(known.stx_mode.into());
    match (known.stx_dev_major, file_type) {
        (0, FileType::RegularFile) => {
            "a file on FUSE, overlayfs, a network, or another file system without a device".to_owned()
        }
        (1.., FileType::RegularFile) => {
            Backing::of(&fd, file_type).map_or_else(|_| "a file of unknown kind".to_owned(), Backing::name)
        }
        _ => "a non-regular file".to_owned(),
    }
}

impl Backing {
    pub(crate) fn of(fd: impl AsFd, file_type: FileType) -> io::Result<Self> {
        let (fs_type, page_bytes) = fs_type_and_page_bytes(&fd)?;
        let attributes = statx(&fd, c"", AtFlags::EMPTY_PATH, StatxFlags::empty());
        // If the kernel does not report DAX, the file does not use it.
        let is_dax = attributes.is_ok_and(|statx| statx.stx_attributes.contains(StatxAttributes::DAX));
        let is_regular = file_type == FileType::RegularFile;
        let is_device = file_type == FileType::CharacterDevice;
        Ok(Self { fs_type, page_bytes, is_regular, is_device, is_dax })
    }

    pub(crate) fn page_bytes(self) -> u64 {
        self.page_bytes
    }

    pub(crate) fn is_memory(self) -> bool {
        // The node of a device is on a tmpfs, which says nothing about the device itself.
        match self.is_dax {
            true => self.is_device || self.is_regular && matches!(self.fs_type, EXT4 | XFS),
            false => self.is_regular && matches!(self.fs_type, TMPFS | HUGETLBFS),
        }
    }

    /// Describes the file, for messages.
    pub(crate) fn name(self) -> String {
        let kind = if self.is_regular { "a file" } else { "a non-regular file" };
        let known = KNOWN.iter().find(|(magic, _)| *magic == self.fs_type).map(|(_, name)| *name);
        match known {
            Some(name) => format!("{kind} on {name}"),
            None => format!("{kind} on a file system of type {:#x}", self.fs_type),
        }
    }
}

/// The file system's magic number, and the page size of the file's mappings.
pub(crate) fn fs_type_and_page_bytes(fd: impl AsFd) -> io::Result<(u64, u64)> {
    let statfs = fstatfs(fd)?;
    // `f_type` and `f_bsize` have different widths and signs on other architectures.
    #[allow(clippy::unnecessary_cast, clippy::cast_sign_loss)]
    let (fs_type, fs_block) = (statfs.f_type as u64 & 0xffff_ffff, statfs.f_bsize as u64);
    let huge = fs_type == HUGETLBFS && fs_block.is_power_of_two();
    Ok((fs_type, if huge { fs_block } else { rustix::param::page_size() as u64 }))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FUSE: u64 = 0x6573_5546;
    const OVERLAYFS: u64 = 0x794c_7630;

    fn file(fs_type: u64) -> Backing {
        Backing { fs_type, page_bytes: 4096, is_regular: true, is_device: false, is_dax: false }
    }

    fn device(is_dax: bool) -> Backing {
        Backing { is_regular: false, is_device: true, is_dax, ..file(TMPFS) }
    }

    #[test]
    fn files_that_are_memory_are_taken() {
        let dax = |fs_type| Backing { is_dax: true, ..file(fs_type) };
        assert!(
            [file(TMPFS), file(HUGETLBFS), dax(EXT4), dax(XFS), device(true)].iter().all(|b| b.is_memory())
        );
    }

    #[test]
    fn files_whose_pages_may_have_to_be_waited_for_are_not() {
        let others = [EXT4, XFS, FUSE, OVERLAYFS, 0x9123_683e, 0x6969, 0x1234].map(file);
        assert!(!others.iter().any(|backing| backing.is_memory()));
    }

    #[test]
    fn dax_of_a_program_and_devices_that_happen_to_lie_in_a_tmpfs_are_not_memory() {
        assert!(!Backing { is_dax: true, ..file(FUSE) }.is_memory());
        assert!(!device(false).is_memory());
        assert!(!Backing { is_regular: false, ..file(TMPFS) }.is_memory());
    }

    #[test]
    fn name_tells_the_file_system_or_its_number() {
        assert_eq!(file(OVERLAYFS).name(), "a file on overlayfs");
        assert_eq!(file(0x1234).name(), "a file on a file system of type 0x1234");
        assert_eq!(device(false).name(), "a non-regular file on tmpfs");
    }
}
