//! Small images with changed bytes: nothing panics, and what is read stays inside its bounds.

use crate::check::check;
use crate::{Chain, ChainError, DiskFormat, FileId, Image, Opened, Opener, Role, RunKind};
use proptest::prelude::*;
use xtask::sizes::Size;

use crate::tests::headers::Fields;

const CLUSTER: usize = 65_536;
const COPIED: u64 = 1 << 63;

/// Cluster 0 the header, 1 refcount table, 2 refcount block, 3 L1 table, 4 an L2 table, 5 to 7 data.
fn image(incompatible: u64) -> Vec<u8> {
    let header = Fields { incompatible, after: vec![u8::from(incompatible & 8 != 0)], ..Fields::default() };
    let mut bytes = header.bytes();
    bytes.resize(8 * CLUSTER, 0x5a);
    let at = |cluster: usize| cluster as u64 * CLUSTER as u64;
    let mut words = |cluster: usize, words: &[u64]| {
        let table = &mut bytes[cluster * CLUSTER..][..CLUSTER];
        table.fill(0);
        let words = words.iter().flat_map(|word| word.to_be_bytes());
        table.iter_mut().zip(words).for_each(|(byte, word)| *byte = word);
    };
    words(1, &[at(2)]);
    words(2, &[0x0001_0001_0001_0001, 0x0001_0001_0001_0001]);
    words(3, &[at(4) | COPIED]);
    let compressed = (1 << 62) | (7 << 54) | (at(7) + 100);
    if incompatible & 16 == 0 {
        words(4, &[at(5) | COPIED, at(6) | COPIED, 0, 1, compressed]);
    } else {
        words(4, &[at(5) | COPIED, 0xffff_0000_0000_00ff, at(6) | COPIED, 0xff, compressed, 0]);
    }
    bytes
}

/// Gives the same bytes under all names.
struct Same<'a>(&'a [u8], u64);

impl<'a> Opener for Same<'a> {
    type File = &'a [u8];

    fn open(&mut self, _path: &std::path::Path, _role: Role) -> std::io::Result<Opened<&'a [u8]>> {
        self.1 += 1;
        Ok(Opened { file: self.0, id: FileId { device: 1, inode: self.1 } })
    }
}

/// Reads as much as a hostile size allows. Returns whether the image was accepted.
fn read_everything(bytes: &[u8]) -> bool {
    if let Ok(mut image) = Image::open(bytes) {
        let size = image.header().size_bytes;
        let geometry = image.header().geometry;
        image.snapshots().for_each(drop);
        let _ = check(&image, &mut |finding| assert!(finding.to_string().len() < 1000));
        let mut at = 0;
        for _ in 0..64 {
            if at >= size {
                break;
            }
            let Ok(run) = image.next_run(at, size - at) else { break };
            assert!((1..=size - at).contains(&run.len_bytes), "{run:?} at {at} of {size}");
            if let RunKind::Compressed(cluster) = run.kind {
                assert!(run.len_bytes <= geometry.cluster_bytes());
                let _ = image.decompress(cluster);
            }
            at += run.len_bytes;
        }
    }
    let opened: Result<Chain<&[u8]>, ChainError> =
        Chain::open("a/top".as_ref(), DiskFormat::Qcow2, &mut Same(bytes, 0));
    let Ok(mut chain) = opened else { return false };
    let size = chain.size_bytes();
    let mut buffer = vec![0; 3 * CLUSTER];
    for start in [0, size / 2, size.saturating_sub(3 * CLUSTER as u64)] {
        let len = size.saturating_sub(start).min(buffer.len() as u64) as usize;
        let _ = chain.read_at(start, &mut buffer[..len]);
    }
    true
}

#[test]
fn the_unchanged_images_are_read() {
    for incompatible in [0, 8, 16, 24, 4] {
        let bytes = image(incompatible);
        assert_eq!(read_everything(&bytes), incompatible != 4, "{incompatible}");
    }
}

/// Where changes hit: the header's fields and extensions, and the beginnings of the tables.
#[test]
fn l1_table_that_is_longer_than_the_disk_needs_costs_no_memory() {
    let mut bytes = image(0);
    // `l1_size`: to the end of the file.
    bytes[36..40].copy_from_slice(&(5 * CLUSTER as u32 / 8).to_be_bytes());
    let opened = Image::open(bytes.as_slice()).unwrap();
    let header = opened.header();
    assert_eq!(opened.l1().len() as u64, header.geometry.l1_entries_for(header.size_bytes));
    assert!(read_everything(&bytes));
}

fn place() -> impl Strategy<Value = usize> {
    let tables = (1..6_usize, 0..96_usize).prop_map(|(cluster, at)| cluster * CLUSTER + at);
    prop_oneof![4 => 0..200_usize, 4 => tables, 1 => 0..8 * CLUSTER]
}

/// Values at the edges of limits, or any.
fn value() -> impl Strategy<Value = u64> {
    let edge = (0..64_u32, -1..=1_i64).prop_map(|(bit, more)| (1_u64 << bit).wrapping_add_signed(more));
    let cluster =
        (0..9_u64, any::<bool>()).prop_map(|(cluster, copied)| (cluster << 16) | (u64::from(copied) << 63));
    prop_oneof![edge, cluster, any::<u64>(), Just(u64::MAX)]
}

const CASES: Size<u32> = Size { smoke: 600, full: 20_000 };

proptest! {
    #![proptest_config(ProptestConfig { cases: CASES.now(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn changed_images_are_read_or_refused(
        incompatible in prop::sample::select(vec![0_u64, 4, 8, 16, 24]),
        changes in prop::collection::vec((place(), value(), prop::sample::select(vec![1_usize, 2, 4, 8])), 1..4),
        length in prop_oneof![4 => Just(8 * CLUSTER), 1 => 0..8 * CLUSTER],
    ) {
        let mut bytes = image(incompatible);
        for (at, value, len) in changes {
            let at = at - at % len;
            bytes[at..at + len].copy_from_slice(&value.to_be_bytes()[8 - len..]);
        }
        bytes.truncate(length);
        read_everything(&bytes);
    }

    #[test]
    fn any_bytes_after_the_magic_are_refused_or_read(mut bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let magic = 0x5146_49fb_u32.to_be_bytes();
        bytes.splice(0..0, magic);
        read_everything(&bytes);
    }
}
