//! Front-ends that try to get around the limits of their disk, or to make the server wait for them.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use blk_server::{DiskLimits, LimitSettings};
use guest_mem::{GuestMemory, GuestRange, MemoryView};
use virtqueue::LogArea;

use crate::rig::passed::{add_transfer, memfd, region, serves};
use crate::rig::workers::{guests, server};
use crate::rig::{
    CALM, FrontEnd, Guest, MIB, Options, Rig, code, eventually, feature, header_bytes, kind, ready,
    segment_bytes, vring_state,
};

const LOG_ENTRIES: u16 = 256;
const RUN: Duration = Duration::from_millis(600);
/// The front-end learns no requests that the server left in the log.
const WITHOUT_BASE_INFLIGHT: u64 = 0xffff;

fn limit(rig: &Rig, values: &[(&str, u64)]) {
    let mut own = LimitSettings::default();
    values.iter().for_each(|&(key, value)| assert!(own.set(key, Some(value))));
    server(rig).limit_disk("test0", DiskLimits { own, ..DiskLimits::default() }).unwrap();
}

/// An in-flight log that a front-end fabricates.
struct Fabricated {
    view: MemoryView,
    fd: OwnedFd,
    bytes: u64,
}

impl Fabricated {
    fn new() -> Self {
        let bytes = LogArea::bytes(1, LOG_ENTRIES, false);
        let fd = memfd(bytes);
        let view = MemoryView::new(Arc::new(GuestMemory::new(vec![region(&fd, 0, bytes, 0)]).unwrap()));
        Self { view, fd, bytes }
    }

    /// A front-end with this log. The server must finish what the log lists before a ring stops.
    fn front_end(&self, rig: &Rig) -> FrontEnd {
        let mut front_end = rig.connect();
        let offered = front_end.ask_u64(code::GET_FEATURES);
        let protocol = front_end.ask_u64(code::GET_PROTOCOL_FEATURES) & WITHOUT_BASE_INFLIGHT;
        front_end.send(code::SET_PROTOCOL_FEATURES, &protocol.to_ne_bytes(), &[]);
        front_end.ok(code::SET_OWNER, &[], &[]);
        front_end.ok(code::SET_FEATURES, &(feature::USUAL & offered).to_ne_bytes(), &[]);
        let sizes = [1, LOG_ENTRIES, 0, 0].into_iter().flat_map(u16::to_ne_bytes);
        let body: Vec<_> = [self.bytes, 0].into_iter().flat_map(u64::to_ne_bytes).chain(sizes).collect();
        front_end.ok(code::SET_INFLIGHT_FD, &body, &[self.fd.as_fd()]);
        front_end.share_memory(16 * MIB);
        front_end
    }

    fn set(&self, word: u64, value: u64) {
        self.view.store(8 * word, &value.to_le_bytes()).unwrap();
    }

    /// Starts the queue with `count` reads that "the last server" had begun.
    fn start(&self, front_end: &FrontEnd, count: u64, bytes: u32) -> Guest {
        let place = front_end.new_guest(0, LOG_ENTRIES, feature::USUAL);
        place.view.store(0, &[0; 0xb000]).unwrap();
        let mut guest = front_end.new_guest(0, LOG_ENTRIES, feature::USUAL);
        for _ in 0..count {
            add_transfer(&mut guest, kind::IN, 0, 8 * MIB, bytes);
        }
        guest.ring.publish();
        (0..u64::from(LOG_ENTRIES) * 2 + 2).for_each(|word| self.set(word, 0));
        for number in 0..count {
            let mut head = [0; 2];
            guest.view.read(0x8000 + 4 + 2 * number, &mut head).unwrap();
            let entry = 2 + 2 * u64::from(u16::from_le_bytes(head));
            self.set(entry + 1, number);
            self.set(entry, 1);
        }
        self.set(1, 1 | u64::from(LOG_ENTRIES) << 16);
        front_end.announce_queue(&guest);
        front_end.ok(code::SET_VRING_ENABLE, &vring_state(0, 1), &[]);
        guest
    }
}

/// A guest with requests in its log; some wait for days.
fn begun_and_waiting(options: Options) -> (Rig, FrontEnd, Guest) {
    let rig = Rig::start(options);
    limit(&rig, &[("bps", 1)]);
    let log = Fabricated::new();
    let front_end = log.front_end(&rig);
    let mut guest = log.start(&front_end, 4, 512 << 10);
    assert!((0..2).all(|_| guest.next_used().is_some()));
    std::thread::sleep(CALM);
    (rig, front_end, guest)
}

#[test]
fn stop_of_a_queue_with_begun_requests_that_wait_does_not_wait_for_the_limits() {
    let (rig, front_end, _guest) = begun_and_waiting(Options::buffered());
    let took = std::thread::scope(|scope| {
        let stop = scope.spawn(|| front_end.stop_queue(0));
        let begin = Instant::now();
        while !stop.is_finished() && begin.elapsed() < Duration::from_secs(5) {
            std::thread::sleep(Duration::from_millis(5));
        }
        let took = begin.elapsed();
        limit(&rig, &[]); // ends the wait
        took
    });
    assert!(took < Duration::from_secs(5), "the stop waits for a gate that opens in days");
}

#[test]
fn disk_with_begun_requests_that_wait_can_be_removed_when_its_front_end_is_gone() {
    let (rig, front_end, _guest) = begun_and_waiting(Options { disks: 2, ..Options::buffered() });
    drop(front_end);
    let removed = server(&rig).remove_disk("test0", true, Duration::from_secs(2));
    if removed.is_err() {
        limit(&rig, &[]); // ends the wait
    }
    removed.unwrap();
}

#[test]
fn front_end_that_lists_requests_in_its_log_and_stops_gets_no_more_than_its_limit() {
    const RATE: f64 = 10.0;
    let rig = Rig::start(Options::buffered());
    limit(&rig, &[("iops", 10)]);
    let log = Fabricated::new();
    let front_end = log.front_end(&rig);
    let (begin, mut answered, mut rounds) = (Instant::now(), 0, 0);
    while begin.elapsed() < RUN {
        let mut guest = log.start(&front_end, 64, 4096);
        front_end.stop_queue(0);
        answered += std::iter::from_fn(|| guest.ring.pop_used().unwrap()).count() as u64;
        rounds += 1;
    }
    assert_eq!(answered, 64 * rounds);
    let read = rig.report_of(0).totals.counters.reads;
    // The upper bound: what the rate allows, a debt of one second, the credit, a turn, a quantum and a request.
    let allowed = RATE * (begin.elapsed().as_secs_f64() + 1.0) + 4.0;
    assert!(rounds > 2 && read >= 1 && read as f64 <= allowed, "{read} of {answered}, at most {allowed}");
}

/// Adds a read of `count` times the same 8 MiB of memory.
fn add_long_read(guest: &mut Guest, count: usize) {
    let (header, status) = (guest.area() + 0x8_0000, guest.area() + 0x8_0100);
    guest.view.store(header, &header_bytes(kind::IN, 0)).unwrap();
    let range = |addr, len_bytes| GuestRange { addr, len_bytes };
    let data = std::iter::repeat_n(range(8 * MIB, 8 << 20), count);
    let writable: Vec<_> = data.chain([range(status, 1)]).collect();
    guest.add(&[range(header, 16)], &writable);
    guest.submit();
}

#[test]
fn long_request_of_one_queue_is_paid_for_before_another_queue_starts_one() {
    let rig = Rig::start(Options { image_bytes: 256 * MIB, ..Options::buffered() });
    limit(&rig, &[("bps", 1)]);
    let mut front_end = rig.connect();
    let mut guests = guests(&mut front_end, feature::USUAL, 4);
    guests.iter_mut().for_each(|guest| add_long_read(guest, 16));
    let read = || rig.report_of(0).totals.counters.read_bytes;
    assert!(eventually(|| read() >= 128 * MIB));
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(read(), 128 * MIB, "at one byte per second");
    // A change of the limits, as when a disk joins its group, does not cancel the debt: at the new rate, paying it
    // takes 30 s.
    limit(&rig, &[("bps", 4 * MIB)]);
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(read(), 128 * MIB);
    limit(&rig, &[]);
    assert!(guests[1..].iter_mut().all(|guest| guest.next_used().is_some()));
}

#[test]
fn request_that_is_longer_than_any_real_one_is_refused_on_a_disk_with_limits() {
    let rig = Rig::start(Options { image_bytes: 2048 * MIB, ..Options::buffered() });
    limit(&rig, &[("bps", 1)]);
    let (_front_end, mut guest) = ready(&rig, feature::USUAL);
    add_long_read(&mut guest, 129);
    assert!(guest.next_used().is_some());
    assert!(serves(&mut guest), "it costs nothing");
    assert_eq!(rig.report_of(0).totals.counters.errors, 1);
}

#[test]
fn zeroes_count_as_bytes_because_a_file_system_may_have_to_write_them() {
    let rig = Rig::start(Options::buffered());
    limit(&rig, &[("bps-write", 1)]);
    let (_front_end, mut guest) = ready(&rig, feature::USUAL);
    let zeroed = guest.request(kind::WRITE_ZEROES, 0, &segment_bytes(0, 16 << 11, 0), 0).status;
    assert_eq!(zeroed, Some(0));
    add_transfer(&mut guest, kind::OUT, 0, 8 * MIB, 4096);
    guest.submit();
    std::thread::sleep(CALM);
    assert!(guest.ring.pop_used().unwrap().is_none(), "16 MiB are not paid for");
    server(&rig).limit_disk("test0", DiskLimits::default()).unwrap();
    assert!(guest.next_used().is_some());
}
