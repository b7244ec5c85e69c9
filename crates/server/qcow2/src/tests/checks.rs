//! Checks, against those of `qemu-img check`: sound images of all kinds, and images with one change.

use std::os::unix::fs::FileExt;

use fastrand::Rng;
use serde_json::Value;

use crate::Image;
use crate::check::{CheckReport, check};
use crate::tests::rig::{Bed, bed, compressed_writes, random_writes};

/// What QEMU says.
fn theirs(bed: &Bed, name: &str) -> CheckReport {
    let output = bed.img(&["check", "-f", "qcow2", "--output=json", name]);
    let json: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"));
    let number = |key: &str| json[key].as_u64().unwrap_or_default();
    CheckReport {
        corruptions: number("corruptions"),
        leaks: number("leaks"),
        check_errors: number("check-errors"),
        image_end_bytes: number("image-end-offset"),
        total_clusters: number("total-clusters"),
        allocated_clusters: number("allocated-clusters"),
        fragmented_clusters: number("fragmented-clusters"),
        compressed_clusters: number("compressed-clusters"),
    }
}

/// What we say, with the texts of all findings.
fn ours(bed: &Bed, name: &str) -> (CheckReport, String) {
    let image = Image::open(std::fs::File::open(bed.path(name)).unwrap()).unwrap();
    let mut texts = String::new();
    let report = check(&image, &mut |finding| texts += &format!("{finding}\n")).unwrap();
    (report, texts)
}

#[track_caller]
fn assert_same(bed: &Bed, what: &str) {
    let (report, texts) = ours(bed, "disk.qcow2");
    assert_eq!(report, theirs(bed, "disk.qcow2"), "{what}\n{texts}");
}

#[test]
fn sound_images_have_the_numbers_that_qemu_counts() {
    let Some(bed) = bed() else { return };
    let options = [
        (9, ""),
        (12, ",compat=0.10"),
        (16, ",refcount_bits=1"),
        (12, ",refcount_bits=64"),
        (21, ",preallocation=metadata"),
        (14, ",extended_l2=on"),
        (14, ",compression_type=zstd"),
        (16, ",data_file=data.raw"),
    ];
    for (cluster_bits, options) in options {
        let (mut rng, size_bytes, cluster_bytes) = (Rng::with_seed(1), 6 << 20, 1 << cluster_bits);
        let options = format!("cluster_size={cluster_bytes}{options}");
        bed.create("disk.qcow2", &options, size_bytes);
        if !options.contains("refcount_bits=1") && !options.contains("data_file") && cluster_bits < 21 {
            bed.io("disk.qcow2", &compressed_writes(&mut rng, size_bytes, cluster_bytes, 9));
        }
        bed.io("disk.qcow2", &random_writes(&mut rng, size_bytes, 512, 40));
        assert_same(&bed, &options);
        let (report, texts) = ours(&bed, "disk.qcow2");
        assert_eq!((report.corruptions, report.leaks, report.check_errors), (0, 0, 0), "{texts}");
        std::fs::remove_file(bed.path("disk.qcow2")).unwrap();
    }
}

#[test]
fn snapshots_and_bitmaps_are_references() {
    let Some(bed) = bed() else { return };
    let mut rng = Rng::with_seed(2);
    bed.create("disk.qcow2", "cluster_size=4k", 6 << 20);
    bed.img_ok(&["bitmap", "--add", "-g", "64k", "disk.qcow2", "changes"]);
    bed.img_ok(&["bitmap", "--add", "-g", "512", "disk.qcow2", "details"]);
    for name in ["one", "two", "three"] {
        bed.io("disk.qcow2", &random_writes(&mut rng, 6 << 20, 512, 20));
        bed.img_ok(&["snapshot", "-c", name, "disk.qcow2"]);
    }
    bed.img_ok(&["snapshot", "-d", "two", "disk.qcow2"]);
    bed.io("disk.qcow2", &random_writes(&mut rng, 6 << 20, 512, 20));
    assert_same(&bed, "snapshots and bitmaps");
    assert_eq!(ours(&bed, "disk.qcow2").1, "");
}

/// An image with clusters of 4 KiB: a table's place in the file by its first L1 entry, and a free refcount.
struct Marked {
    bytes: Vec<u8>,
    l1: usize,
    l2: usize,
    refcount_table: usize,
    refcounts: usize,
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap())
}

fn marked(bed: &Bed, options: &str) -> Marked {
    bed.create("disk.qcow2", options, 6 << 20);
    bed.io("disk.qcow2", &["write -P 1 0 1M".into(), "write -z 2M 64k".into(), "write -P 1 3M 64k".into()]);
    let bytes = std::fs::read(bed.path("disk.qcow2")).unwrap();
    let offset = |value: u64| (value & 0x00ff_ffff_ffff_fe00) as usize;
    let (l1, refcount_table) = (offset(word(&bytes, 40)), offset(word(&bytes, 48)));
    let (l2, refcounts) = (offset(word(&bytes, l1)), offset(word(&bytes, refcount_table)));
    Marked { l1, l2, refcount_table, refcounts, bytes }
}

impl Marked {
    /// Changes 8 bytes of the file, and restores them in memory.
    fn change(&self, bed: &Bed, at: usize, value: u64) {
        let mut bytes = self.bytes.clone();
        bytes[at..at + 8].copy_from_slice(&value.to_be_bytes());
        std::fs::write(bed.path("disk.qcow2"), bytes).unwrap();
    }
}

#[test]
fn one_changed_entry_is_found_as_often_as_in_qemu() {
    let Some(bed) = bed() else { return };
    for options in ["cluster_size=4k", "cluster_size=16k,extended_l2=on"] {
        let image = marked(&bed, options);
        let (l1, l2) = (word(&image.bytes, image.l1), word(&image.bytes, image.l2));
        let counts = word(&image.bytes, image.refcounts + 16);
        let changes = [
            ("a count too high", image.refcounts + 16, counts + 1),
            ("a count too low", image.refcounts + 16, counts & !0xffff),
            ("four counts of 7", image.refcounts + 16, 0x0007_0007_0007_0007),
            ("an L2 table past the end", image.l1, l1 + (1 << 40)),
            ("an L2 table not copied", image.l1, l1 & !(1 << 63)),
            ("an L2 table gone", image.l1, 0),
            ("data past the end", image.l2, l2 + (1 << 40)),
            ("data not copied", image.l2, l2 & !(1 << 63)),
            ("data gone", image.l2, 0),
            ("the same data twice", image.l2, l2 + (1 << 14)),
            ("an L1 entry with reserved bits", image.l1, l1 | 4),
            ("an L2 entry with reserved bits", image.l2, l2 | 4),
        ];
        for (what, at, value) in changes {
            image.change(&bed, at, value);
            let (report, texts) = ours(&bed, "disk.qcow2");
            let theirs = theirs(&bed, "disk.qcow2");
            let numbers = |report: CheckReport| (report.corruptions, report.leaks, report.check_errors);
            assert_eq!(numbers(report), numbers(theirs), "{options}: {what}\n{texts}");
            assert_ne!(numbers(report), (0, 0, 0), "{options}: {what}");
        }
    }
}

/// How many errors follow from a table that cannot be found is arbitrary.
#[test]
fn tables_inside_a_cluster_or_past_the_end_are_corruptions_as_in_qemu() {
    let Some(bed) = bed() else { return };
    let image = marked(&bed, "cluster_size=4k");
    let (l1, l2) = (word(&image.bytes, image.l1), word(&image.bytes, image.l2));
    let changes = [
        ("an L1 entry inside a cluster", image.l1, l1 | 512),
        ("an L2 entry inside a cluster", image.l2, l2 | 512),
        ("a refcount block past the end", image.refcount_table, 1 << 40),
        ("a refcount block inside a cluster", image.refcount_table, 512),
    ];
    for (what, at, value) in changes {
        image.change(&bed, at, value);
        let (report, texts) = ours(&bed, "disk.qcow2");
        assert!(report.corruptions > 0 && theirs(&bed, "disk.qcow2").corruptions > 0, "{what}: {texts}");
    }
}

/// QEMU counts this as sound.
#[test]
fn table_that_something_else_uses_is_found_although_the_counts_are_right() {
    let Some(bed) = bed() else { return };
    let image = marked(&bed, "cluster_size=4k");
    let mut bytes = image.bytes.clone();
    let (l2, l1) = (word(&bytes, image.l2), image.l1 as u64);
    // A cluster of data is the L1 table, both counts are 2, and bit 63 is clear.
    bytes[image.l2..image.l2 + 8].copy_from_slice(&l1.to_be_bytes());
    let count = |cluster: u64| image.refcounts + cluster as usize * 2;
    bytes[count(l1 >> 12) + 1] = 2;
    bytes[count((l2 & !(1 << 63)) >> 12) + 1] = 0;
    std::fs::write(bed.path("disk.qcow2"), bytes).unwrap();
    let (report, texts) = ours(&bed, "disk.qcow2");
    assert_eq!(theirs(&bed, "disk.qcow2").corruptions, 0);
    assert_eq!((report.corruptions, report.leaks), (1, 0));
    assert_eq!(texts, format!("cluster {}: a table's, but used 2 times or for data, too\n", l1 >> 12));
}

/// With clusters of 512 bytes, a window of counters covers 8 GiB.
#[test]
fn references_and_counts_far_behind_each_other_are_found() {
    const GIB: u64 = 1 << 30;
    let Some(bed) = bed() else { return };
    bed.create("disk.qcow2", "cluster_size=512", 1 << 20);
    bed.io("disk.qcow2", &["write -P 1 0 2k".into()]);
    let bytes = std::fs::read(bed.path("disk.qcow2")).unwrap();
    let l2 = word(&bytes, word(&bytes, 40) as usize) & !(1 << 63);
    let file = std::fs::File::options().write(true).open(bed.path("disk.qcow2")).unwrap();
    let put = |offset: u64, value: u64| file.write_all_at(&value.to_be_bytes(), offset).unwrap();
    file.set_len(40 * GIB).unwrap();
    // A guest's cluster is moved to 30 GiB.
    put(l2, (30 * GIB) | (1 << 63));
    // A refcount table that covers everything. Its entry for 20 GiB has a block of its own, with one count.
    let (table, clusters) = (GIB, 16_384_u64);
    put(48, table);
    file.write_all_at(&(clusters as u32).to_be_bytes(), 56).unwrap();
    put(table, word(&bytes, word(&bytes, 48) as usize));
    put(table + 20 * GIB / (256 * 512) * 8, 9 * GIB);
    put(9 * GIB, 1);
    let (report, texts) = ours(&bed, "disk.qcow2");
    // Without counts: the new table, the new block, the moved cluster and its copied bit. Leaked: the old table, the
    // cluster that was moved away, and the count at 20 GiB.
    assert_eq!((report.corruptions, report.leaks), (clusters + 3, 3), "{report:?}");
    assert_eq!(report.image_end_bytes, 30 * GIB + 512);
    let last: Vec<&str> = texts.lines().rev().take(3).collect();
    let expected = |cluster: u64, refcount, references| {
        format!("cluster {}: refcount {refcount}, references {references}", cluster * GIB / 512)
    };
    let far = format!("cluster {}: refcount 1, references 0", 20 * GIB / 512 + 3);
    assert_eq!(last, [expected(30, 0, 1), far, expected(9, 0, 1)]);
}
