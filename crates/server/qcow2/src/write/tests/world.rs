//! A guest with its disk: does what a worker and a metadata thread do, and keeps the model.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::rc::Rc;

use fastrand::Rng;

use crate::header::Header;
use crate::tables::{L2Entry, RawL2Entry};
use crate::write::error::WriteError;
use crate::write::interface::{Below, View, WriteAt};
use crate::write::tests::disk::{Content, SECTOR, SimDisk};
use crate::write::tests::images::{Kind, Made, below, sector};
use crate::write::tests::model::Model;
use crate::write::writer::{Unlinked, Writer};

/// The backing file.
pub struct Under(pub Kind);

impl Below for Under {
    fn read_at(&mut self, guest_offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        for (part, at) in buffer.chunks_mut(SECTOR as usize).zip(guest_offset / SECTOR..) {
            part.copy_from_slice(&sector(below(self.0, at)));
        }
        Ok(())
    }

    fn is_zero(&mut self) -> bool {
        !self.0.backing
    }
}

/// The workers' view.
#[derive(Default)]
pub struct Seen {
    pub l1: HashMap<u64, u64>,
    pub entries: HashMap<u64, RawL2Entry>,
    pub file_bytes: u64,
}

impl View for Seen {
    fn file_grew(&mut self, len_bytes: u64) {
        self.file_bytes = len_bytes;
    }

    fn l1_changed(&mut self, index: u64, entry: u64) {
        self.l1.insert(index, entry);
    }

    fn l2_changed(&mut self, cluster_index: u64, entry: RawL2Entry) {
        self.entries.insert(cluster_index, entry);
    }

    fn l2_unknown(&mut self, cluster_index: u64) {
        self.entries.remove(&cluster_index);
    }
}

pub struct World {
    pub disk: SimDisk,
    pub writer: Writer<SimDisk>,
    pub seen: Seen,
    pub model: Rc<RefCell<Model>>,
    pub kind: Kind,
    pub cells: Vec<u64>,
    pub rng: Rng,
    waiting: Vec<Unlinked>,
    number: u64,
}

/// The number of a write that arrives after the zeroes that it ran beside.
const LATE: u64 = 0xbad0_bad0;

pub type Done = Result<(), WriteError>;

impl World {
    pub fn new(made: &Made, seed: u64) -> Self {
        let model = Rc::new(RefCell::new(Model::new(made)));
        Self::open(Content::of(&made.bytes), made.kind, &made.cells, model, seed)
    }

    fn open(content: Content, kind: Kind, cells: &[u64], model: Rc<RefCell<Model>>, seed: u64) -> Self {
        let disk = SimDisk::new(content, Rc::clone(&model), seed);
        let writer = Self::writer(&disk);
        let (seen, cells, rng) = (Seen::default(), cells.to_vec(), Rng::with_seed(seed));
        let number = (seed + 1) << 20;
        Self { disk, writer, seen, model, kind, cells, rng, waiting: Vec::new(), number }
    }

    fn writer(disk: &SimDisk) -> Writer<SimDisk> {
        Writer::open(disk.clone()).unwrap()
    }

    /// A new life after a loss of power, or a kill.
    pub fn reborn(self, content: Content) -> Self {
        self.model.borrow_mut().crashed(&content);
        let seed = self.number;
        Self::open(content, self.kind, &self.cells, self.model, seed)
    }

    /// The process is killed. What it wrote and did not sync may still be lost.
    pub fn kill(&mut self) {
        self.waiting.clear();
        self.writer = Self::writer(&self.disk);
        self.seen = Seen::default();
    }

    pub fn header(&self) -> &Header {
        self.writer.header()
    }

    fn cluster_bytes(&self) -> u64 {
        self.header().geometry.cluster_bytes()
    }

    pub fn guest_range(&self, cell: usize) -> Range<u64> {
        let start = self.cells[cell] * self.cluster_bytes();
        start..start + self.cluster_bytes()
    }

    /// Sectors of a cell that the disk has.
    fn sectors(&self, cell: usize) -> usize {
        let range = self.guest_range(cell);
        ((range.end.min(self.header().size_bytes) - range.start) / SECTOR) as usize
    }

    pub fn claim(&mut self, cells: &[usize]) -> Done {
        let ranges: Vec<Range<u64>> = cells.iter().map(|cell| self.guest_range(*cell)).collect();
        let claimed = self.writer.claim(&ranges, &mut Under(self.kind), &mut self.seen);
        self.wait();
        claimed
    }

    fn wait(&mut self) {
        self.waiting.extend(self.writer.take_unlinked());
    }

    /// Where a cluster's data may be written, as a worker finds out.
    fn in_place(&mut self, cell: usize) -> u64 {
        let cluster = self.cells[cell];
        let entry = self.seen.entries[&cluster];
        let geometry = self.header().geometry;
        assert!(entry.is_in_place(&geometry), "{entry:x?} after a claim");
        let Ok(L2Entry::Standard(found)) = L2Entry::decode(entry, &geometry) else { panic!("{entry:x?}") };
        let host_offset = found.host_offset.unwrap();
        assert!(host_offset + geometry.cluster_bytes() <= self.disk.now().len);
        host_offset
    }

    /// Claims those of the cells that are not in place in the view, and writes sectors of each.
    pub fn write(&mut self, cells: &[usize]) -> Done {
        let not_in_place: Vec<usize> =
            cells.iter().copied().filter(|cell| self.host_in_place(*cell).is_none()).collect();
        if !not_in_place.is_empty() {
            self.claim(&not_in_place)?;
        }
        for cell in cells {
            let host_offset = self.in_place(*cell);
            let count = self.rng.usize(1..=2);
            let first = self.rng.usize(..=self.sectors(*cell) - count);
            self.number += 1;
            let number = self.number;
            (first..first + count).for_each(|sector| self.model.borrow_mut().begin(*cell, sector, number));
            let written =
                self.disk.write_at(host_offset + first as u64 * SECTOR, &sector(number).repeat(count));
            written.map_err(WriteError::Sync)?;
            (first..first + count).for_each(|sector| self.model.borrow_mut().end(*cell, sector, number));
        }
        Ok(())
    }

    /// Zeroes adjacent cells.
    pub fn zero(&mut self, cells: Range<usize>, unmap: bool) -> Done {
        let all: Vec<(usize, usize)> = cells
            .clone()
            .flat_map(|cell| (0..self.sectors(cell)).map(move |sector| (cell, sector)))
            .collect();
        let range = self.guest_range(cells.start).start..self.guest_range(cells.end - 1).end;
        let hosts: Vec<(usize, u64)> =
            cells.filter_map(|cell| Some((cell, self.host_in_place(cell)?))).collect();
        all.iter().for_each(|(cell, sector)| self.model.borrow_mut().begin(*cell, *sector, 0));
        let zeroed = self.writer.zero(range.clone(), unmap, &mut Under(self.kind), &mut self.seen);
        self.wait();
        assert_eq!(zeroed?, range.end);
        all.iter().for_each(|(cell, sector)| self.model.borrow_mut().end(*cell, *sector, 0));
        // A write that began before may still arrive. The guest reads it only if the zeroes are lost.
        for (cell, host) in hosts {
            if self.rng.bool() {
                self.model.borrow_mut().begin_late(cell, 0, LATE);
                self.disk.write_at(host, &sector(LATE)).map_err(WriteError::Sync)?;
            }
        }
        Ok(())
    }

    fn host_in_place(&mut self, cell: usize) -> Option<u64> {
        let geometry = self.header().geometry;
        let entry = self.seen.entries.get(&self.cells[cell])?;
        let Ok(L2Entry::Standard(found)) = L2Entry::decode(*entry, &geometry) else { return None };
        found.host_offset.filter(|_| entry.is_in_place(&geometry))
    }

    pub fn grow(&mut self, size_bytes: u64, below_bytes: u64) -> Done {
        let whole = (self.cluster_bytes() / SECTOR) as usize;
        // What is past the disk's end becomes zeroes.
        let new: Vec<(usize, usize)> = (0..self.cells.len())
            .flat_map(|cell| (self.sectors(cell)..whole).map(move |sector| (cell, sector)))
            .collect();
        new.iter().for_each(|(cell, sector)| self.model.borrow_mut().begin(*cell, *sector, 0));
        // The backing file reaches so far, and more.
        if self.kind.backing && below_bytes > self.header().size_bytes + (16 << 10) {
            self.model.borrow_mut().grown_from = Some(self.header().size_bytes);
        }
        let grown = self.writer.grow_disk(size_bytes, &mut Under(self.kind), below_bytes, &mut self.seen);
        self.wait();
        new.iter().for_each(|(cell, sector)| self.model.borrow_mut().end(*cell, *sector, 0));
        grown
    }

    pub fn release(&mut self) -> Done {
        if self.waiting.is_empty() {
            return Ok(());
        }
        let unlinked = self.waiting.remove(0);
        self.writer.release(unlinked)
    }

    pub fn close(&mut self) -> Done {
        while !self.waiting.is_empty() {
            self.release()?;
        }
        self.writer.close()
    }

    pub fn begin_reclaim(&mut self) {
        let waiting: Vec<&Unlinked> = self.waiting.iter().collect();
        self.writer.begin_reclaim(&waiting).unwrap();
    }

    /// Closes the image, and opens it again.
    pub fn reopen(&mut self) -> Done {
        self.close()?;
        self.writer = Self::writer(&self.disk);
        self.seen = Seen::default();
        Ok(())
    }

    /// Every entry that the workers know is the file's.
    pub fn assert_view(&mut self) {
        for (cluster, seen) in &self.seen.entries {
            let mut entry = [RawL2Entry::default()];
            self.writer.slice(*cluster, &mut entry, &mut Seen::default()).unwrap();
            assert_eq!(entry[0], *seen, "the guest's cluster {cluster}");
        }
    }

    /// One random operation.
    pub fn step(&mut self) -> Done {
        let cells = self.cells.len();
        match self.rng.u8(..16) {
            0..6 => {
                let count = self.rng.usize(1..=3);
                let chosen = self.rng.choose_multiple(0..cells, count);
                self.write(&chosen)
            }
            6..9 => {
                let (cell, unmap) = (self.rng.usize(..cells), self.rng.bool());
                let next = (cell + 2).min(cells);
                let is_adjacent = next - cell == 2 && self.cells[cell] + 1 == self.cells[cell + 1];
                let end = if is_adjacent { next } else { cell + 1 };
                match self.zero(cell..end, unmap) {
                    Err(WriteError::NoZeroFlag) if self.kind.version == 2 && self.kind.backing => Ok(()),
                    other => other,
                }
            }
            9..12 => self.writer.sync(),
            12..15 => self.release(),
            _ => self.reopen(),
        }
    }
}
