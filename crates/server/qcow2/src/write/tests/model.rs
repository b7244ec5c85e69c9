//! What each sector of the guest may contain: now, and after a loss of power.

use std::cell::Cell;

use crate::check::{Finding, Severity, check};
use crate::compressed::Decompressor;
use crate::geometry::Geometry;
use crate::header::Header;
use crate::image::{Image, read_l1};
use crate::mapping::{L2Source, RunKind, next_run};
use crate::read_at::ReadAt;
use crate::tables::{BadEntry, RawL2Entry};
use crate::write::tests::disk::{Content, SECTOR};
use crate::write::tests::images::{Kind, Made, below};

/// For each cell, for each of its sectors, the numbers that it may have.
type Allowed = Vec<Vec<Vec<u64>>>;

pub struct Model {
    kind: Kind,
    cells: Vec<u64>,
    /// If the process is killed.
    now: Allowed,
    /// If power is lost.
    durable: Allowed,
    snapshot: Option<(Vec<u64>, Vec<Vec<u64>>)>,
    /// As long as the autoclear bits are set, nothing else has changed.
    before: Option<Content>,
    crashes: Cell<u64>,
    /// The disk's end before it grew. What is behind reads as zeroes until the guest writes there.
    pub grown_from: Option<u64>,
}

impl Model {
    pub fn new(made: &Made) -> Self {
        let only = |numbers: &Vec<u64>| numbers.iter().map(|number| vec![*number]).collect();
        let now: Allowed = made.active.iter().map(only).collect();
        Self {
            kind: made.kind,
            cells: made.cells.clone(),
            durable: now.clone(),
            now,
            snapshot: made.snapshot.clone().map(|numbers| (made.snapshot_l1.clone(), numbers)),
            before: (made.kind.autoclear != 0).then(|| Content::of(&made.bytes)),
            crashes: Cell::new(0),
            grown_from: None,
        }
    }

    /// How many crashes were checked.
    pub fn crashes(&self) -> u64 {
        self.crashes.get()
    }

    /// The guest writes a sector, or zeroes it.
    pub fn begin(&mut self, cell: usize, sector: usize, number: u64) {
        for allowed in [&mut self.now, &mut self.durable] {
            let numbers = &mut allowed[cell][sector];
            if !numbers.contains(&number) {
                numbers.push(number);
            }
        }
    }

    /// A write arrives that nobody reads unless power is lost.
    pub fn begin_late(&mut self, cell: usize, sector: usize, number: u64) {
        self.durable[cell][sector].push(number);
    }

    /// A cell may read as zeroes from now on.
    pub fn allow_zeroes(&mut self, cell: usize) {
        (0..self.now[cell].len()).for_each(|sector| self.begin(cell, sector, 0));
    }

    /// The write was answered.
    pub fn end(&mut self, cell: usize, sector: usize, number: u64) {
        self.now[cell][sector] = vec![number];
    }

    /// The file was synced.
    pub fn synced(&mut self) {
        self.durable = self.now.clone();
    }

    /// After an operation that failed, or a crash: the guest sees what is there, which must be allowed.
    pub fn settle(&mut self, content: &Content) {
        self.check_killed(content);
        self.now = self
            .active(content)
            .into_iter()
            .map(|numbers| numbers.into_iter().map(|n| vec![n]).collect())
            .collect();
    }

    /// Life goes on with what a crash left.
    pub fn crashed(&mut self, content: &Content) {
        self.check_crashed(content);
        self.now = self.durable.clone();
        self.settle(content);
        self.durable = self.now.clone();
        self.before = None;
    }

    /// The process is killed: what was written is there.
    pub fn check_killed(&self, content: &Content) {
        self.compare("killed", &self.active(content), &self.now);
    }

    /// Power is lost.
    pub fn check_crashed(&self, content: &Content) {
        self.crashes.set(self.crashes.get() + 1);
        assert_sound(content);
        self.compare("crashed", &self.active(content), &self.durable);
        if let Some((l1, expected)) = &self.snapshot {
            let header = Header::read(content).unwrap();
            let numbers = read_cells(content, &header, l1, self.kind, &self.cells);
            for ((cell, numbers), expected) in self.cells.iter().zip(&numbers).zip(expected) {
                assert_eq!(numbers[..], expected[..numbers.len()], "the snapshot's cluster {cell}");
            }
        }
        self.check_grown(content);
        if let Some(before) = &self.before {
            let autoclear = Header::read(content).unwrap().autoclear.unknown;
            assert!(
                autoclear == 0 || content.bytes() == before.bytes(),
                "changed before autoclear was cleared"
            );
        }
    }

    fn check_grown(&self, content: &Content) {
        let (Some(from), header) = (self.grown_from, Header::read(content).unwrap()) else { return };
        let first = from.div_ceil(header.geometry.cluster_bytes());
        let l1 = read_l1(content, header.l1).unwrap();
        for cluster in first..first + 3 {
            let numbers = read_cell(content, &header, &l1, self.kind, cluster);
            assert!(numbers.iter().all(|number| *number == 0), "new cluster {cluster}: {numbers:?}");
        }
    }

    fn active(&self, content: &Content) -> Vec<Vec<u64>> {
        let header = Header::read(content).unwrap();
        let l1 = read_l1(content, header.l1).unwrap();
        read_cells(content, &header, &l1, self.kind, &self.cells)
    }

    /// Compares what another program reads.
    pub fn assert_read(&self, numbers: &[Vec<u64>]) {
        self.compare("another program", numbers, &self.now);
    }

    fn compare(&self, what: &str, numbers: &[Vec<u64>], allowed: &Allowed) {
        for ((cluster, numbers), allowed) in self.cells.iter().zip(numbers).zip(allowed) {
            for (sector, (number, allowed)) in numbers.iter().zip(allowed).enumerate() {
                assert!(
                    allowed.contains(number),
                    "{what}: the guest's cluster {cluster}, sector {sector} has {number:#x}, allowed is {allowed:x?}"
                );
            }
        }
    }
}

/// Leaks are allowed.
pub fn assert_sound(content: &Content) {
    let mut texts = String::new();
    let image = Image::open(content).unwrap();
    check(&image, &mut |finding| {
        if finding.severity() != Severity::Leak {
            texts += &format!("{finding}\n");
        }
    })
    .unwrap();
    assert_eq!(texts, "");
}

/// The number of leaked clusters.
pub fn leaks(content: &Content) -> u64 {
    let image = Image::open(content).unwrap();
    check(&image, &mut |_| {}).unwrap().leaks
}

/// The number of clusters that have a count and no reference.
pub fn unreferenced(content: &Content) -> u64 {
    let mut count = 0;
    check(&Image::open(content).unwrap(), &mut |finding| {
        count += u64::from(matches!(finding, Finding::Refcount { references: 0, .. }));
    })
    .unwrap();
    count
}

struct Tables<'a>(&'a Content, Geometry);

impl L2Source for Tables<'_> {
    type Error = BadEntry;

    fn entry(&mut self, table: u64, index: u32) -> Result<RawL2Entry, BadEntry> {
        let mut bytes = [0; 16];
        let at = table + u64::from(index) * self.1.l2_entry_bytes();
        self.0.read_at(at, &mut bytes).unwrap();
        Ok(RawL2Entry::at(&bytes, 0, &self.1).unwrap())
    }
}

/// The numbers of the sectors of each cell, up to the disk's end.
pub fn read_cells(
    content: &Content,
    header: &Header,
    l1: &[u64],
    kind: Kind,
    cells: &[u64],
) -> Vec<Vec<u64>> {
    cells.iter().map(|cluster| read_cell(content, header, l1, kind, *cluster)).collect()
}

fn read_cell(content: &Content, header: &Header, l1: &[u64], kind: Kind, cluster: u64) -> Vec<u64> {
    let geometry = header.geometry;
    let mut at = cluster * geometry.cluster_bytes();
    let end = (at + geometry.cluster_bytes()).min(header.size_bytes);
    let mut source = Tables(content, geometry);
    let mut numbers = Vec::new();
    while at < end {
        let run = next_run(&geometry, l1, &mut source, at, end - at).unwrap();
        let mut bytes = vec![0; run.len_bytes as usize];
        match run.kind {
            RunKind::Data { host_offset } => {
                content.read_at(host_offset, &mut bytes).unwrap();
                numbers.extend(bytes.chunks(SECTOR as usize).map(number));
            }
            RunKind::Zero => numbers.extend(vec![0; bytes.len() / SECTOR as usize]),
            RunKind::Unallocated => {
                let sectors = at / SECTOR..(at + run.len_bytes) / SECTOR;
                numbers.extend(sectors.map(|sector| below(kind, sector)));
            }
            RunKind::Compressed(compressed) => {
                let mut data = vec![0; compressed.len_bytes() as usize];
                content.read_at(compressed.host_offset, &mut data).unwrap();
                let mut whole = vec![0; geometry.cluster_bytes() as usize];
                Decompressor::new(header.compression).decompress(&data, &mut whole).unwrap();
                numbers.extend(whole[..bytes.len()].chunks(SECTOR as usize).map(number));
            }
        }
        at += run.len_bytes;
    }
    numbers
}

fn number(sector: &[u8]) -> u64 {
    let words = sector.as_chunks::<8>().0;
    assert!(words.iter().all(|word| *word == words[0]), "a sector with parts of two");
    u64::from_be_bytes(words[0])
}
