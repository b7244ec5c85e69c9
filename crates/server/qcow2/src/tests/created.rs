//! Images with all options of `qemu-img create`, written by `qemu-io`: this crate reads what QEMU reads.

use crate::{Header, Image, RunKind};
use fastrand::Rng;

use crate::tests::rig::{Bed, bed, compressed_writes, random_writes};

/// Makes, writes and compares an image. Returns its header.
fn written(bed: &Bed, options: &str, size_bytes: u64, seed: u64) -> Header {
    let mut rng = Rng::with_seed(seed);
    bed.create("disk.qcow2", options, size_bytes);
    bed.io("disk.qcow2", &random_writes(&mut rng, size_bytes, 512, 40));
    bed.assert_same("disk.qcow2", &mut rng);
    Header::read(&std::fs::File::open(bed.path("disk.qcow2")).unwrap()).unwrap()
}

#[test]
fn cluster_sizes() {
    let Some(bed) = bed() else { return };
    for (bits, size_bytes) in [(9, 3 << 20), (10, 3 << 20), (12, 9 << 20), (16, 12 << 20), (21, 24 << 20)] {
        let header = written(&bed, &format!("cluster_size={}", 1 << bits), size_bytes + 512, bits);
        assert_eq!((header.geometry.cluster_bits(), header.size_bytes), (bits as u32, size_bytes + 512));
    }
}

#[test]
fn version_2() {
    let Some(bed) = bed() else { return };
    let header = written(&bed, "compat=0.10,cluster_size=4k", 5 << 20, 2);
    assert_eq!((header.geometry.version(), header.geometry.refcount_bits()), (2, 16));
}

#[test]
fn widths_of_reference_counts() {
    let Some(bed) = bed() else { return };
    for bits in [1, 2, 4, 8, 16, 32, 64] {
        let header = written(&bed, &format!("refcount_bits={bits},cluster_size=4k"), 2 << 20, bits);
        assert_eq!(u64::from(header.geometry.refcount_bits()), bits);
    }
}

#[test]
fn subclusters() {
    let Some(bed) = bed() else { return };
    for (cluster, size_bytes) in [("16k", 9 << 20), ("64k", 9 << 20), ("2M", 24 << 20)] {
        let header = written(&bed, &format!("extended_l2=on,cluster_size={cluster}"), size_bytes, 3);
        assert!(header.incompatible.extended_l2 && header.geometry.subclusters() == 32);
    }
}

#[test]
fn preallocated_metadata_and_lazy_reference_counts() {
    let Some(bed) = bed() else { return };
    written(&bed, "preallocation=metadata,cluster_size=16k", 9 << 20, 4);
    written(&bed, "preallocation=metadata,extended_l2=on,cluster_size=16k", 9 << 20, 5);
    written(&bed, "preallocation=full,cluster_size=16k", 2 << 20, 6);
    let header = written(&bed, "lazy_refcounts=on", 9 << 20, 7);
    assert!(header.compatible.lazy_refcounts);
}

#[test]
fn external_data_files() {
    let Some(bed) = bed() else { return };
    for (options, raw) in [
        ("", false),
        (",data_file_raw=on", true),
        (",extended_l2=on", false),
        (",preallocation=metadata", false),
    ] {
        let header = written(&bed, &format!("data_file=data.raw{options}"), 9 << 20, 8);
        assert_eq!(header.extensions.data_file.as_deref(), Some(&b"data.raw"[..]));
        assert!(header.incompatible.external_data_file);
        assert_eq!(header.autoclear.raw_external_data, raw);
        std::fs::remove_file(bed.path("disk.qcow2")).unwrap();
    }
}

#[test]
fn compressed_clusters() {
    let Some(bed) = bed() else { return };
    let types = ["zlib", "zstd"];
    for (compression, cluster_bits) in
        types.into_iter().flat_map(|name| [9, 12, 16, 21].map(|bits| (name, bits)))
    {
        let (cluster_bytes, mut rng) = (1 << cluster_bits, Rng::with_seed(cluster_bits));
        let size_bytes = cluster_bytes * 24;
        let options = format!("compression_type={compression},cluster_size={cluster_bytes}");
        bed.create("disk.qcow2", &options, size_bytes);
        bed.io("disk.qcow2", &compressed_writes(&mut rng, size_bytes, cluster_bytes, 12));
        bed.io("disk.qcow2", &random_writes(&mut rng, size_bytes, 512, 6));
        bed.assert_same("disk.qcow2", &mut rng);
    }
}

/// Data that do not repeat, so that the compressed clusters are long and follow each other in a sector.
#[test]
fn converted_images_with_compression() {
    let Some(bed) = bed() else { return };
    let mut rng = Rng::with_seed(9);
    let words: Vec<u8> =
        (0..3 << 20).map(|index| if index % 5 == 0 { rng.u8(..) } else { rng.u8(..16) }).collect();
    std::fs::write(bed.path("words.raw"), &words).unwrap();
    for options in ["compression_type=zlib", "compression_type=zstd", "compression_type=zlib,extended_l2=on"]
    {
        let line = ["convert", "-c", "-O", "qcow2", "-f", "raw", "-o", options, "words.raw", "words.qcow2"];
        bed.img_ok(&line);
        bed.assert_same("words.qcow2", &mut rng);
        let mut image = Image::open(std::fs::File::open(bed.path("words.qcow2")).unwrap()).unwrap();
        assert!(matches!(image.next_run(0, 1 << 20).unwrap().kind, RunKind::Compressed(_)));
    }
}

/// `qemu-img map` says for each range whether it has data, reads as zeroes, and where it is.
#[test]
fn runs_are_those_of_qemu_img_map() {
    let Some(bed) = bed() else { return };
    for (seed, options) in
        ["cluster_size=4k", "extended_l2=on,cluster_size=16k", "cluster_size=2M"].iter().enumerate()
    {
        let size_bytes = 30 << 20;
        bed.create("disk.qcow2", options, size_bytes);
        let mut rng = Rng::with_seed(seed as u64);
        bed.io("disk.qcow2", &random_writes(&mut rng, size_bytes, 512, 60));
        let map = bed.img_ok(&["map", "--output=json", "disk.qcow2"]);
        let map: Vec<serde_json::Value> = serde_json::from_str(&map).unwrap();
        let mut image = Image::open(std::fs::File::open(bed.path("disk.qcow2")).unwrap()).unwrap();
        let mut at = 0;
        for range in &map {
            let end = range["start"].as_u64().unwrap() + range["length"].as_u64().unwrap();
            let offset = range["offset"].as_u64().filter(|_| range["data"] == true);
            while at < end {
                let run = image.next_run(at, end - at).unwrap();
                let moved = at - range["start"].as_u64().unwrap();
                match run.kind {
                    RunKind::Data { host_offset } => assert_eq!(Some(host_offset - moved), offset, "{range}"),
                    _ => assert_eq!(range["data"], false, "{run:?} in {range}"),
                }
                at += run.len_bytes;
            }
        }
        assert_eq!(at, size_bytes);
    }
}
