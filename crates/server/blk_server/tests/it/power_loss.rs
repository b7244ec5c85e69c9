//! The power fails at every moment of a random load: each image that could be left on the disk keeps the promises to
//! the guest.
//!
//! `random guest (rig/workload.rs) → server → FUSE (rig/fuse_disk.rs): every write with its bytes, every sync →
//! each prefix × what of it may be missing or torn → image, byte by byte → promises kept?`
//!
//! - A write is certain only if it is covered by a sync that began after the write had ended. Any other write may be
//!   present or missing, as a whole or in single sectors. The order of calls is known, because the FUSE host serves one
//!   at a time.
//! - The promise, for each sector: a write is durable once the device says so (it was acknowledged while the guest saw
//!   writethrough, or before the guest sent a flush that was acknowledged). The sector holds no data that had been
//!   replaced before such a write was sent, no data that was never sent, and no mixture of two writes.
//!
//! `durability_model.rs` checks the same promises with the engine's own record, by reasoning about each sector. This
//! test draws images; it trusts nothing from the server and compares bytes.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

use std::sync::Arc;

use disk_image::CacheMode;
use io_engine::{EngineConfig, EngineKind, Recorder, make};
use xtask::sizes;
use xtask::skip::{Reason, skip_part};

use crate::rig::crash_model;
use crate::rig::crash_model::{History, Moment, Version};
use crate::rig::fuse_disk::{Deed, Event, FuseDisk};
use crate::rig::workload::{Dice, Plan, run};
use crate::rig::{MIB, Options};

const SECTOR: usize = 512;
/// Random images per prefix, in addition to the image with every uncertain write and the image with none.
const DRAWS: u64 = 6;

/// A load, and the calls that the host saw.
struct Run {
    history: History,
    events: Vec<Event>,
}

fn load(kind: EngineKind, cache: CacheMode, seed: u64, drops_syncs: bool) -> Option<Run> {
    let recorder = Recorder::new();
    let marks = recorder.clone();
    let disk = FuseDisk::mount(MIB as usize, Arc::new(move || marks.mark()))?;
    if drops_syncs {
        disk.drop_syncs();
    }
    let config = EngineConfig { recorder: Some(recorder.clone()), ..EngineConfig::default() };
    let options = Options {
        recorder: Some(recorder),
        existing: Some(disk.path()),
        engine: Some(Box::new(move || make(kind, &config))),
        ..Options::cached(cache)
    };
    let history = run(Plan { options, fake: None, mishaps: vec![], switches: true, seed });
    Some(Run { history, events: disk.events() })
}

/// How much was checked.
#[derive(Clone, Copy, Debug, Default)]
struct Checked {
    prefixes: u64,
    images: u64,
    promises: u64,
    /// Number of uncertain calls, over all prefixes.
    in_doubt: u64,
}

impl Run {
    fn check(&self, seed: u64) -> Result<Checked, String> {
        let mut checked = Checked::default();
        let mut dice = Dice::new(seed ^ 0x7061_7765);
        let calls = self.events.iter().flat_map(|event| [event.begun, event.done]);
        let acks = self.history.requests.iter().filter_map(|request| Some(request.acked?.0));
        let mut moments: Vec<Moment> = calls.chain(acks).chain([self.history.end]).collect();
        moments.sort_unstable();
        moments.dedup();
        let mut promises: Vec<_> = (1..)
            .zip(&self.history.requests)
            .filter_map(|(version, request)| Some((self.history.promised(request)?, version)))
            .collect();
        promises.sort_unstable();
        let mut promises = promises.into_iter().peekable();
        let mut due = vec![Vec::new(); self.history.sectors as usize];
        for &crash in &moments {
            while let Some((_, version)) = promises.next_if(|(from, _)| *from <= crash) {
                self.add_promise(version, &mut due);
            }
            self.check_prefix(crash, &due, &mut dice, &mut checked)?;
        }
        Ok(checked)
    }

    /// Checks the images of a power failure right after `crash`.
    fn check_prefix(
        &self,
        crash: Moment,
        promised: &[Vec<Version>],
        dice: &mut Dice,
        checked: &mut Checked,
    ) -> Result<(), String> {
        let is_over_sync = |event: &&Event| event.deed == Deed::Sync && event.done <= crash;
        let synced = self.events.iter().filter(is_over_sync).map(|sync| sync.begun).max().unwrap_or(0);
        let begun = || self.events.iter().filter(|event| event.begun <= crash && event.deed != Deed::Sync);
        let mut stable = vec![0; self.history.sectors as usize * SECTOR];
        begun().filter(|event| event.done < synced).for_each(|event| apply(event, &mut stable, |_| true));
        let in_doubt: Vec<&Event> = begun().filter(|event| event.done >= synced).collect();
        checked.prefixes += 1;
        checked.promises += promised.iter().map(|due| due.len() as u64).sum::<u64>();
        checked.in_doubt += in_doubt.len() as u64;
        for draw in 0..DRAWS + 2 {
            let mut image = stable.clone();
            for event in &in_doubt {
                // All, none, or at random: whole, missing, torn.
                let fate = match draw {
                    0 => 0,
                    1 => 1,
                    _ => dice.below(3),
                };
                apply(event, &mut image, |_| fate == 0 || fate == 2 && dice.below(2) == 0);
            }
            checked.images += 1;
            self.check_image(crash, &image, promised)?;
        }
        Ok(())
    }

    /// Adds to `due`, by sector, a request that the guest may rely on, and removes those that had ended before it
    /// began.
    fn add_promise(&self, version: Version, due: &mut [Vec<Version>]) {
        for sector in self.history.requests[version - 1].sectors.clone() {
            let due = &mut due[sector as usize];
            due.retain(|&known| !self.history.is_older(known, version));
            if !due.iter().any(|&known| self.history.is_older(version, known)) {
                due.push(version);
            }
        }
    }

    fn check_image(&self, crash: Moment, image: &[u8], promised: &[Vec<Version>]) -> Result<(), String> {
        for ((sector, bytes), due) in (0..).zip(image.chunks_exact(SECTOR)).zip(promised) {
            // Each word of a sector holds the request's number.
            if bytes[8..] != bytes[..SECTOR - 8] {
                return Err(format!("sector {sector} is mixed at moment {crash}"));
            }
            let found = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as Version;
            if !self.may_be_left(sector, found, due, crash) {
                return Err(format!(
                    "at moment {crash} sector {sector} may hold request {found}, promised: {due:?}"
                ));
            }
        }
        Ok(())
    }

    /// Zeroes may come from any request that zeroes, and from the initial image.
    fn may_be_left(&self, sector: u64, found: Version, due: &[Version], crash: Moment) -> bool {
        let requests = &self.history.requests;
        let wrote = |version: &Version| {
            let request = &requests[version - 1];
            let is_zero = request.deed == crash_model::Deed::Zero;
            request.sectors.contains(&sector) && request.sent <= crash && is_zero == (found == 0)
        };
        let sources = if found == 0 { 0..=requests.len() } else { found..=found.min(requests.len()) };
        let mut sources =
            sources.rev().filter(|&version| if version == 0 { found == 0 } else { wrote(&version) });
        sources.any(|source| !due.iter().any(|&due| due != source && self.history.is_older(source, due)))
    }
}

/// Applies the call to the image, in the sectors that `reaches` selects.
fn apply(event: &Event, image: &mut [u8], mut reaches: impl FnMut(usize) -> bool) {
    let (start, len) = match &event.deed {
        Deed::Write { offset_bytes, bytes } => (*offset_bytes as usize, bytes.len()),
        Deed::Zero(range) => (range.start as usize, (range.end - range.start) as usize),
        Deed::Sync => return,
    };
    assert!(
        start.is_multiple_of(SECTOR) && len.is_multiple_of(SECTOR),
        "torn inside a sector: {start}, {len}"
    );
    for at in (0..len).step_by(SECTOR).filter(|at| reaches(*at)) {
        let sector = &mut image[start + at..start + at + SECTOR];
        match &event.deed {
            Deed::Write { bytes, .. } => sector.copy_from_slice(&bytes[at..at + SECTOR]),
            _ => sector.fill(0),
        }
    }
}

/// Engines that do not need the host's page cache, and their cache modes. `mmap` writes whenever the kernel chooses,
/// which could deadlock with a file system in the same process; `durability_model.rs` tests it.
const ENGINES: [(EngineKind, &[CacheMode]); 5] = [
    (EngineKind::IoUring, &SAFE),
    (EngineKind::LinuxAio, &[CacheMode::None, CacheMode::Directsync]),
    (EngineKind::PosixAio, &SAFE),
    (EngineKind::Threads, &SAFE),
    (EngineKind::Sync, &SAFE),
];
const SAFE: [CacheMode; 4] =
    [CacheMode::None, CacheMode::Writeback, CacheMode::Writethrough, CacheMode::Directsync];

#[test]
fn every_image_that_a_power_loss_may_leave_keeps_what_the_guest_was_promised() {
    let mut all = Checked::default();
    for (kind, modes) in ENGINES {
        if let Err(error) = make(kind, &EngineConfig::default()) {
            assert_eq!(error.kind(), std::io::ErrorKind::Unsupported, "{kind}");
            skip_part(Reason::NoEngine(kind.to_string()), error);
            continue;
        }
        for &cache in modes {
            for seed in 0..sizes::POWER_LOSS_SEEDS.now() {
                let Some(run) = load(kind, cache, seed, false) else { return };
                let checked =
                    run.check(seed).unwrap_or_else(|broken| panic!("{kind}, {cache}, seed {seed}: {broken}"));
                assert!(checked.promises > 0 && checked.in_doubt > 0, "{kind}, {cache}: nothing to check");
                all.prefixes += checked.prefixes;
                all.images += checked.images;
                all.promises += checked.promises;
                all.in_doubt += checked.in_doubt;
            }
            println!("up to {kind}, {cache}: {all:?}");
        }
    }
    println!("power loss: {all:?}");
}

/// To the host, a server that omits its syncs looks like a host that ignores them.
#[test]
fn server_that_forgets_its_syncs_is_noticed_in_every_mode() {
    for cache in SAFE {
        let Some(run) = load(EngineKind::Threads, cache, 1, true) else { return };
        assert!(run.check(1).is_err(), "{cache}");
    }
}

/// Moves the last write before each sync behind it, as in a server that does not wait.
#[test]
fn sync_that_overtakes_a_write_is_noticed() {
    let Some(mut run) = load(EngineKind::Threads, CacheMode::Writeback, 2, false) else { return };
    let early: Vec<_> =
        run.events.windows(2).map(|pair| (pair[0].begun, pair[1].deed == Deed::Sync)).collect();
    for (event, (begun, _)) in run.events.iter_mut().skip(1).zip(early).filter(|(_, (_, is_sync))| *is_sync) {
        (event.begun, event.done) = (begun - 1, event.done);
    }
    assert!(run.check(2).is_err());
}

/// One sector in the middle of a durable write keeps its old contents.
#[test]
fn write_that_is_torn_after_it_was_promised_is_noticed() {
    let Some(mut run) = load(EngineKind::Threads, CacheMode::Directsync, 3, false) else { return };
    let torn = run.events.iter_mut().rev().find_map(|event| match &mut event.deed {
        Deed::Write { bytes, .. } if bytes.len() > 2 * SECTOR => Some(bytes),
        _ => None,
    });
    torn.expect("a long write")[SECTOR..2 * SECTOR].fill(0xee);
    assert!(run.check(3).is_err());
}
