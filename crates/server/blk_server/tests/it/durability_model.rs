//! Every engine in every cache mode keeps its promises after a crash, whatever the crash leaves on the disk. Other
//! tests check that the model detects a broken promise.
//!
//! `random guest (rig/workload.rs) → server → engine's record → crash model (rig/crash_model.rs)`
//!
//! `BAREBLK_LONG=1` tries many more seeds.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::io::ErrorKind;
use std::path::PathBuf;

use disk_image::CacheMode;
use io_engine::{EngineConfig, EngineKind, Fault, Recorder, Verb, When, make};
use rustix::io::{Errno, ReadWriteFlags};
use xtask::skip::{Reason, skip};

use crate::rig::Options;
use crate::rig::crash_model::{Broken, Checked, Deed, History};
use crate::rig::raw_guest::faulty;
use crate::rig::workload;
use crate::rig::workload::{Dice, Mishap, Plan, run};

// ---- every engine

/// The cache modes that an engine supports, and the folder that its image needs.
fn ground(kind: EngineKind) -> (&'static [CacheMode], Option<PathBuf>) {
    const BUFFERED: [CacheMode; 3] = [CacheMode::Writeback, CacheMode::Writethrough, CacheMode::Unsafe];
    match kind {
        EngineKind::LinuxAio => (&[CacheMode::None, CacheMode::Directsync], None),
        EngineKind::Mmap => (&BUFFERED, Some("/dev/shm".into())),
        EngineKind::IoUring | EngineKind::PosixAio | EngineKind::Threads | EngineKind::Sync => {
            (&CacheMode::ALL, None)
        }
        EngineKind::Nbd | EngineKind::Rbd => unreachable!("these disks are files"),
    }
}

/// Other engines need nothing that a kernel or a C library could lack.
fn depends_on_host(kind: EngineKind) -> bool {
    matches!(kind, EngineKind::IoUring | EngineKind::LinuxAio | EngineKind::PosixAio)
}

fn options(cache: CacheMode) -> Options {
    let recorder = Some(Recorder::new());
    Options { recorder, ..Options::cached(cache) }
}

fn history_of(kind: EngineKind, cache: CacheMode, folder: Option<PathBuf>, seed: u64) -> History {
    let mut options = Options { folder, ..options(cache) };
    let config = EngineConfig { recorder: options.recorder.clone(), ..EngineConfig::default() };
    options.engine = Some(Box::new(move || make(kind, &config)));
    run(Plan { options, fake: None, mishaps: vec![], switches: true, seed })
}

/// Checks the history. It must contain promises and something to lose, or the check proves nothing.
fn holds(history: &History) -> Checked {
    let checked = history.check().unwrap_or_else(|broken| panic!("{}", explain(history, &broken)));
    let promised = checked.promises > 0 && checked.leftovers > checked.promises;
    assert!(promised || history.promises_nothing, "{checked:?}");
    checked
}

fn explain(history: &History, broken: &Broken) -> String {
    let request = |version: usize| version.checked_sub(1).map(|at| &history.requests[at]);
    let touches = |call: &&io_engine::Record| {
        let sectors = call.offset_bytes / 512..(call.offset_bytes + call.len_bytes).div_ceil(512);
        call.verb == Verb::Sync || sectors.contains(&broken.sector)
    };
    let calls: Vec<_> = history.calls.iter().filter(touches).collect();
    let (left, promised) = (request(broken.left), request(broken.promised));
    format!("{broken:?}\nleft: {left:?}\npromised: {promised:?}\ncalls: {calls:#?}")
}

fn engine_keeps_its_promises(kind: EngineKind) {
    match make(kind, &EngineConfig::default()) {
        Err(error) if depends_on_host(kind) && error.kind() == ErrorKind::Unsupported => {
            return skip(Reason::NoEngine(kind.to_string()), error);
        }
        made => drop(made.unwrap()),
    }
    let (modes, folder) = ground(kind);
    for &cache in modes {
        for seed in 0..xtask::sizes::DURABILITY_SEEDS.now() {
            let checked = holds(&history_of(kind, cache, folder.clone(), seed));
            println!("{kind}, {cache}, seed {seed}: {checked:?}");
        }
    }
}

#[test]
fn io_uring_keeps_its_promises() {
    engine_keeps_its_promises(EngineKind::IoUring);
}

#[test]
fn linux_aio_keeps_its_promises() {
    engine_keeps_its_promises(EngineKind::LinuxAio);
}

#[test]
fn posix_aio_keeps_its_promises() {
    engine_keeps_its_promises(EngineKind::PosixAio);
}

#[test]
fn threads_keep_their_promises() {
    engine_keeps_its_promises(EngineKind::Threads);
}

#[test]
fn sync_keeps_its_promises() {
    engine_keeps_its_promises(EngineKind::Sync);
}

#[test]
fn mmap_keeps_its_promises() {
    engine_keeps_its_promises(EngineKind::Mmap);
}

// ---- the fake engine with faults

const SAFE_MODES: [CacheMode; 4] =
    [CacheMode::None, CacheMode::Writeback, CacheMode::Writethrough, CacheMode::Directsync];

/// A run whose calls complete in any order, with these faults.
fn with_mishaps(cache: CacheMode, seed: u64, mishaps: Vec<Mishap>) -> History {
    let (options, fake) = faulty(options(cache));
    fake.shuffle(seed);
    run(Plan { options, fake: Some(fake), mishaps, switches: true, seed })
}

fn mishap(step: usize, when: When, fault: Fault) -> Mishap {
    Mishap { step, when, fault }
}

/// Faults from the first step on, so that about one call in `every` is hit.
fn scattered(seed: u64, every: u64, fault: Fault) -> Vec<Mishap> {
    let mut dice = Dice::new(seed);
    (0..400 / every).map(|n| mishap(0, When::Call(n * every + dice.below(every)), fault)).collect()
}

fn every_mode_and_seed(mishaps: impl Fn(u64) -> Vec<Mishap>) -> Vec<History> {
    let seeds = 0..xtask::sizes::DURABILITY_SEEDS.now();
    let runs = seeds.flat_map(|seed| SAFE_MODES.map(|cache| (cache, seed)));
    runs.map(|(cache, seed)| with_mishaps(cache, seed, mishaps(seed))).collect()
}

/// The number of calls in all histories for whose result `is_meant` is true.
fn results(histories: &[History], is_meant: fn(&io_engine::Record, i32) -> bool) -> usize {
    let calls = histories.iter().flat_map(|history| &history.calls);
    calls.filter(|call| call.completed.is_some_and(|(_, result)| is_meant(call, result))).count()
}

#[test]
fn calls_that_complete_in_any_order_break_no_promise() {
    every_mode_and_seed(|_| vec![]).iter().for_each(|history| _ = holds(history));
}

/// If a request were acknowledged before its last call completed, the model would detect it here.
#[test]
fn calls_that_hang_for_a_while_break_no_promise() {
    every_mode_and_seed(|seed| scattered(seed, 5, Fault::Hang)).iter().for_each(|history| _ = holds(history));
}

#[test]
fn short_transfers_break_no_promise() {
    every_mode_and_seed(|seed| scattered(seed, 4, Fault::Short(1024)))
        .iter()
        .for_each(|history| _ = holds(history));
}

#[test]
fn calls_to_be_made_again_break_no_promise() {
    let again = Fault::Errno(Errno::AGAIN);
    let histories = every_mode_and_seed(|seed| scattered(seed, 4, again));
    histories.iter().for_each(|history| _ = holds(history));
    assert!(results(&histories, |_, result| result == -Errno::AGAIN.raw_os_error()) > 8);
}

#[test]
fn file_system_without_holes_breaks_no_promise() {
    let refused = |_| {
        let when = When::Verb(Verb::Allocate);
        (0..20).map(|_| mishap(0, when.clone(), Fault::Errno(Errno::OPNOTSUPP))).collect()
    };
    let histories = every_mode_and_seed(refused);
    histories.iter().for_each(|history| _ = holds(history));
    assert!(results(&histories, |_, result| result == -Errno::OPNOTSUPP.raw_os_error()) > 8);
}

fn failing_sync(seed: u64) -> Vec<Mishap> {
    let mut mishaps = scattered(seed, 7, Fault::Hang);
    mishaps.push(mishap(60, When::Verb(Verb::Sync), Fault::Errno(Errno::IO)));
    mishaps
}

#[test]
fn sync_that_fails_ends_all_promises_but_breaks_none() {
    let histories = every_mode_and_seed(failing_sync);
    histories.iter().for_each(|history| _ = holds(history));
    assert!(histories.iter().all(|history| failed_sync(history).is_some()));
}

#[test]
fn durable_writes_that_fail_break_no_promise() {
    let failing = |seed| {
        let mut mishaps = scattered(seed, 7, Fault::Hang);
        mishaps.push(mishap(60, When::Verb(Verb::Write), Fault::Errno(Errno::IO)));
        mishaps
    };
    let histories = every_mode_and_seed(failing);
    histories.iter().for_each(|history| _ = holds(history));
    assert!(results(&histories, |_, result| result == -Errno::IO.raw_os_error()) == histories.len());
}

// ---- broken promises that the model detects

/// Runs without faults. Returns whether the model still accepts the history after `change`.
fn breaks(cache: CacheMode, change: fn(&mut History)) -> bool {
    let mut history = with_mishaps(cache, 1, vec![]);
    holds(&history);
    change(&mut history);
    history.check().is_err()
}

fn dsync() -> i32 {
    ReadWriteFlags::DSYNC.bits().cast_signed()
}

/// When the first sync failed.
fn failed_sync(history: &History) -> Option<u64> {
    let failed =
        |call: &&io_engine::Record| call.verb == Verb::Sync && call.completed.is_some_and(|c| c.1 < 0);
    history.calls.iter().find(failed)?.completed.map(|(moment, _)| moment)
}

#[test]
fn writes_without_their_durable_flag_are_noticed() {
    let drop_flags = |history: &mut History| history.calls.iter_mut().for_each(|call| call.flags &= !dsync());
    assert_eq!(SAFE_MODES.map(|cache| breaks(cache, drop_flags))[2..], [true; 2]);
}

#[test]
fn syncs_left_out_are_noticed_in_every_mode() {
    let drop_syncs = |history: &mut History| history.calls.retain(|call| call.verb != Verb::Sync);
    assert_eq!(SAFE_MODES.map(|cache| breaks(cache, drop_syncs)), [true; 4]);
}

/// Moves each sync's start before the write that completed last before it.
fn hurry_syncs(history: &mut History) {
    let writes = history.calls.iter().filter(|call| call.verb == Verb::Write);
    let completions: Vec<_> = writes.filter_map(|call| call.completed).map(|(moment, _)| moment).collect();
    for sync in history.calls.iter_mut().filter(|call| call.verb == Verb::Sync) {
        let before = completions.iter().filter(|&&moment| moment < sync.issued).max();
        sync.issued = before.map_or(sync.issued, |moment| moment - 1);
    }
}

#[test]
fn syncs_that_start_before_a_write_has_completed_are_noticed() {
    assert!(breaks(CacheMode::None, hurry_syncs) && breaks(CacheMode::Writeback, hurry_syncs));
}

/// Moves the acknowledgement of each write to the moment at which the guest sent it.
fn answer_early(history: &mut History) {
    for request in history.requests.iter_mut().filter(|request| request.deed == Deed::Write) {
        request.acked = request.acked.map(|(_, ok)| (request.sent, ok));
    }
}

#[test]
fn durable_writes_answered_before_they_complete_are_noticed() {
    assert!(breaks(CacheMode::Writethrough, answer_early) && breaks(CacheMode::Directsync, answer_early));
}

#[test]
fn flushes_answered_before_they_complete_are_noticed() {
    let early = |history: &mut History| {
        for request in history.requests.iter_mut().filter(|request| request.deed == Deed::Flush) {
            request.acked = request.acked.map(|(_, ok)| (request.sent, ok));
        }
    };
    assert!(breaks(CacheMode::None, early) && breaks(CacheMode::Writeback, early));
}

/// The step before a flush that certainly covers a write.
const QUIET: usize = 59;
const _: () = assert!(workload::is_quiet(QUIET));

/// A history in which a sync fails, although the guest is told that its flush succeeded.
fn hushed_up(cache: CacheMode) -> History {
    let (options, fake) = faulty(options(cache));
    let mishaps = vec![mishap(QUIET, When::Verb(Verb::Sync), Fault::Errno(Errno::IO))];
    let mut history = run(Plan { options, fake: Some(fake), mishaps, switches: false, seed: 1 });
    holds(&history);
    let failed = failed_sync(&history).expect("the one that was injected");
    let refused = history.requests.iter_mut().filter(|request| request.deed == Deed::Flush);
    let mut refused = refused.filter_map(|flush| flush.acked.as_mut()).filter(|(acked, _)| *acked > failed);
    refused.next().expect("the flush that failed").1 = true;
    history
}

#[test]
fn failed_sync_that_the_guest_is_told_was_a_success_is_noticed() {
    assert!(hushed_up(CacheMode::Writeback).check().is_err());
    assert!(hushed_up(CacheMode::None).check().is_err());
}

/// The kernel reports success for the second sync, although the pages are lost.
#[test]
fn failed_sync_that_is_tried_again_until_it_succeeds_is_noticed() {
    let mut history = hushed_up(CacheMode::Writeback);
    let failed = failed_sync(&history).expect("the one that was injected");
    let mut again = *history.calls.iter().find(|call| call.verb == Verb::Sync).expect("a sync");
    (again.issued, again.completed) = (failed, Some((failed, 0)));
    history.calls.push(again);
    assert!(history.check().is_err());
    // Without the failed sync the model accepts the history, so nothing else breaks the promise.
    let is_success = |call: &io_engine::Record| call.completed.is_some_and(|(_, result)| result >= 0);
    history.calls.retain(|call| call.verb != Verb::Sync || is_success(call));
    assert_eq!(history.check().err(), None);
}

#[test]
fn promise_that_an_unsafe_disk_does_not_keep_would_be_noticed() {
    let mut history = with_mishaps(CacheMode::Unsafe, 1, vec![]);
    assert!(history.check().is_ok());
    history.promises_nothing = false;
    assert!(history.check().is_err());
}
