//! Detects images that seem to have a format other than raw. A guest would see the format's metadata as disk contents,
//! and would destroy the image with its first write.
//!
//! - The result is only a guess: a guest may write the same bytes to its raw disk. The user who adds the disk decides
//!   ([`crate::ImageError::ForeignFormat`]).
//! - LUKS is not in the list: serving an encrypted disk as raw is correct.
//!
//! Facts: QEMU `docs/interop` (qcow2.rst, qed_spec.rst, parallels.rst) and `block/vdi.c`; VMware "Virtual Disk Format
//! 5.0"; Microsoft [MS-VHDX] §2.2.1 and the VHD specification 1.0 (a fixed VHD has its mark at the end and is not
//! detected).

use std::fs::File;
use std::os::unix::fs::FileExt;

use crate::geometry::MAX_BLOCK_SIZE_BYTES;

/// For each format: the offset of its magic bytes, these bytes, and the format's name.
const MAGICS: [(usize, &[u8], &str); 11] = [
    (0, b"QFI\xfb\0\0\0\x01", "qcow"),
    (0, b"QFI\xfb", "qcow2"),
    (0, b"QED\0", "QED"),
    (0, b"KDMV", "VMDK"),
    (0, b"COWD", "VMDK"),
    (0, b"# Disk DescriptorFile", "VMDK"),
    (0, b"vhdxfile", "VHDX"),
    (0, b"conectix", "VHD"),
    (0, b"WithoutFreeSpace", "Parallels"),
    (0, b"WithouFreSpacExt", "Parallels"),
    // These bytes follow a text that names the program.
    (64, b"\x7f\x10\xda\xbe", "VDI"),
];

/// Length and alignment of the read: enough for direct I/O with every supported block size.
const READ_BYTES: usize = MAX_BLOCK_SIZE_BYTES as usize;

/// The known format that the file's first bytes match, if any.
pub(crate) fn format_of(file: &File) -> Option<&'static str> {
    let mut memory = vec![0_u8; 2 * READ_BYTES];
    let start = memory.as_ptr().align_offset(READ_BYTES);
    let buffer = memory.get_mut(start..start + READ_BYTES)?;
    // A read error is not reported here, because the guest's own reads will report it.
    let read_bytes = file.read_at(buffer, 0).ok()?;
    format_in(buffer.get(..read_bytes)?)
}

fn format_in(beginning: &[u8]) -> Option<&'static str> {
    let has = |at: usize, magic: &[u8]| beginning.get(at..).is_some_and(|rest| rest.starts_with(magic));
    MAGICS.iter().find(|(at, magic, _)| has(*at, magic)).map(|(.., format)| *format)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_format_is_known_by_its_first_bytes() {
        let vdi =
            [b"<<< Oracle VM VirtualBox Disk Image >>>\n".as_slice(), &[0; 24], b"\x7f\x10\xda\xbe"].concat();
        let beginnings: [&[u8]; 9] = [
            b"QFI\xfb\0\0\0\x01",
            b"QFI\xfb\0\0\0\x03",
            b"QED\0....",
            b"KDMV\x01\0\0\0",
            b"vhdxfileM\0i\0",
            b"conectix\0\0\0\x02",
            b"# Disk DescriptorFile\nversion=1\n",
            b"WithouFreSpacExt\x02\0\0\0",
            &vdi,
        ];
        let formats = beginnings.map(|beginning| format_in(beginning).unwrap());
        assert_eq!(formats, ["qcow", "qcow2", "QED", "VMDK", "VHDX", "VHD", "VMDK", "Parallels", "VDI"]);
    }

    #[test]
    fn encrypted_partitioned_short_and_empty_disks_are_raw() {
        let beginnings: [&[u8]; 4] = [b"LUKS\xba\xbe\0\x02", b"\xeb\x63\x90\x10", b"QFI", b""];
        assert_eq!(beginnings.map(format_in), [None; 4]);
    }

    #[test]
    fn file_that_cannot_be_read_is_no_format() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), b"QED\0").unwrap();
        let write_only = std::fs::OpenOptions::new().write(true).open(file.path()).unwrap();
        assert_eq!(format_of(&write_only), None);
        assert_eq!(format_of(file.as_file()), Some("QED"));
    }
}
