//! Computes from the engine's record what a crash could leave on the disk, and compares that with the promises to the
//! guest.
//!
//! `requests (the guest's side) + calls (the kernel's side) → per sector: candidates at a crash → promise kept?`
//!
//! - The disk: a call may reach stable storage at any moment from its issue on, its sectors in any order and
//!   independently. A call is certainly stable once it has completed with `RWF_DSYNC`, or once a sync that was issued
//!   after the call's completion has succeeded. Calls issued after that moment may replace its data; calls completed
//!   before that moment may not.
//! - A failed sync may have consumed the only error report for any call that had completed before the sync ended. No
//!   later or concurrent sync makes those calls stable. The same holds for a durable write that failed through the
//!   page cache, except that a concurrent sync counts if it ended first: docs/decisions/0012 describes this window.
//! - The promise: a sector holds the last write that the device declared durable (acknowledged while the guest saw
//!   writethrough, or before it sent a flush that was acknowledged), or a write that is not older.
//!
//! Sectors are lost independently, and the promise is about each sector. So the model draws no crash images: at every
//! acknowledgement it checks each sector against everything that could be left in it, which covers every image. A seed
//! determines the workload and the order in which calls complete.
//!
//! Spec: virtio 1.3 §5.2.6.2.
#![allow(dead_code, missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::ops::Range;

use io_engine::{Record, Verb};

/// A value of the recorder's counter.
pub type Moment = u64;
/// The request that wrote a sector, counted from 1; 0: the initial contents.
pub type Version = usize;

const SECTOR_BYTES: u64 = 512;
const EIO: i32 = 5;
/// Results after which the engine repeats the call: the kernel did nothing.
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
    /// The token of its ops.
    pub token: u64,
    /// The counter's value before the request was sent.
    pub sent: Moment,
    /// The counter's value after the guest saw the status, and whether the status was OK.
    pub acked: Option<(Moment, bool)>,
    /// The guest sees writethrough, so an acknowledged write is durable.
    pub writethrough: bool,
}

impl Request {
    fn acked_ok(&self) -> Option<Moment> {
        self.acked.filter(|(_, ok)| *ok).map(|(moment, _)| moment)
    }
}

/// Everything that happened, from both sides.
#[derive(Clone, Debug)]
pub struct History {
    pub requests: Vec<Request>,
    pub calls: Vec<Record>,
    pub sectors: u64,
    /// Uses the page cache, where one call may consume the error of another call's pages.
    pub shares_errors: bool,
    /// `--cache unsafe`: flushes mean nothing.
    pub promises_nothing: bool,
    pub end: Moment,
}

/// A sector whose contents after a crash could be older than the guest was promised.
#[derive(Debug, PartialEq, Eq)]
pub struct Broken {
    pub crash: Moment,
    pub sector: u64,
    pub left: Version,
    pub promised: Version,
}

/// The amount that the check covered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Checked {
    pub crashes: usize,
    /// Sectors with a promise, over all crashes.
    pub promises: usize,
    /// Possible contents of sectors with a promise.
    pub leftovers: usize,
}

/// A write or `fallocate`, or a part of one, that may be on stable storage.
struct Piece {
    version: Version,
    sectors: Range<u64>,
    issued: Moment,
    completed: Option<Moment>,
    /// The moment from which it is certainly on stable storage.
    stable: Option<Moment>,
}

/// A sync, or another call that may consume a sync's error.
struct Sync {
    issued: Moment,
    completed: Moment,
    ok: bool,
}

impl History {
    /// Checks a crash right after every acknowledgement, and one at the end.
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

    /// Whether `left` had ended before `promised` was sent.
    pub fn is_older(&self, left: Version, promised: Version) -> bool {
        let Some(left) = left.checked_sub(1) else { return true };
        self.requests[left].acked.is_some_and(|(acked, _)| acked < self.requests[promised - 1].sent)
    }

    /// The moment from which the guest may rely on the request.
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

    /// The part of a call that the kernel carried out, and the rest, whose state is unknown.
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

    /// The request for which the call was made. A tag is reused only after its request was acknowledged.
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

    /// Whether a sector of the image, read after every acknowledgement, may hold `found`; zeroes may come from any
    /// request that zeroes.
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

/// The contents that the sector could have after a crash.
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
