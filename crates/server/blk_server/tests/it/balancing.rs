//! All queues start on one worker. Under load the balancer moves some of them to the other worker, and the data stays
//! correct.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use blk_server::{Balance, MoveOutcome, Server, WorkerId, WorkerOptions};
use guest_mem::GuestRange;

use crate::rig;
use crate::rig::raw_guest::connected;
use crate::rig::{Guest, MIB, Options, PATIENCE, Rig, eventually, feature, header_bytes, kind};

const QUEUES: u16 = 4;
/// Requests in flight per queue.
const DEPTH: u64 = 16;
const SLOT_BYTES: u64 = 0x2_0000;
/// Large, so that copying keeps the worker busier than the guests.
const BLOCK: usize = 0x1_0000;
/// How often everything is read before the distribution is checked.
const READS: usize = 20;

/// Until told to stop: writes the round's number to all blocks of the queue at once, and reads it back.
fn write_and_verify(guest: &mut Guest, stop: &AtomicBool) -> u64 {
    let mut round = 0_u64;
    while !stop.load(Ordering::Relaxed) {
        round += 1;
        let words = (0..DEPTH).map(|slot| (round << 32) | (slot << 8) | u64::from(guest.index));
        let blocks: Vec<_> = words.map(|word| word.to_le_bytes().repeat(BLOCK / 8)).collect();
        for (slot, block) in (0..).zip(&blocks) {
            guest.view.store(data_of(guest, slot).addr, block).unwrap();
        }
        all_at_once(guest, kind::OUT);
        for slot in 0..DEPTH {
            guest.view.store(data_of(guest, slot).addr, &[0; BLOCK]).unwrap();
        }
        (0..READS).for_each(|_| all_at_once(guest, kind::IN));
        for (slot, block) in (0..).zip(&blocks) {
            let mut found = vec![0; BLOCK];
            guest.view.read(data_of(guest, slot).addr, &mut found).unwrap();
            assert!(found == *block, "queue {}, round {round}, slot {slot}", guest.index);
        }
    }
    round
}

/// The address of a slot: each queue has two MiB in the upper half of memory.
fn slot_of(guest: &Guest, slot: u64) -> u64 {
    8 * MIB + u64::from(guest.index) * 2 * MIB + slot * SLOT_BYTES
}

fn data_of(guest: &Guest, slot: u64) -> GuestRange {
    GuestRange { addr: slot_of(guest, slot) + 0x1000, len_bytes: BLOCK as u32 }
}

fn all_at_once(guest: &mut Guest, kind: u32) {
    for slot in 0..DEPTH {
        let header = GuestRange { addr: slot_of(guest, slot), len_bytes: 16 };
        let status = GuestRange { addr: header.addr + 0x800, len_bytes: 1 };
        let data = data_of(guest, slot);
        let sector = (u64::from(guest.index) * DEPTH + slot) * (BLOCK as u64 / 512);
        guest.view.store(header.addr, &header_bytes(kind, sector)).unwrap();
        guest.view.store(status.addr, &[0xff]).unwrap();
        let (readable, writable) = if kind == kind::OUT {
            (vec![header, data], vec![status])
        } else {
            (vec![header], vec![data, status])
        };
        guest.add(&readable, &writable);
    }
    guest.submit();
    for _ in 0..DEPTH {
        guest.next_used().expect("a request is lost");
    }
    for slot in 0..DEPTH {
        let mut status = [0xff];
        guest.view.read(slot_of(guest, slot) + 0x800, &mut status).unwrap();
        assert_eq!(status, [0]);
    }
}

/// Starts one worker with four queues, then a second worker.
fn all_queues_on_the_first_of_two_workers(balance: Balance) -> (Rig, rig::FrontEnd, Vec<Guest>) {
    let rig = Rig::start(Options { balance, queues: QUEUES, ..Options::buffered() });
    let front_end = connected(&rig, feature::USUAL);
    let guests = (0..QUEUES).map(|index| front_end.start_queue(index, 256, feature::USUAL)).collect();
    let added = server(&rig).add_worker(WorkerOptions::default()).unwrap();
    assert_eq!(added, WorkerId(1));
    (rig, front_end, guests)
}

fn server(rig: &Rig) -> &Server {
    rig.server.as_ref().unwrap()
}

fn places(rig: &Rig) -> Vec<u32> {
    server(rig).report().disks[0].queues.iter().map(|queue| queue.worker.0).collect()
}

/// Runs `watch` while all guests work, and returns its result.
fn under_load<T>(guests: Vec<Guest>, watch: impl FnOnce() -> T) -> T {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let stop = &stop;
        let works = |mut guest: Guest| scope.spawn(move || write_and_verify(&mut guest, stop));
        let guests: Vec<_> = guests.into_iter().map(works).collect();
        let seen = watch();
        stop.store(true, Ordering::Relaxed);
        for guest in guests {
            assert!(guest.join().unwrap() > 0);
        }
        seen
    })
}

#[test]
fn queues_under_load_on_one_worker_are_given_to_the_other_and_data_stays_right() {
    let (rig, _front_end, guests) = all_queues_on_the_first_of_two_workers(Balance::Auto);
    let moved = under_load(guests, || {
        let moved = eventually(|| places(&rig).contains(&1));
        // Queues that have moved continue to work.
        std::thread::sleep(Duration::from_secs(1));
        moved
    });
    let balance = server(&rig).report().balance.unwrap();
    assert!(moved, "{balance:?}");
    assert!(places(&rig).contains(&0), "{:?}: {balance:?}", places(&rig));
    let decision = &balance.decisions[0];
    assert_eq!((decision.from, decision.to), (WorkerId(0), WorkerId(1)));
    assert!(decision.why.contains("% of a CPU"), "{decision:?}");
    assert!(
        balance.decisions.iter().any(|one| matches!(one.outcome, MoveOutcome::Moved { .. })),
        "{balance:?}"
    );
}

#[test]
fn queues_attached_by_hand_stay_on_the_busy_worker() {
    let (rig, _front_end, guests) = all_queues_on_the_first_of_two_workers(Balance::Auto);
    for queue in 0..QUEUES {
        server(&rig).attach("test0", queue, WorkerId(0), PATIENCE).unwrap();
    }
    under_load(guests, || std::thread::sleep(Duration::from_secs(2)));
    let balance = server(&rig).report().balance.unwrap();
    assert_eq!((places(&rig), balance.decisions.len()), (vec![0; 4], 0), "{balance:?}");
}

#[test]
fn server_that_is_not_balanced_moves_nothing_and_says_so() {
    let (rig, _front_end, guests) = all_queues_on_the_first_of_two_workers(Balance::Off);
    under_load(guests, || std::thread::sleep(Duration::from_secs(2)));
    assert_eq!(places(&rig), [0; 4]);
    assert!(server(&rig).report().balance.is_none());
}

#[test]
fn balanced_server_under_load_stops_cleanly() {
    let (mut rig, front_end, guests) = all_queues_on_the_first_of_two_workers(Balance::Auto);
    under_load(guests, || std::thread::sleep(Duration::from_secs(1)));
    assert!(rig.stop().is_clean());
    assert!(front_end.is_closed());
}
