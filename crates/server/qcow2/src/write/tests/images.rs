//! Images made by hand, with entries of all kinds and an internal snapshot.

use std::io::Write;

use flate2::Compression as Level;
use flate2::write::DeflateEncoder;

use crate::geometry::Geometry;
use crate::header::Header;
use crate::tables::RawL2Entry;
use crate::tables::refcounts::store_refcount;
use crate::tests::headers::Fields;
use crate::write::tests::disk::SECTOR;

const COPIED: u64 = 1 << 63;
/// A guest's sector has the number of its content in each word; 0 is zeroes.
const BELOW: u64 = 1 << 40;

/// What kind of image.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    pub version: u32,
    pub refcount_order: u32,
    pub extended: bool,
    /// Not with counts of one bit.
    pub snapshot: bool,
    pub backing: bool,
    pub autoclear: u64,
}

impl Kind {
    pub const PLAIN: Self =
        Self { version: 3, refcount_order: 4, extended: false, snapshot: true, backing: true, autoclear: 0 };

    pub const fn cluster_bits(self) -> u32 {
        if self.extended { 14 } else { 12 }
    }
}

/// The bytes of a sector.
pub fn sector(number: u64) -> Vec<u8> {
    number.to_be_bytes().repeat(SECTOR as usize / 8)
}

/// The number of a sector's content in the backing file.
pub const fn below(kind: Kind, guest_sector: u64) -> u64 {
    if kind.backing { BELOW + guest_sector } else { 0 }
}

/// An image, and what its guest and its snapshot read.
pub struct Made {
    pub kind: Kind,
    pub bytes: Vec<u8>,
    pub header: Header,
    /// The guest's clusters that tests use.
    pub cells: Vec<u64>,
    /// For each cell, the numbers of its sectors, in the active table and in the snapshot.
    pub active: Vec<Vec<u64>>,
    pub snapshot: Option<Vec<Vec<u64>>>,
    pub snapshot_l1: Vec<u64>,
}

/// What a cell is at first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cell {
    Nothing,
    Data,
    /// Also the snapshot's.
    Shared,
    Zero,
    /// Zeroes with a host cluster that has other data.
    ZeroKept,
    Compressed,
    /// Some subclusters with data, some zeroes, some nothing.
    Mixed,
}

struct Maker {
    kind: Kind,
    geometry: Geometry,
    bytes: Vec<u8>,
    counts: Vec<u64>,
    number: u64,
    /// The end of the last compressed data.
    compressed_end: u64,
}

impl Maker {
    fn cluster_bytes(&self) -> u64 {
        self.geometry.cluster_bytes()
    }

    fn allocate(&mut self) -> u64 {
        let offset = self.bytes.len() as u64;
        self.bytes.resize(self.bytes.len() + self.cluster_bytes() as usize, 0);
        self.counts.push(1);
        offset
    }

    fn put(&mut self, offset: u64, data: &[u8]) {
        self.bytes[offset as usize..][..data.len()].copy_from_slice(data);
    }

    fn sectors(&self) -> u64 {
        self.cluster_bytes() / SECTOR
    }

    fn data(&mut self) -> (u64, u64) {
        self.number += 1;
        let (offset, number, count) = (self.allocate(), self.number, self.sectors() as usize);
        self.put(offset, &sector(number).repeat(count));
        (offset, number)
    }

    /// The entry of a guest's cluster, and the numbers of its sectors.
    fn cell(&mut self, cell: Cell, guest_cluster: u64) -> (RawL2Entry, Vec<u64>) {
        let geometry = self.geometry;
        let first = guest_cluster * self.sectors();
        let below: Vec<u64> = (first..first + self.sectors()).map(|at| below(self.kind, at)).collect();
        let numbers = |number: u64| vec![number; below.len()];
        match cell {
            Cell::Nothing => (RawL2Entry::default(), below),
            Cell::Data => {
                let (offset, number) = self.data();
                (RawL2Entry::data(offset, &geometry), numbers(number))
            }
            Cell::Shared => {
                let (offset, number) = self.data();
                let entry = RawL2Entry::data(offset, &geometry);
                (RawL2Entry { cluster: entry.cluster & !COPIED, ..entry }, numbers(number))
            }
            Cell::Zero => (RawL2Entry::zeroes(None, &geometry), numbers(0)),
            Cell::ZeroKept => {
                let (offset, _) = self.data();
                (RawL2Entry::zeroes(Some(offset), &geometry), numbers(0))
            }
            Cell::Compressed => self.compressed(),
            Cell::Mixed => {
                let (offset, number) = self.data();
                // The first eight have data, the second eight are zeroes.
                let subclusters = 0x0000_ff00_0000_00ff;
                let unit = below.len() / 32;
                let of = |(at, below): (usize, u64)| match at / unit {
                    0..8 => number,
                    8..16 => 0,
                    _ => below,
                };
                let numbers = below.into_iter().enumerate().map(of).collect();
                (RawL2Entry { cluster: offset | COPIED, subclusters }, numbers)
            }
        }
    }

    /// Compressed clusters follow each other, so that two share a host cluster.
    fn compressed(&mut self) -> (RawL2Entry, Vec<u64>) {
        self.number += 1;
        let (number, count) = (self.number, self.sectors() as usize);
        let mut encoder = DeflateEncoder::new(Vec::new(), Level::default());
        encoder.write_all(&sector(number).repeat(count)).unwrap();
        let data = encoder.finish().unwrap();
        let cluster_bytes = self.cluster_bytes();
        let is_first = self.compressed_end.is_multiple_of(cluster_bytes)
            || self.compressed_end % cluster_bytes + data.len() as u64 > cluster_bytes;
        let offset = if is_first { self.allocate() } else { self.compressed_end };
        if !is_first {
            self.counts[(offset / cluster_bytes) as usize] += 1;
        }
        self.put(offset, &data);
        self.compressed_end = offset + data.len() as u64;
        let sectors = (self.compressed_end - 1) / SECTOR - offset / SECTOR;
        let shift = 62 - (self.geometry.cluster_bits() - 8);
        let entry = RawL2Entry { cluster: 1 << 62 | sectors << shift | offset, subclusters: 0 };
        (entry, vec![number; count])
    }
}

/// Makes an image. Its L2 tables: the first is the active table's own, the second is the snapshot's, too, the third is
/// missing.
pub fn make(kind: Kind) -> Made {
    let bits = kind.cluster_bits();
    let cluster_bytes = 1_u64 << bits;
    let entries = cluster_bytes / if kind.extended { 16 } else { 8 };
    let size = 3 * entries * cluster_bytes - cluster_bytes / 2;
    let fields = fields(kind, size);
    let header = Header::parse(&fields.bytes()[..cluster_bytes as usize]).unwrap();
    let mut maker = Maker {
        kind,
        geometry: header.geometry,
        bytes: fields.bytes()[..cluster_bytes as usize].to_vec(),
        counts: vec![1],
        number: 0,
        compressed_end: 0,
    };
    // In this order: `fields` names these places.
    let [refcount_table, block, l1, snapshot_l1, snapshot_table] = [(); 5].map(|()| maker.allocate());
    let tables = if kind.snapshot { 3 } else { 2 };
    let l2: Vec<u64> = (0..tables).map(|_| maker.allocate()).collect();
    let mut made = Made {
        kind,
        bytes: Vec::new(),
        header,
        cells: Vec::new(),
        active: Vec::new(),
        snapshot: kind.snapshot.then(Vec::new),
        snapshot_l1: Vec::new(),
    };
    fill_first_table(&mut maker, &mut made, &l2, entries);
    fill_second_table(&mut maker, &mut made, l2[1], entries);
    for guest_cluster in [2 * entries, 2 * entries + 1, 3 * entries - 1] {
        let numbers = maker.cell(Cell::Nothing, guest_cluster).1;
        made.cells.push(guest_cluster);
        made.active.push(numbers.clone());
        made.snapshot.iter_mut().for_each(|snapshot| snapshot.push(numbers.clone()));
    }
    let copied = if kind.snapshot { 0 } else { COPIED };
    let active_l1 = [l2[0] | COPIED, l2[1] | copied, 0];
    active_l1.iter().zip(0..).for_each(|(entry, at)| maker.put(l1 + at * 8, &entry.to_be_bytes()));
    if kind.snapshot {
        made.snapshot_l1 = vec![l2[2], l2[1], 0];
        for (entry, at) in made.snapshot_l1.iter().zip(0..) {
            maker.put(snapshot_l1 + at * 8, &entry.to_be_bytes());
        }
        maker.counts[(l2[1] / cluster_bytes) as usize] = 2;
        maker.put(snapshot_table, &snapshot_entry(snapshot_l1, size));
    } else {
        let unused = [snapshot_l1, snapshot_table];
        unused.iter().for_each(|offset| maker.counts[(offset / cluster_bytes) as usize] = 0);
    }
    finish(&mut maker, refcount_table, block);
    made.bytes = maker.bytes;
    made
}

fn fill_first_table(maker: &mut Maker, made: &mut Made, l2: &[u64], entries: u64) {
    let cluster_bytes = maker.cluster_bytes();
    for (guest_cluster, cell) in first_table(&made.kind, entries) {
        let (entry, numbers) = maker.cell(cell, guest_cluster);
        put_entry(maker, l2[0], guest_cluster, entry);
        let below = maker.cell(Cell::Nothing, guest_cluster).1;
        if let Some(snapshot) = &mut made.snapshot {
            // The snapshot has a table of its own for these.
            if cell == Cell::Shared {
                put_entry(maker, l2[2], guest_cluster, entry);
                maker.counts[((entry.cluster & !COPIED) / cluster_bytes) as usize] += 1;
            }
            snapshot.push(if cell == Cell::Shared { numbers.clone() } else { below });
        }
        made.cells.push(guest_cluster);
        made.active.push(numbers);
    }
}

fn fill_second_table(maker: &mut Maker, made: &mut Made, table: u64, entries: u64) {
    for (index, cell) in second_table(&made.kind).into_iter().enumerate() {
        let guest_cluster = entries + index as u64;
        let (entry, numbers) = maker.cell(cell, guest_cluster);
        put_entry(maker, table, index as u64, entry);
        if let Some(snapshot) = &mut made.snapshot {
            share(maker, entry);
            snapshot.push(numbers.clone());
        }
        made.cells.push(guest_cluster);
        made.active.push(numbers);
    }
}

/// Stores the counts, and cuts the file off inside its last cluster.
fn finish(maker: &mut Maker, refcount_table: u64, block: u64) {
    maker.put(refcount_table, &block.to_be_bytes());
    let (geometry, counts) = (maker.geometry, std::mem::take(&mut maker.counts));
    let stored = &mut maker.bytes[block as usize..][..geometry.cluster_bytes() as usize];
    for (index, count) in counts.iter().enumerate() {
        store_refcount(stored, index, &geometry, *count);
    }
    // A free cluster with old data, and a last one that is shorter.
    maker.bytes.extend(vec![0x5a; geometry.cluster_bytes() as usize]);
    maker.bytes.extend([0x5a; 1024]);
}

fn fields(kind: Kind, size: u64) -> Fields {
    let at = |cluster: u64| cluster << kind.cluster_bits();
    let name = b"below.raw";
    let mut after = if kind.version == 3 { vec![0; 8] } else { Vec::new() };
    let mut backing = (0, 0);
    if kind.backing {
        after.extend([0xe279_2aca_u32.to_be_bytes(), 3_u32.to_be_bytes()].concat());
        after.extend(b"raw\0\0\0\0\0");
        after.extend([0; 8]);
        let fixed = if kind.version == 3 { 104 } else { 72 };
        backing = (fixed + after.len() as u64, name.len() as u32);
        after.extend(name);
    }
    Fields {
        version: kind.version,
        backing,
        cluster_bits: kind.cluster_bits(),
        size,
        l1: (at(3), 3),
        refcounts: (at(1), 1),
        snapshots: if kind.snapshot { (at(5), 1) } else { (0, 0) },
        incompatible: if kind.extended { 16 } else { 0 },
        autoclear: kind.autoclear,
        refcount_order: kind.refcount_order,
        header_length: if kind.version == 3 { 112 } else { 72 },
        after,
        ..Fields::default()
    }
}

fn first_table(kind: &Kind, entries: u64) -> Vec<(u64, Cell)> {
    let shared = if kind.snapshot { Cell::Shared } else { Cell::Data };
    let (zero, kept) =
        if kind.version == 3 { (Cell::Zero, Cell::ZeroKept) } else { (Cell::Nothing, Cell::Data) };
    let mixed = if kind.extended { Cell::Mixed } else { Cell::Data };
    // Two compressed clusters of one host cluster need counts of more than one bit.
    let compressed = if kind.refcount_order == 0 { Cell::Nothing } else { Cell::Compressed };
    let cells = [Cell::Nothing, Cell::Data, shared, zero, kept, compressed, compressed, mixed];
    let cells = (0..).zip(cells).chain([(entries - 1, Cell::Data)]);
    cells.collect()
}

/// Shared as a whole if there is a snapshot.
fn second_table(kind: &Kind) -> Vec<Cell> {
    let data = if kind.snapshot { Cell::Shared } else { Cell::Data };
    let zero = if kind.version == 3 { Cell::Zero } else { Cell::Nothing };
    // Its host cluster has up to four references.
    let compressed = if kind.refcount_order < 2 { Cell::Nothing } else { Cell::Compressed };
    vec![data, data, zero, compressed]
}

/// Adds the snapshot's reference to what a shared table's entry names.
fn share(maker: &mut Maker, entry: RawL2Entry) {
    let cluster_bytes = maker.cluster_bytes();
    let offset = if entry.cluster & (1 << 62) != 0 {
        entry.cluster & ((1 << (62 - (maker.geometry.cluster_bits() - 8))) - 1)
    } else {
        entry.cluster & !1 & !COPIED
    };
    if offset != 0 {
        maker.counts[(offset / cluster_bytes) as usize] += 1;
    }
}

fn put_entry(maker: &mut Maker, table: u64, index: u64, entry: RawL2Entry) {
    let geometry = maker.geometry;
    let at = table + index * geometry.l2_entry_bytes();
    entry.store(&mut maker.bytes, at as usize, &geometry);
}

fn snapshot_entry(l1: u64, size: u64) -> Vec<u8> {
    let mut entry = Vec::new();
    entry.extend(l1.to_be_bytes());
    entry.extend(3_u32.to_be_bytes());
    entry.extend([0, 1, 0, 3]);
    entry.extend([0; 20]);
    entry.extend(16_u32.to_be_bytes());
    entry.extend([0; 8]);
    entry.extend(size.to_be_bytes());
    entry.extend(b"1one");
    entry
}
