//! Damaged images, by what is wrong with them.

use crate::geometry::Geometry;
use crate::tables::refcounts::{refcount_at, store_refcount};
use crate::write::tests::disk::Content;
use crate::write::tests::images::{Kind, make};

pub const COPIED: u64 = 1 << 63;
/// Clusters of the images that `make` makes.
pub const TABLE: u64 = 1;
pub const BLOCK: u64 = 2;
pub const L1: u64 = 3;
pub const SNAPSHOT_TABLE: u64 = 5;
/// The active table's own L2 table, and one that the snapshot has, too.
pub const L2: u64 = 6;
pub const SHARED_L2: u64 = 7;
/// Entries of the first L2 table.
pub const DATA: u64 = 1;
pub const SHARED: u64 = 2;
pub const ZERO: u64 = 3;

/// An image to be damaged.
pub struct Damaged {
    pub bytes: Vec<u8>,
    pub geometry: Geometry,
}

impl Damaged {
    pub fn new(kind: Kind) -> Self {
        let made = make(kind);
        Self { bytes: made.bytes, geometry: made.header.geometry }
    }

    pub fn content(&self) -> Content {
        Content::of(&self.bytes)
    }

    pub fn at(&self, cluster: u64) -> u64 {
        cluster << self.geometry.cluster_bits()
    }

    pub fn word(&self, cluster: u64, index: u64) -> u64 {
        let at = (self.at(cluster) + index * 8) as usize;
        u64::from_be_bytes(self.bytes[at..at + 8].try_into().unwrap())
    }

    pub fn put(&mut self, cluster: u64, index: u64, word: u64) {
        let at = (self.at(cluster) + index * 8) as usize;
        self.bytes[at..at + 8].copy_from_slice(&word.to_be_bytes());
    }

    /// The index of the word of an L2 entry.
    pub fn entry(&self, index: u64) -> u64 {
        index * self.geometry.l2_entry_bytes() / 8
    }

    /// The host cluster of an entry of the first L2 table.
    pub fn host(&self, entry: u64) -> u64 {
        (self.word(L2, self.entry(entry)) & !COPIED & !1) >> self.geometry.cluster_bits()
    }

    pub fn count(&self, cluster: u64) -> u64 {
        refcount_at(&self.bytes[self.at(BLOCK) as usize..], cluster as usize, &self.geometry).unwrap()
    }

    pub fn set_count(&mut self, cluster: u64, count: u64) {
        let start = self.at(BLOCK) as usize;
        store_refcount(&mut self.bytes[start..], cluster as usize, &self.geometry, count);
    }

    /// Clusters of the file, of which the last is shorter.
    pub fn clusters(&self) -> u64 {
        (self.bytes.len() as u64).div_ceil(self.geometry.cluster_bytes())
    }
}

/// Changes an image.
pub type Damage = fn(&mut Damaged);

/// What a repair of leaks repairs.
pub const LEAKS: [(&str, Damage); 3] = [
    ("a free cluster has a count", |image| image.set_count(image.clusters() - 2, 1)),
    ("a count is too high by 1", |image| image.set_count(image.host(DATA), 2)),
    ("a count falls to 1, and the copied bit is clear", |image| {
        let (host, at) = (image.host(DATA), image.entry(DATA));
        image.set_count(host, 2);
        image.put(L2, at, image.word(L2, at) & !COPIED);
    }),
];

/// What a repair of everything repairs without a new refcount table.
pub const COUNTS: [(&str, Damage); 6] = [
    ("counts are 0", |image| (0..9).for_each(|cluster| image.set_count(cluster, 0))),
    ("a count is too low", |image| image.set_count(image.host(SHARED), 1)),
    ("an L1 entry is not copied", |image| image.put(L1, 0, image.word(L1, 0) & !COPIED)),
    ("an L1 entry of a shared table is copied", |image| image.put(L1, 1, image.word(L1, 1) | COPIED)),
    ("data that a snapshot has are copied", |image| {
        let at = image.entry(SHARED);
        image.put(L2, at, image.word(L2, at) | COPIED);
    }),
    ("an entry without data is inside of a cluster", |image| {
        let at = image.entry(ZERO);
        let is_extended = image.geometry.has_extended_l2();
        image.put(L2, at, (image.at(9) + 512) | u64::from(!is_extended));
    }),
];

/// What a new refcount table repairs.
pub const STRUCTURES: [(&str, Damage); 7] = [
    ("no block", |image| image.put(TABLE, 0, 0)),
    ("a block inside of a cluster", |image| image.put(TABLE, 0, image.at(BLOCK) + 512)),
    ("a block with reserved bits", |image| image.put(TABLE, 0, image.at(BLOCK) + 1)),
    ("a block past the end", |image| image.put(TABLE, 0, 1 << 40)),
    ("a block for two ranges", |image| image.put(TABLE, 1, image.at(BLOCK))),
    ("a table is the block", |image| image.put(TABLE, 0, image.at(SHARED_L2))),
    ("the table is past the end", |image| {
        let clusters = image.clusters();
        let offset = image.at(clusters + 50);
        image.bytes[48..56].copy_from_slice(&offset.to_be_bytes());
    }),
];

/// Damages whose repair is tested, with images of some kinds.
pub fn repairable() -> impl Iterator<Item = (String, Damaged)> {
    let kinds = [
        Kind::PLAIN,
        Kind { extended: true, ..Kind::PLAIN },
        Kind { refcount_order: 1, ..Kind::PLAIN },
        Kind { refcount_order: 6, ..Kind::PLAIN },
    ];
    let damages = LEAKS.into_iter().chain(COUNTS).chain(STRUCTURES);
    damages.flat_map(move |(what, damage)| kinds.map(|kind| (what, damage, kind))).map(
        |(what, damage, kind)| {
            let mut image = Damaged::new(kind);
            damage(&mut image);
            (format!("{what}: {kind:?}"), image)
        },
    )
}
