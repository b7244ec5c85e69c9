//! What a crash could leave on the disk, read off the engine's record, held against what the guest was promised.
//!
//! `requests (the guest's side) + calls (the kernel's side) → per sector: candidates at a crash → promise kept?`
//!
//! - The disk: a call may reach stable storage at any moment from its issue on, its sectors in any order and each
//!   without the others. It is there for good once it completed with `RWF_DSYNC`, or once a sync succeeded that was
//!   issued after it had completed. What was issued after that may replace it; what had completed before may not.
//! - A sync that failed may have taken the only report of anything that had completed before it ended: no later
//!   sync, and none beside it, makes that stable. The same goes for a durable write that failed through the page
//!   cache, except that a sync beside it is believed if it ended first: a window that docs/decisions/0012 names.
//! - The promise: a sector holds the last write that was durable by word of the device (acknowledged while the guest
//!   saw writethrough, or before it sent a flush that was acknowledged), or one that is not older than that.
//!
//! Sectors are lost independently of each other, and the promise is one about each sector. So no crash images are
//! drawn: at every acknowledgement each sector is held against everything that could be left in it, which covers
//! every image. What a seed decides is the workload and the order in which calls complete.
//!
//! Spec: virtio 1.3 §5.2.6.2.
#![allow(dead_code, missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::ops::Range;

use io_engine::{Record, Verb};

/// By the recorder's counter.
pub type Moment = u64;
/// Which request a sector's contents come from, counted from 1; 0: what was there at first.
pub type Version = usize;

const SECTOR_BYTES: u64 = 512;
const EIO: i32 = 5;
/// Results after which the engine makes the same call again: the kernel did nothing.
const TRY_AGAIN: [i32; 2] = [4, 11];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deed {
    Write,
    /// Discards and zeroes: the sectors read as zeroes afterwards.
    Zero,
    Flush,
}

/// One request as the guest sees it.
#[derive(Clone, Debug)]
pub struct Request {
    pub deed: Deed,
    pub sectors: Range<u64>,
    /// Of its ops.
    pub token: u64,
    /// Before it was sent.
    pub sent: Moment,
    /// After its status was seen, and whether that was OK.
    pub acked: Option<(Moment, bool)>,
    /// The guest sees writethrough: what is acknowledged is durable.
    pub writethrough: bool,
}

impl Request {
    fn acked_ok(&self) -> Option<Moment> {
        self.acked.filter(|(_, ok)| *ok).map(|(moment, _)| moment)
    }
}

/// What happened, from both sides.
#[derive(Clone, Debug)]
pub struct History {
    pub requests: Vec<Request>,
    pub calls: Vec<Record>,
    pub sectors: u64,
    /// Through the page cache, where one call may take the error of another's pages.
    pub shares_errors: bool,
    /// `--cache unsafe`: flushes mean nothing.
    pub promises_nothing: bool,
    pub end: Moment,
}

/// A sector that a crash could leave older than it was promised.
#[derive(Debug, PartialEq, Eq)]
pub struct Broken {
    pub crash: Moment,
    pub sector: u64,
    pub left: Version,
    pub promised: Version,
}

/// How much was checked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Checked {
    pub crashes: usize,
    /// Sectors, over all crashes, whose contents were promised.
    pub promises: usize,
    /// Contents that could be left where something was promised.
    pub leftovers: usize,
}

/// A write or `fallocate`, or a part of one, on its way to stable storage.
struct Piece {
    version: Version,
    sectors: Range<u64>,
    issued: Moment,
    completed: Option<Moment>,
    /// From when on it is on stable storage for certain.
    stable: Option<Moment>,
}

/// A sync, or what may take a sync's error.
struct Sync {
    issued: Moment,
    completed: Moment,
    ok: bool,
}

impl History {
    /// Every crash right after an acknowledgement, and one at the end.
    pub fn check(&self) -> Result<Checked, Broken> {
        let pieces = self.pieces();
        let promised: Vec<_> = self.requests.iter().map(|request| self.promised(request)).collect();
        let acks = self.requests.iter().filter_map(Request::acked_ok);
        let crashes: Vec<_> = acks.chain([self.end]).collect();
        let mut checked = Checked { crashes: crashes.len(), ..Checked::default() };
        for sector in 0..self.sectors {
            let here: Vec<_> = pieces.iter().filter(|piece| piece.sectors.contains(&sector)).collect();
            let writers = (1..).zip(&self.requests).zip(&promised);
            let promises: Vec<(Version, Moment)> = writers
                .filter(|((_, request), _)| request.sectors.contains(&sector))
                .filter_map(|((version, _), promised)| Some((version, (*promised)?)))
                .collect();
            for &crash in &crashes {
                self.check_sector(sector, crash, &here, &promises, &mut checked)?;
            }
        }
        Ok(checked)
    }

    fn check_sector(
        &self,
        sector: u64,
        crash: Moment,
        here: &[&Piece],
        promises: &[(Version, Moment)],
        checked: &mut Checked,
    ) -> Result<(), Broken> {
        let mut due =
            promises.iter().filter(|(_, from)| *from <= crash).map(|(version, _)| *version).peekable();
        if due.peek().is_none() {
            return Ok(());
        }
        checked.promises += 1;
        let due: Vec<_> = due.collect();
        for left in leftovers(here, crash) {
            checked.leftovers += 1;
            if let Some(&promised) = due.iter().find(|&&promised| self.is_older(left, promised)) {
                return Err(Broken { crash, sector, left, promised });
            }
        }
        Ok(())
    }

    /// Whether `left` was over and done with before `promised` was sent.
    pub fn is_older(&self, left: Version, promised: Version) -> bool {
        let Some(left) = left.checked_sub(1) else { return true };
        self.requests[left].acked.is_some_and(|(acked, _)| acked < self.requests[promised - 1].sent)
    }

    /// From when on the guest may count on the request.
    pub fn promised(&self, request: &Request) -> Option<Moment> {
        let acked = request.acked_ok().filter(|_| request.deed != Deed::Flush && !self.promises_nothing)?;
        let flushes = self.requests.iter().filter(|flush| flush.deed == Deed::Flush && flush.sent > acked);
        let flushed = flushes.filter_map(Request::acked_ok).min();
        if request.writethrough { Some(acked) } else { flushed }
    }

    fn pieces(&self) -> Vec<Piece> {
        let syncs = self.syncs();
        let writes = self.calls.iter().filter(|call| matches!(call.verb, Verb::Write | Verb::Allocate));
        writes.flat_map(|call| self.pieces_of(call, &syncs)).collect()
    }

    /// The part of a call that was done, and the rest, which nobody can tell anything about.
    fn pieces_of(&self, call: &Record, syncs: &[Sync]) -> Vec<Piece> {
        let end_bytes = call.offset_bytes + call.len_bytes;
        let done_bytes = match (call.verb, call.completed) {
            (Verb::Allocate, Some((_, 0))) => call.len_bytes,
            (Verb::Write, Some((_, bytes @ 1..))) => u64::from(bytes.unsigned_abs()),
            _ => 0,
        };
        let stable = self.stable(call, syncs);
        let version = self.version_of(call);
        let piece = |bytes: Range<u64>, stable| {
            assert!(
                bytes.start.is_multiple_of(SECTOR_BYTES) && bytes.end.is_multiple_of(SECTOR_BYTES),
                "torn sector"
            );
            let sectors = bytes.start / SECTOR_BYTES..bytes.end / SECTOR_BYTES;
            let completed = call.completed.map(|(moment, _)| moment);
            Piece { version, sectors, issued: call.issued, completed, stable }
        };
        let done_end = call.offset_bytes + done_bytes;
        vec![piece(call.offset_bytes..done_end, stable), piece(done_end..end_bytes, None)]
    }

    /// The request that the call was made for: a tag is used again only after its request was acknowledged.
    fn version_of(&self, call: &Record) -> Version {
        let sent = |request: &&Request| request.token == call.token && request.sent < call.issued;
        let request = self.requests.iter().rposition(|request| sent(&request));
        1 + request.expect("a call that no request asked for")
    }

    fn stable(&self, call: &Record, syncs: &[Sync]) -> Option<Moment> {
        let (completed, result) = call.completed?;
        if result < 0 {
            return None;
        }
        if call.verb == Verb::Write && call.flags & libc_dsync() != 0 {
            return Some(completed);
        }
        let covers = |sync: &&Sync| sync.ok && sync.issued > completed;
        let spoils = |failed: &Sync, sync: &Sync| {
            !failed.ok && failed.completed > completed && failed.issued < sync.completed
        };
        let trusted =
            syncs.iter().filter(covers).filter(|sync| !syncs.iter().any(|failed| spoils(failed, sync)));
        trusted.map(|sync| sync.completed).min()
    }

    fn syncs(&self) -> Vec<Sync> {
        let calls = self.calls.iter().filter_map(|call| Some((call, call.completed?)));
        let calls = calls.filter(|(call, (_, result))| match call.verb {
            Verb::Sync => !TRY_AGAIN.contains(&-result),
            Verb::Write => self.shares_errors && call.flags & libc_dsync() != 0 && *result == -EIO,
            _ => false,
        });
        calls
            .map(|(call, (completed, result))| {
                let issued = if call.verb == Verb::Sync { call.issued } else { completed };
                Sync { issued, completed, ok: result >= 0 }
            })
            .collect()
    }

    /// Whether a sector of the image, read after everything was acknowledged, may come from `found`; zeroes may
    /// come from anything that zeroes.
    pub fn may_read(&self, sector: u64, found: Version) -> bool {
        let is_zero = |version: Version| version == 0 || self.requests[version - 1].deed == Deed::Zero;
        let writers = (1..).zip(&self.requests).filter(|(_, request)| request.sectors.contains(&sector));
        let done: Vec<Version> =
            writers.clone().filter(|(_, w)| w.acked_ok().is_some()).map(|(v, _)| v).collect();
        let sources = writers.map(|(version, _)| version).chain([0]);
        let mut sources = sources.filter(|&v| if found == 0 { is_zero(v) } else { v == found });
        sources.any(|source| !done.iter().any(|&w| w != source && self.is_older(source, w)))
    }
}

/// What could be in the sector after a crash.
fn leftovers(here: &[&Piece], crash: Moment) -> Vec<Version> {
    let issued = here.iter().filter(|piece| piece.issued <= crash);
    let stable: Vec<_> = here.iter().filter(|piece| piece.stable.is_some_and(|from| from <= crash)).collect();
    let replaced = |piece: &Piece| stable.iter().any(|s| piece.completed.is_some_and(|done| done < s.issued));
    let mut left: Vec<_> = issued.filter(|piece| !replaced(piece)).map(|piece| piece.version).collect();
    if stable.is_empty() {
        left.push(0);
    }
    left
}

fn libc_dsync() -> i32 {
    rustix::io::ReadWriteFlags::DSYNC.bits().cast_signed()
}
