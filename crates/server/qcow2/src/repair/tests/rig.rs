//! A file in memory that keeps all changes, and the questions that tests ask an image.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::io;

use crate::check::{CheckReport, Finding, check};
use crate::image::Image;
use crate::mapping::RunKind;
use crate::read_at::ReadAt;
use crate::repair::tests::damage::COPIED;
use crate::repair::{Event, Note, RepairError, Repaired, Scope, repair};
use crate::write::WriteAt;
use crate::write::tests::disk::{Content, Item, SECTOR};

/// A call that changes the file. No items: a sync.
pub type Call = Vec<Item>;

/// A file that keeps all calls.
#[derive(Default)]
pub struct Disk {
    pub now: RefCell<Content>,
    pub calls: RefCell<Vec<Call>>,
    /// A read of this offset fails.
    pub unreadable: Cell<Option<u64>>,
    /// Reads so far, and which one of them fails.
    pub reads: Cell<usize>,
    pub failing_read: Cell<Option<usize>>,
    /// The call with this number fails, and all after it.
    pub away: Cell<Option<usize>>,
}

impl Disk {
    pub fn of(content: Content) -> Self {
        Self { now: content.into(), ..Self::default() }
    }

    fn call(&self, call: Call) -> io::Result<()> {
        let mut calls = self.calls.borrow_mut();
        if self.away.get().is_some_and(|away| calls.len() >= away) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        call.iter().for_each(|item| self.now.borrow_mut().apply(item));
        calls.push(call);
        Ok(())
    }
}

impl ReadAt for Disk {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.reads.replace(self.reads.get() + 1);
        if self.unreadable.get() == Some(offset) || self.failing_read.get() == Some(read) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        self.now.borrow().read_at(offset, buffer)
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.now.borrow().len)
    }
}

impl WriteAt for Disk {
    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        assert!(
            offset.is_multiple_of(SECTOR) && (data.len() as u64).is_multiple_of(SECTOR) && !data.is_empty()
        );
        let sectors = data.chunks(SECTOR as usize).zip(0..);
        let item =
            |(data, at): (&[u8], u64)| Item::Sector { offset: offset + at * SECTOR, data: data.into() };
        self.call(sectors.map(item).collect())
    }

    fn sync_data(&self) -> io::Result<()> {
        self.call(Vec::new())
    }

    fn set_len(&self, len_bytes: u64) -> io::Result<()> {
        self.call(vec![Item::Len(len_bytes)])
    }

    fn punch_hole(&self, offset: u64, _: u64) -> io::Result<()> {
        panic!("a hole at {offset}: a repair frees no space of the file system")
    }
}

/// What a repair did.
pub struct Outcome {
    pub result: Result<Repaired, RepairError>,
    pub before: CheckReport,
    pub found: Vec<String>,
    pub notes: Vec<Note>,
    pub left: Vec<String>,
    pub disk: Disk,
}

impl Outcome {
    /// Corruptions and leaks before, those that were repaired, those that are left.
    pub fn sums(&self) -> [(u64, u64); 3] {
        let result = self.result.as_ref().unwrap();
        let of = |report: &CheckReport| (report.corruptions, report.leaks);
        [of(&self.before), (result.corruptions_repaired, result.leaks_freed), of(&result.after)]
    }

    pub fn bytes(&self) -> Vec<u8> {
        self.disk.now.borrow().bytes()
    }
}

pub fn run(content: Content, scope: Scope) -> Outcome {
    run_on(Disk::of(content), scope)
}

pub fn run_on(disk: Disk, scope: Scope) -> Outcome {
    let mut before = CheckReport::default();
    let (mut found, mut notes, mut left) = (Vec::new(), Vec::new(), Vec::new());
    let result = repair(&disk, scope, &mut |event| match event {
        Event::Found(finding) => found.push(finding.to_string()),
        Event::Checked(report) => before = report,
        Event::Note(note) => notes.push(note),
        Event::Left(finding) => left.push(finding.to_string()),
    });
    Outcome { result, before, found, notes, left, disk }
}

/// Clusters with more references than counts, and clusters that count as a guest's own although their count is not 1.
pub fn dangers(content: &Content) -> BTreeSet<u64> {
    let mut clusters = BTreeSet::new();
    let image = Image::open(content).unwrap();
    let bits = image.header().geometry.cluster_bits();
    check(&image, &mut |finding| match finding {
        Finding::Refcount { cluster, refcount, references } if refcount < references => {
            clusters.insert(*cluster);
        }
        Finding::Copied { value, .. } if value & COPIED != 0 => {
            clusters.insert((value & !COPIED) >> bits);
        }
        _ => {}
    })
    .unwrap();
    clusters
}

/// What the guest reads: for each cluster its data in the file, other contents, or an error.
pub fn reads(content: &Content) -> Vec<Option<(RunKind, Vec<u8>)>> {
    let mut image = Image::open(content).unwrap();
    let (size, cluster_bytes) = (image.header().size_bytes, image.header().geometry.cluster_bytes());
    let mut all = Vec::new();
    for at in (0..size).step_by(cluster_bytes as usize) {
        let run = image.next_run(at, cluster_bytes.min(size - at)).ok();
        all.push(run.map(|run| {
            let mut data = Vec::new();
            if let RunKind::Data { host_offset } = run.kind {
                data.resize(run.len_bytes as usize, 0);
                content.read_at(host_offset, &mut data).unwrap();
            }
            (run.kind, data)
        }));
    }
    all
}

/// The guest reads the same wherever it could read before, and no count or copied bit has become dangerous.
#[track_caller]
pub fn assert_not_worse(before: &Content, after: &Content) {
    let (old, new) = (dangers(before), dangers(after));
    assert!(new.is_subset(&old), "{new:?} instead of {old:?}");
    for (cluster, (before, after)) in reads(before).into_iter().zip(reads(after)).enumerate() {
        assert!(before.is_none() || before == after, "the guest's cluster {cluster}: {before:?}, {after:?}");
    }
}
