//! A FAT12 volume with one file, `/EFI/BOOT/BOOTX64.EFI`: UEFI firmware starts it from a disk.
//!
//! ```text
//! sector 0 boot sector (only its fields are used, not its code) 1, 2 two copies of the allocation table 3 root folder:
//! EFI 4 … clusters of 4 KiB: the folder EFI, the folder BOOT, the file
//! ```
//!
//! The volume takes the disk's first MiB, without a partition table. Its last sectors belong to no cluster.
//!
//! Format: Microsoft FAT specification, version 1.03, sections 3 to 6.

use anyhow::{Result, ensure};

const SECTOR_BYTES: usize = 512;
const SECTORS: usize = 2048;
const CLUSTER_SECTORS: usize = 8;
const CLUSTER_BYTES: usize = CLUSTER_SECTORS * SECTOR_BYTES;
const FIRST_CLUSTER_SECTOR: usize = 4;
const CLUSTERS: usize = (SECTORS - FIRST_CLUSTER_SECTOR) / CLUSTER_SECTORS;

/// The first sector after the last cluster; from here to the volume's end, the disk is free.
pub(super) const FREE_SECTOR: usize = FIRST_CLUSTER_SECTOR + CLUSTERS * CLUSTER_SECTORS;

/// Clusters are numbered from 2.
const EFI: usize = 2;
const BOOT: usize = 3;
const FILE: usize = 4;

const END_OF_CHAIN: u16 = 0xfff;
const IS_FOLDER: u8 = 0x10;
const IS_FILE: u8 = 0x20;

/// The volume's bytes.
///
/// # Errors
/// `file` is larger than the clusters that are left for it.
pub(super) fn volume_with(file: &[u8]) -> Result<Vec<u8>> {
    let room = (CLUSTERS - 2) * CLUSTER_BYTES;
    ensure!(file.len() <= room, "the EFI program has {} bytes: a volume holds {room}", file.len());
    let mut volume = vec![0; SECTORS * SECTOR_BYTES];
    write_boot_sector(&mut volume[..SECTOR_BYTES]);
    let table = table(file.len().div_ceil(CLUSTER_BYTES));
    for sector in [1, 2] {
        volume[sector * SECTOR_BYTES..][..table.len()].copy_from_slice(&table);
    }
    put(&mut volume, 3 * SECTOR_BYTES, &entry(b"EFI        ", IS_FOLDER, EFI, 0));
    let own = |cluster| entry(b".          ", IS_FOLDER, cluster, 0);
    let parent = |cluster| entry(b"..         ", IS_FOLDER, cluster, 0);
    let efi = [own(EFI), parent(0), entry(b"BOOT       ", IS_FOLDER, BOOT, 0)].concat();
    let boot = [own(BOOT), parent(EFI), entry(b"BOOTX64 EFI", IS_FILE, FILE, file.len())].concat();
    for (cluster, content) in [(EFI, &efi[..]), (BOOT, &boot), (FILE, file)] {
        put(&mut volume, FIRST_CLUSTER_SECTOR * SECTOR_BYTES + (cluster - 2) * CLUSTER_BYTES, content);
    }
    Ok(volume)
}

fn put(volume: &mut [u8], at: usize, content: &[u8]) {
    volume[at..at + content.len()].copy_from_slice(content);
}

fn write_boot_sector(sector: &mut [u8]) {
    let number = |value: usize| u16::try_from(value).unwrap_or(u16::MAX).to_le_bytes();
    sector[..3].copy_from_slice(&[0xeb, 0x3c, 0x90]);
    sector[3..11].copy_from_slice(b"bareblk ");
    sector[11..13].copy_from_slice(&number(SECTOR_BYTES));
    sector[13] = number(CLUSTER_SECTORS)[0];
    sector[14..16].copy_from_slice(&number(1)); // reserved sectors: this one
    sector[16] = 2; // tables
    sector[17..19].copy_from_slice(&number(SECTOR_BYTES / 32)); // entries of the root folder
    sector[19..21].copy_from_slice(&number(SECTORS));
    sector[21] = 0xf8; // a fixed disk
    sector[22..24].copy_from_slice(&number(1)); // sectors of a table
    sector[36] = 0x80; // drive number
    sector[38] = 0x29; // the three following fields are present
    sector[43..54].copy_from_slice(b"BAREBLK    ");
    sector[54..62].copy_from_slice(b"FAT12   ");
    sector[510..].copy_from_slice(&[0x55, 0xaa]);
}

/// The allocation table, with two entries of 12 bits in three bytes.
fn table(file_clusters: usize) -> Vec<u8> {
    let mut next = vec![0xff8, END_OF_CHAIN, END_OF_CHAIN, END_OF_CHAIN];
    for cluster in FILE..FILE + file_clusters {
        let is_last = cluster + 1 == FILE + file_clusters;
        next.push(if is_last { END_OF_CHAIN } else { u16::try_from(cluster + 1).unwrap_or(END_OF_CHAIN) });
    }
    next.resize(next.len().next_multiple_of(2), 0);
    let pack = |pair: &[u16]| {
        let both = u32::from(pair[0]) | u32::from(pair[1]) << 12;
        let [low, middle, high, _] = both.to_le_bytes();
        [low, middle, high]
    };
    next.chunks_exact(2).flat_map(pack).collect()
}

fn entry(name: &[u8; 11], attributes: u8, cluster: usize, size: usize) -> [u8; 32] {
    let mut entry = [0; 32];
    entry[..11].copy_from_slice(name);
    entry[11] = attributes;
    entry[26..28].copy_from_slice(&u16::try_from(cluster).unwrap_or(0).to_le_bytes());
    entry[28..].copy_from_slice(&u32::try_from(size).unwrap_or(0).to_le_bytes());
    entry
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_has_a_chain_per_folder_and_one_for_the_file() {
        // 0xff8 0xfff | 0xfff 0xfff | 5 6 | 0xfff 0
        let expected = [0xf8, 0xff, 0xff, 0xff, 0xff, 0xff, 0x05, 0x60, 0x00, 0xff, 0x0f, 0x00];
        assert_eq!(table(3), expected);
    }

    #[test]
    fn file_lies_in_the_third_cluster_and_free_sectors_follow_the_last() {
        let volume = volume_with(b"MZ").unwrap();
        let at = FIRST_CLUSTER_SECTOR * SECTOR_BYTES + 2 * CLUSTER_BYTES;
        assert_eq!(&volume[at..at + 2], b"MZ");
        assert_eq!((volume.len(), FREE_SECTOR), (1 << 20, 2044));
    }

    #[test]
    fn file_that_is_too_large_is_refused() {
        let error = volume_with(&vec![0; 1 << 20]).unwrap_err();
        assert!(error.to_string().contains("1048576 bytes"));
    }
}
