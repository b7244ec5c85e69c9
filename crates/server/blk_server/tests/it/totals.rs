//! A disk's totals and latencies outlive its queues, sessions and workers, and its slow requests are remembered.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use blk_server::{DiskTotals, ParkPolicy, ParkWhat, SlowRequest, WorkerId, WorkerOptions};
use io_engine::{Fault, Verb, When};
use rustix::io::Errno;

use crate::rig::format::{Format, on_both_formats};
use crate::rig::fuse_disk::FuseDisk;
use crate::rig::passed::{add_transfer, faulty, hold, let_go, serves};
use crate::rig::workers::ENOUGH;
use crate::rig::{FrontEnd, Guest, MIB, Options, Rig, eventually, feature, kind, ready};

on_both_formats! {
    totals_grow_on_when_a_guest_stops_its_queue_and_when_it_leaves,
}

const LONG_NS: u64 = 20_000_000;

fn totals(rig: &Rig) -> DiskTotals {
    rig.report_of(0).totals
}

/// The numbers of reads, writes and flushes, as counted and in the histograms.
fn counts(totals: &DiskTotals) -> [u64; 6] {
    let (counters, latency) = (&totals.counters, &totals.latency);
    let known = [latency.read.count(), latency.write.count(), latency.flush.count()];
    [counters.reads, counters.writes, counters.flushes, known[0], known[1], known[2]]
}

/// Waits until the totals are these; the counters change shortly after the guest sees a completion.
fn reaches(rig: &Rig, expected: [u64; 6]) -> bool {
    eventually(|| counts(&totals(rig)) == expected)
}

fn totals_grow_on_when_a_guest_stops_its_queue_and_when_it_leaves(ring: Format) {
    let rig = Rig::start(Options::default());
    let (front_end, mut guest) = ready(&rig, ring.usual());
    assert!(serves(&mut guest) && guest.request(kind::FLUSH, 0, &[], 0).status == Some(0));
    assert!(reaches(&rig, [1, 1, 1, 1, 1, 1]));
    front_end.stop_queue(0);
    assert!(rig.report_of(0).queues.is_empty());
    assert!(reaches(&rig, [1, 1, 1, 1, 1, 1]), "lost with the queue");
    let mut guest = front_end.start_queue(0, 256, ring.usual());
    assert!(serves(&mut guest));
    assert!(reaches(&rig, [2, 2, 1, 2, 2, 1]));
    drop((front_end, guest));
    assert!(eventually(|| rig.report_of(0).sessions == 0));
    assert!(reaches(&rig, [2, 2, 1, 2, 2, 1]), "lost with the session");
    let (_front_end, mut guest) = ready(&rig, ring.usual());
    assert!(serves(&mut guest));
    assert!(reaches(&rig, [3, 3, 1, 3, 3, 1]));
    let totals = totals(&rig);
    assert_eq!((totals.counters.read_bytes, totals.counters.written_bytes), (3 * 4096, 3 * 4096));
    assert_eq!((totals.counters.in_flight, totals.counters.errors), (0, 0));
}

#[test]
fn totals_grow_on_when_the_queue_moves_and_its_worker_is_removed() {
    let rig = Rig::start(Options { workers: 2, ..Options::default() });
    let (_front_end, mut guest) = ready(&rig, feature::USUAL);
    let server = rig.running();
    for worker in [1, 0, 1] {
        assert!(serves(&mut guest));
        server.attach("test0", 0, WorkerId(worker), ENOUGH).unwrap();
    }
    assert!(serves(&mut guest));
    let third = server.add_worker(WorkerOptions::default()).unwrap();
    server.remove_worker(WorkerId(1), ENOUGH).unwrap();
    server.remove_worker(WorkerId(0), ENOUGH).unwrap();
    assert_eq!(rig.report_of(0).queues[0].worker, third);
    assert!(serves(&mut guest));
    assert!(reaches(&rig, [5, 5, 0, 5, 5, 0]), "{:?}", counts(&totals(&rig)));
    assert!(totals(&rig).counters.moves >= 4);
}

#[test]
fn totals_begin_anew_with_a_disk_of_the_same_name() {
    let rig = Rig::start(Options::default());
    rig.add(1).unwrap();
    let (front_end, mut guest) = rig.guest_of(1);
    assert!(serves(&mut guest));
    assert!(eventually(|| rig.report_of(1).totals.counters.reads == 1));
    drop((front_end, guest));
    rig.remove(1).unwrap();
    rig.add(1).unwrap();
    assert_eq!(rig.report_of(1).totals, DiskTotals::default());
}

/// A guest whose read takes [`LONG_NS`] or longer.
fn slow_read(rig: &Rig, handle: &io_engine::FakeHandle, guest: &mut Guest, sector: u64) {
    hold(handle);
    add_transfer(guest, kind::IN, sector, 8 * MIB, 4096);
    guest.submit();
    assert!(eventually(|| handle.hanging() == 1));
    std::thread::sleep(Duration::from_nanos(LONG_NS));
    let_go(handle);
    guest.next_used().expect("an answer");
    assert!(eventually(|| totals(rig).counters.in_flight == 0));
}

fn latest(rig: &Rig) -> Vec<SlowRequest> {
    rig.running().slow_requests("test0").unwrap().1
}

fn slow_bed() -> (Rig, io_engine::FakeHandle, FrontEnd, Guest) {
    let (options, handle) = faulty();
    let rig = Rig::start(options);
    let (front_end, guest) = ready(&rig, feature::USUAL);
    (rig, handle, front_end, guest)
}

#[test]
fn slow_request_shows_in_the_histogram_and_is_remembered_only_beyond_the_limit() {
    let (rig, handle, _front_end, mut guest) = slow_bed();
    slow_read(&rig, &handle, &mut guest, 8);
    let read = totals(&rig).latency.read;
    assert!(read.max_ns >= LONG_NS && read.sum_ns >= LONG_NS && read.quantile_ns(0.5) >= LONG_NS, "{read:?}");
    assert_eq!((latest(&rig), totals(&rig).counters.slow), (vec![], 0), "there is no limit");
    rig.running().set_slow_limit("test0", Some(Duration::from_nanos(LONG_NS))).unwrap();
    slow_read(&rig, &handle, &mut guest, 16);
    let [
        SlowRequest {
            queue: 0, kind: "read", sector: 16, bytes: 4096, took, tries: 1, failed: false, ..
        },
    ] = latest(&rig)[..]
    else {
        panic!("{:?}", latest(&rig))
    };
    assert!(took >= Duration::from_nanos(LONG_NS), "{took:?}");
    assert_eq!(totals(&rig).counters.slow, 1);
    rig.running().set_slow_limit("test0", None).unwrap();
    slow_read(&rig, &handle, &mut guest, 24);
    assert_eq!(latest(&rig).len(), 1);
}

#[test]
fn time_for_which_a_request_is_parked_is_part_of_its_latency() {
    let (options, handle) = faulty();
    let park = Some(ParkPolicy { what: ParkWhat::Any, retry_after: None });
    let rig = Rig::start(Options { park, ..options });
    let (_front_end, mut guest) = ready(&rig, feature::USUAL);
    rig.running().set_slow_limit("test0", Some(Duration::from_nanos(LONG_NS))).unwrap();
    handle.inject(When::Verb(Verb::Write), Fault::Errno(Errno::NOSPC), 1);
    add_transfer(&mut guest, kind::OUT, 8, 8 * MIB, 4096);
    guest.submit();
    assert!(eventually(|| totals(&rig).counters.parked == 1));
    std::thread::sleep(Duration::from_nanos(LONG_NS));
    assert_eq!(rig.running().resume_disk("test0", ENOUGH).unwrap(), 1);
    guest.next_used().expect("an answer");
    assert!(eventually(|| totals(&rig).counters.writes == 1));
    let DiskTotals { counters, latency } = totals(&rig);
    assert!(counters.parked_time >= Duration::from_nanos(LONG_NS), "{counters:?}");
    assert!(latency.write.max_ns >= LONG_NS && latency.write.count() == 1, "{latency:?}");
    assert_eq!(latest(&rig).iter().map(|slow| slow.tries).collect::<Vec<_>>(), [2]);
}

#[test]
fn requests_that_a_file_system_delays_are_slow_requests() {
    let delay_ns = Arc::new(AtomicU64::new(0));
    // The file system reads the clock during each write.
    let clock = Arc::clone(&delay_ns);
    let clock = move || {
        std::thread::sleep(Duration::from_nanos(clock.load(Ordering::Relaxed)));
        0
    };
    let Some(disk) = FuseDisk::mount(4 << 20, Arc::new(clock)) else { return };
    let rig = Rig::start(Options { existing: Some(disk.path()), ..Options::default() });
    let (_front_end, mut guest) = ready(&rig, feature::USUAL);
    assert!(serves(&mut guest));
    rig.running().set_slow_limit("test0", Some(Duration::from_nanos(LONG_NS))).unwrap();
    delay_ns.store(LONG_NS, Ordering::Relaxed);
    assert_eq!(guest.write(128, &[7; 4096]).status, Some(0));
    delay_ns.store(0, Ordering::Relaxed);
    assert!(eventually(|| totals(&rig).counters.slow >= 1));
    let slow = latest(&rig);
    assert!(slow.iter().any(|slow| (slow.kind, slow.sector) == ("write", 128)), "{slow:?}");
    drop((guest, rig));
}
