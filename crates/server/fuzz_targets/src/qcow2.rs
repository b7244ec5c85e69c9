//! What a qcow2 image may contain: header and tables, or the data of a compressed cluster.
//!
//! ```text
//! first byte: 0, 1 mod 4 → an image; then its length in sectors (2 bytes), then parts of it: sector (2 bytes), length
//!             (1 byte), bytes. What no part covers is zeroes.
//!             2 → deflate, 3 → Zstandard; then the cluster size (1 byte), the data
//! ```
//!
//! The same image is its own backing file, and its own data file.

use std::io;
use std::path::Path;

use ::qcow2::check::check;
use ::qcow2::{Chain, Compression, Decompressor, DiskFormat, FileId, Image, Opened, Opener, Role, RunKind};

const SECTOR_BYTES: usize = 512;
const MOST_SECTORS: usize = 512;
/// Runs that are asked for; a hostile size may have more.
const MOST_RUNS: usize = 256;
const READ_BYTES: usize = 64 << 10;

pub fn run(bytes: &[u8]) {
    match bytes {
        [choice, rest @ ..] if choice & 2 == 0 => image(&file(rest)),
        [choice, cluster, data @ ..] => {
            let compression = if choice & 1 == 0 { Compression::Zlib } else { Compression::Zstd };
            let mut output = vec![0; SECTOR_BYTES << (cluster % 8)];
            if let Err(error) = Decompressor::new(compression).decompress(data, &mut output) {
                assert!(error.to_string().len() < 1000, "{error}");
            }
        }
        _ => {}
    }
}

fn file(bytes: &[u8]) -> Vec<u8> {
    let Some((length, mut parts)) = bytes.split_first_chunk() else { return Vec::new() };
    let mut file = vec![0; usize::from(u16::from_be_bytes(*length)) % (MOST_SECTORS + 1) * SECTOR_BYTES];
    while let Some(([high, low, len], rest)) = parts.split_first_chunk() {
        let (part, next) = rest.split_at(usize::from(*len).min(rest.len()));
        let start = usize::from(u16::from_be_bytes([*high, *low])) * SECTOR_BYTES;
        let place = file.get_mut(start..).unwrap_or_default();
        place.iter_mut().zip(part).for_each(|(byte, new)| *byte = *new);
        parts = next;
    }
    file
}

fn image(file: &[u8]) {
    let Ok(mut image) = Image::open(file) else { return };
    let mut found = 0;
    let report = check(&image, &mut |finding| {
        found += 1;
        assert!(finding.to_string().len() < 1000, "{finding}");
    });
    let report = report.expect("memory can be read");
    assert_eq!(report.corruptions + report.leaks + report.check_errors, found);
    image.snapshots().for_each(|snapshot| drop(snapshot.map_err(|error| error.to_string())));
    let (size, geometry) = (image.header().size_bytes, image.header().geometry);
    let mut at = 0;
    for _ in 0..MOST_RUNS {
        if at >= size {
            break;
        }
        let Ok(run) = image.next_run(at, size - at) else { break };
        assert!((1..=size - at).contains(&run.len_bytes), "{run:?} at {at} of {size}");
        match run.kind {
            RunKind::Data { host_offset } => {
                assert_eq!(geometry.in_cluster(host_offset), geometry.in_cluster(at));
                assert!(host_offset < 1 << 56);
            }
            RunKind::Compressed(cluster) => {
                assert!(run.len_bytes <= geometry.cluster_bytes() - geometry.in_cluster(at));
                assert!(cluster.len_bytes() <= 2 * geometry.cluster_bytes() + 512);
            }
            RunKind::Zero | RunKind::Unallocated => {}
        }
        at += run.len_bytes;
    }
    chain(file);
}

/// The same bytes under all names, each time as another file.
struct Same<'a> {
    bytes: &'a [u8],
    opened: u64,
}

impl<'a> Opener for Same<'a> {
    type File = &'a [u8];

    fn open(&mut self, path: &Path, _role: Role) -> io::Result<Opened<&'a [u8]>> {
        assert!(path.starts_with("folder") || path.is_absolute(), "{}", path.display());
        self.opened += 1;
        Ok(Opened { file: self.bytes, id: FileId { device: 1, inode: self.opened } })
    }
}

/// Bytes that are read at once equal those that are read in pieces.
fn chain(file: &[u8]) {
    let opened = Chain::open("folder/top".as_ref(), DiskFormat::Qcow2, &mut Same { bytes: file, opened: 0 });
    let Ok(mut chain) = opened else { return };
    let size = chain.size_bytes();
    for start in [0, size / 2, size.saturating_sub(READ_BYTES as u64)] {
        let len = usize::try_from(size - start).unwrap_or(usize::MAX).min(READ_BYTES);
        let (mut whole, mut pieces) = (vec![1; len], vec![2; len]);
        if chain.read_at(start, &mut whole).is_err() {
            continue;
        }
        let mut at = start;
        for piece in pieces.chunks_mut(1000) {
            chain.read_at(at, piece).expect("what could be read before");
            at += piece.len() as u64;
        }
        assert!(whole == pieces, "{len} bytes at {start}");
    }
}

/// A part of a file.
fn part(sector: u16, bytes: &[u8]) -> Vec<u8> {
    [&sector.to_be_bytes()[..], &[u8::try_from(bytes.len()).expect("at most 255 bytes")], bytes].concat()
}

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_be_bytes()).collect()
}

/// Two halves of a word.
fn halves(high: u32, low: u32) -> u64 {
    (u64::from(high) << 32) | u64::from(low)
}

/// What differs between the seeds.
struct Kind {
    version: u32,
    cluster_bits: u32,
    incompatible: u64,
    /// After the fixed fields of version 3.
    extensions: Vec<u8>,
    backing: &'static [u8],
    l2: fn(u64) -> Vec<u64>,
    compressed: &'static [u8],
}

/// Where the backing file's name is.
const NAME_OFFSET: usize = 200;

/// Clusters: 0 header, 1 refcount table, 2 refcount block, 3 L1 table, 4 L2 table, 5 and 6 data, 7 compressed data.
fn seed(name: &str, kind: &Kind) -> (String, Vec<u8>) {
    let (cluster, sectors) = (1_u64 << kind.cluster_bits, 1_u16 << (kind.cluster_bits - 9));
    let name_offset = if kind.backing.is_empty() { 0 } else { NAME_OFFSET as u64 };
    let name_len = u32::try_from(kind.backing.len()).unwrap();
    let mut header = words(&[
        halves(0x5146_49fb, kind.version),
        name_offset,
        halves(name_len, kind.cluster_bits),
        16 * cluster,
        halves(0, 1),
        3 * cluster,
        cluster,
        halves(1, 0),
        0,
    ]);
    if kind.version == 3 {
        header.extend(words(&[kind.incompatible, 0, 0, halves(4, 112)]));
        header.extend(&kind.extensions);
    }
    if !kind.backing.is_empty() {
        header.resize(NAME_OFFSET, 0);
        header.extend(kind.backing);
    }
    let (copied, counts) = (1 << 63, 0x0001_0001_0001_0001);
    let parts = [
        part(0, &header),
        part(sectors, &words(&[2 * cluster])),
        part(2 * sectors, &words(&[counts, counts])),
        part(3 * sectors, &words(&[(4 * cluster) | copied])),
        part(4 * sectors, &words(&(kind.l2)(cluster))),
        part(5 * sectors, &[5; 100]),
        part(7 * sectors, kind.compressed),
    ];
    (name.to_owned(), [vec![0], (8 * sectors).to_be_bytes().to_vec(), parts.concat()].concat())
}

/// Data, data, nothing, zeroes.
fn standard(cluster: u64) -> Vec<u64> {
    vec![(5 * cluster) | (1 << 63), (6 * cluster) | (1 << 63), 0, 1]
}

/// Data and a compressed cluster.
fn with_compressed(cluster: u64) -> Vec<u64> {
    vec![(5 * cluster) | (1 << 63), (1 << 62) | (7 * cluster)]
}

/// Half data and half zeroes; nothing; zeroes.
fn subclusters(cluster: u64) -> Vec<u64> {
    vec![(5 * cluster) | (1 << 63), 0xffff_0000_0000_ffff, 0, 0, 0, u64::MAX << 32]
}

/// At the guest's offsets.
fn outside(cluster: u64) -> Vec<u64> {
    vec![1 << 63, cluster | (1 << 63), 0, (3 * cluster) | (1 << 63)]
}

/// 512 bytes of 7.
const DEFLATED: &[u8] = &[0x63, 0x67, 0x1f, 0x05, 0x23, 0x19, 0x00, 0x00];
/// A frame of one block that repeats a byte 512 times.
const FRAMED: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd, 0x60, 0x00, 0x01, 0x03, 0x10, 0x00, 0x07];

fn extension(kind: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = [words(&[halves(kind, u32::try_from(data.len()).unwrap())]), data.to_vec()].concat();
    bytes.resize(bytes.len().next_multiple_of(8), 0);
    bytes
}

pub fn seeds() -> Vec<(String, Vec<u8>)> {
    let usual = |l2| Kind {
        version: 3,
        cluster_bits: 9,
        incompatible: 0,
        extensions: vec![0; 8],
        backing: b"",
        l2,
        compressed: b"",
    };
    let with = |extension: Vec<u8>| [vec![0; 8], extension].concat();
    let format = with(extension(0xe279_2aca, b"qcow2"));
    let data_file = with(extension(0x4441_5441, b"data"));
    let zstd = [vec![1], vec![0; 7]].concat();
    let images = [
        seed("standard", &usual(standard)),
        seed(
            "version-2",
            &Kind { version: 2, l2: |cluster| standard(cluster)[..3].to_vec(), ..usual(standard) },
        ),
        seed("backing", &Kind { extensions: format, backing: b"../base", ..usual(standard) }),
        seed("extended-l2", &Kind { incompatible: 16, cluster_bits: 14, ..usual(subclusters) }),
        seed("data-file", &Kind { incompatible: 4, extensions: data_file, ..usual(outside) }),
        seed("zlib", &Kind { compressed: DEFLATED, ..usual(with_compressed) }),
        seed(
            "zstd",
            &Kind { incompatible: 8, extensions: zstd, compressed: FRAMED, ..usual(with_compressed) },
        ),
    ];
    let data = |name: &str, choice: u8, bytes: &[u8]| (name.to_owned(), [&[choice, 0], bytes].concat());
    images.into_iter().chain([data("deflate", 2, DEFLATED), data("frame", 3, FRAMED)]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A seed that is refused at once would reach little.
    #[test]
    fn seeds_are_sound_images_that_can_be_read() {
        for (name, bytes) in seeds().into_iter().filter(|(_, bytes)| bytes[0] == 0) {
            let file = file(&bytes[1..]);
            let image = Image::open(&file[..]).unwrap_or_else(|error| panic!("{name}: {error}"));
            // Clusters that a seed does not use are leaks.
            let report = check(&image, &mut |_| {}).unwrap();
            assert_eq!(report.corruptions, 0, "{name}");
            let mut same = Same { bytes: &file, opened: 0 };
            let mut chain = match Chain::open("folder/top".as_ref(), DiskFormat::Qcow2, &mut same) {
                Err(error) if name == "backing" => {
                    assert!(error.to_string().contains("would be layer 17"), "{error}");
                    continue;
                }
                opened => opened.unwrap_or_else(|error| panic!("{name}: {error}")),
            };
            let mut cluster = vec![0; 2 << image.header().geometry.cluster_bits()];
            chain.read_at(0, &mut cluster).unwrap_or_else(|error| panic!("{name}: {error:?}"));
            let is_compressed = ["zlib", "zstd"].contains(&name.as_str());
            assert_eq!(cluster.ends_with(&[7; 512]), is_compressed, "{name}");
        }
    }
}
