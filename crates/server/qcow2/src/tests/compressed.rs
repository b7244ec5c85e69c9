//! Compressed clusters that are not as they should be.

use std::io::Write;

use crate::{Compression, DecompressError, Decompressor};
use flate2::Compression as Level;
use flate2::write::DeflateEncoder;

fn deflated(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = DeflateEncoder::new(Vec::new(), Level::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn framed(bytes: &[u8]) -> Vec<u8> {
    ruzstd::encoding::compress_to_vec(bytes, ruzstd::encoding::CompressionLevel::Fastest)
}

fn text(len: usize) -> Vec<u8> {
    (0..len).map(|index| (index / 7 * 13) as u8).collect()
}

/// One of each type, with compressed data of so many bytes.
fn both(len: usize) -> [(Decompressor, Vec<u8>); 2] {
    let (zlib, zstd) = (deflated(&text(len)), framed(&text(len)));
    [(Decompressor::new(Compression::Zlib), zlib), (Decompressor::new(Compression::Zstd), zstd)]
}

#[test]
fn data_of_one_cluster_are_read_whatever_follows_them() {
    for (mut decompressor, mut data) in both(65_536) {
        data.extend([0xff; 511]);
        for _ in 0..2 {
            let mut cluster = vec![0; 65_536];
            decompressor.decompress(&data, &mut cluster).unwrap();
            assert_eq!(cluster, text(65_536));
        }
    }
}

#[test]
fn data_of_less_than_a_cluster_are_refused() {
    for (mut decompressor, data) in both(65_535) {
        let error = decompressor.decompress(&data, &mut vec![0; 65_536]).unwrap_err();
        let expected = "its data end after 65535 of 65536 bytes";
        assert_eq!(error.to_string(), expected);
    }
}

#[test]
fn data_of_more_than_a_cluster_are_refused() {
    for len in [65_537, 65_536 + 4096, 40 << 20] {
        for (mut decompressor, data) in both(len) {
            let error = decompressor.decompress(&data, &mut vec![0; 65_536]).unwrap_err();
            assert!(matches!(error, DecompressError::TooLong { want_bytes: 65_536 }), "{len}: {error:?}");
        }
    }
}

#[test]
fn data_that_end_early_are_refused() {
    for (mut decompressor, data) in both(65_536) {
        for len in 0..data.len() {
            assert!(
                decompressor.decompress(&data[..len], &mut vec![0; 65_536]).is_err(),
                "{len} of {}",
                data.len()
            );
        }
        // The next cluster is not affected.
        decompressor.decompress(&data, &mut vec![0; 65_536]).unwrap();
    }
}

#[test]
fn frame_whose_window_is_too_large_is_refused_before_it_costs_memory() {
    // A frame header that asks for 64 MiB, then an empty last block.
    let data = [0x28, 0xb5, 0x2f, 0xfd, 0x00, 16 << 3, 0x01, 0, 0];
    let error = Decompressor::new(Compression::Zstd).decompress(&data, &mut vec![0; 512]).unwrap_err();
    assert!(format!("{error:?}").contains("WindowSizeTooBig"), "{error:?}");
}
