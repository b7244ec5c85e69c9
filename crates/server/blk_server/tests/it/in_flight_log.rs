//! Servers that die with requests in flight, and in-flight logs that front-ends keep or fabricate.
//!
//! The tests simulate a death: they copy the guest's memory and the log while the engine holds the requests, then stop
//! the server properly. The successor gets the copies, and an image without any of those requests. (Real deaths:
//! `bareblk/tests/it/guest_restart.rs`; deaths between any two stores: `virtqueue`.)
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

#[path = "in_flight_log/layouts.rs"]
mod layouts;

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use blk_server::WorkerId;
use guest_mem::{GuestAddress, GuestMemory, GuestRange, MemoryView};
use io_engine::{Engine, EngineConfig, FakeEngine, FakeHandle, ThreadsEngine};

use crate::rig;
use crate::rig::format::Format;
use crate::rig::passed::{
    add_transfer, faulty, hold, let_go, mappings, memfd, region, serves, take_signals, works,
};
use crate::rig::workers::wait_for_stop;
use crate::rig::{
    FrontEnd, Guest, MIB, Options, PATIENCE, Rig, code, eventually, feature, kind, vring_state,
};

const QUEUE_SIZE: u16 = 64;
const SECTORS: u64 = 8;
const BLOCK: usize = 4096;
const BOTH: [Format; 2] = [Format::Split, Format::Packed];

/// An in-flight log as a front-end keeps it.
struct Log {
    body: Vec<u8>,
    fd: OwnedFd,
}

fn inflight(mmap_bytes: u64, offset_bytes: u64, queues: u16, queue_size: u16) -> Vec<u8> {
    let sizes = [queues.to_ne_bytes(), queue_size.to_ne_bytes(), [0; 2], [0; 2]].concat();
    [&mmap_bytes.to_ne_bytes()[..], &offset_bytes.to_ne_bytes(), &sizes].concat()
}

impl Log {
    fn get(front_end: &FrontEnd, queues: u16) -> Self {
        Self::asked(front_end, queues, QUEUE_SIZE)
    }

    /// GET_INFLIGHT_FD.
    fn asked(front_end: &FrontEnd, queues: u16, queue_size: u16) -> Self {
        let mut reply = front_end.ask(code::GET_INFLIGHT_FD, &inflight(0, 0, queues, queue_size));
        Self { body: reply.body, fd: reply.fds.pop().expect("a descriptor") }
    }

    fn give(&self, front_end: &FrontEnd) {
        front_end.ok(code::SET_INFLIGHT_FD, &self.body, &[self.fd.as_fd()]);
    }

    fn bytes(&self) -> u64 {
        u64::from_ne_bytes(self.body[..8].try_into().unwrap())
    }

    fn view(&self) -> MemoryView {
        let region = region(&self.fd, 0, self.bytes(), 0);
        MemoryView::new(Arc::new(GuestMemory::new(vec![region]).unwrap()))
    }
}

fn contents(view: &MemoryView, bytes: u64) -> Vec<u8> {
    let mut out = vec![0; bytes as usize];
    view.read(0, &mut out).unwrap();
    out
}

/// A guest whose front-end keeps a log.
struct Bed {
    front_end: FrontEnd,
    guest: Guest,
    log: Log,
}

fn connect(rig: &Rig, format: Format) -> FrontEnd {
    let front_end = rig.connect();
    front_end.negotiate(format.usual());
    front_end
}

fn bed(rig: &Rig, format: Format) -> Bed {
    bed_with(rig, format, |front_end| Log::get(front_end, 1), QUEUE_SIZE)
}

fn bed_with(rig: &Rig, format: Format, log: impl FnOnce(&FrontEnd) -> Log, queue_size: u16) -> Bed {
    let mut front_end = connect(rig, format);
    let log = log(&front_end);
    log.give(&front_end);
    front_end.share_memory(16 * MIB);
    let guest = front_end.start_queue(0, queue_size, format.usual());
    Bed { front_end, guest, log }
}

fn block(number: u64) -> Vec<u8> {
    (0..BLOCK as u64).map(|at| (at % 251 + number) as u8).collect()
}

impl Bed {
    /// Sends writes of one block each, from block `first` on, and does not wait for them.
    fn begin_writes(&mut self, first: u64, count: u64) {
        for number in first..first + count {
            let addr = 8 * MIB + number * BLOCK as u64;
            self.guest.view.store(addr, &block(number)).unwrap();
            add_transfer(&mut self.guest, kind::OUT, number * SECTORS, addr, BLOCK as u32);
        }
        self.guest.submit();
    }

    /// Waits for `count` completions with status OK. The ring returns an error if a request completes twice.
    fn finish(&mut self, count: u64) {
        for _ in 0..count {
            let used = self.guest.next_used().expect("an answer");
            assert_eq!(used.written_bytes, 1);
        }
        assert!(self.guest.ring.pop_used().unwrap().is_none());
    }

    /// Copies the guest's memory and the log in one consistent state: two copies in a row must be equal.
    fn at_rest(&self) -> (Vec<u8>, Vec<u8>) {
        let log = self.log.view();
        let copy = || (contents(&self.guest.view, 16 * MIB), contents(&log, self.log.bytes()));
        let mut last = copy();
        let agree = eventually(|| {
            let before = std::mem::replace(&mut last, copy());
            before == last
        });
        assert!(agree, "memory and log do not come to rest");
        last
    }

    /// Simulates the server's death; requests in flight are not carried out.
    fn crash(self, rig: &mut Rig, let_go: impl FnOnce()) -> Crashed {
        let (memory, log) = self.at_rest();
        let_go();
        drop(self.front_end);
        rig.stop();
        self.guest.view.store(0, &memory).unwrap();
        self.log.view().store(0, &log).unwrap();
        std::fs::File::options()
            .write(true)
            .open(&rig.image)
            .unwrap()
            .write_all_at(&vec![0; 1 << 20], 0)
            .unwrap();
        take_signals(&self.guest.call);
        Crashed { guest: self.guest, log: self.log }
    }
}

struct Crashed {
    guest: Guest,
    log: Log,
}

impl Crashed {
    /// Reconnects like a front-end that has lost its back-end: with the base of the last start.
    fn reconnect(self, rig: &Rig, format: Format) -> Bed {
        let front_end = self.connect(rig, format, feature_bits);
        Self::start(&front_end, &self.guest);
        Bed { front_end, guest: self.guest, log: self.log }
    }

    fn connect(&self, rig: &Rig, format: Format, protocol: impl FnOnce(u64) -> u64) -> FrontEnd {
        let mut front_end = rig.connect();
        let offered = front_end.ask_u64(code::GET_FEATURES);
        let offered_protocol = front_end.ask_u64(code::GET_PROTOCOL_FEATURES);
        front_end.send(code::SET_PROTOCOL_FEATURES, &protocol(offered_protocol).to_ne_bytes(), &[]);
        front_end.ok(code::SET_FEATURES, &(format.usual() & offered).to_ne_bytes(), &[]);
        self.log.give(&front_end);
        front_end.share(Arc::clone(self.guest.view.memory()));
        front_end
    }

    fn start(front_end: &FrontEnd, guest: &Guest) {
        front_end.announce_queue(guest);
        front_end.ok(code::SET_VRING_ENABLE, &vring_state(0, 1), &[]);
    }
}

/// Every offered protocol feature.
fn feature_bits(offered: u64) -> u64 {
    offered
}

fn assert_written(rig: &Rig, blocks: std::ops::Range<u64>) {
    for number in blocks {
        assert!(
            rig.image_bytes(number * BLOCK as u64, BLOCK) == block(number),
            "block {number} is not there"
        );
    }
}

/// Writes that this server completed. The server counts each write shortly after the guest can see it.
fn writes(rig: &Rig) -> u64 {
    rig.server.as_ref().unwrap().report().disks[0].queues[0].counters.writes
}

#[test]
fn what_was_in_flight_when_a_server_died_is_done_by_its_successor_and_nothing_else() {
    for format in BOTH {
        let (options, handle) = faulty();
        let mut rig = Rig::start(options);
        let mut bed = bed(&rig, format);
        bed.begin_writes(0, 17);
        bed.finish(17);
        hold(&handle);
        bed.begin_writes(20, 5);
        assert!(eventually(|| handle.hanging() == 5));

        let crashed = bed.crash(&mut rig, || let_go(&handle));
        rig.start_server(Options::default());
        let mut bed = crashed.reconnect(&rig, format);
        bed.finish(5);

        assert_written(&rig, 20..25);
        assert!(
            rig.image_bytes(0, 17 * BLOCK).iter().all(|&byte| byte == 0),
            "an answered write was repeated"
        );
        assert!(eventually(|| writes(&rig) == 5), "{} writes", writes(&rig));
        assert!(serves(&mut bed.guest));
    }
}

#[test]
fn stale_base_with_nothing_in_flight_repeats_nothing() {
    for format in BOTH {
        let mut rig = Rig::start(Options::default());
        let mut bed = bed(&rig, format);
        bed.begin_writes(0, 17);
        bed.finish(17);

        let crashed = bed.crash(&mut rig, || ());
        rig.start_server(Options::default());
        let front_end = crashed.connect(&rig, format, feature_bits);
        front_end.announce_queue(&crashed.guest);
        let stale = if format == Format::Split { 16 } else { 0x8010_8010 };
        front_end.ok(code::SET_VRING_BASE, &vring_state(0, stale), &[]);
        front_end.ok(code::SET_VRING_ENABLE, &vring_state(0, 1), &[]);
        let mut bed = Bed { front_end, guest: crashed.guest, log: crashed.log };
        bed.begin_writes(30, 1);
        bed.finish(1);

        assert!(eventually(|| writes(&rig) == 1), "{} writes", writes(&rig));
        assert!(rig.image_bytes(0, 17 * BLOCK).iter().all(|&byte| byte == 0));
    }
}

/// QEMU reads the used index before the dying server's last completion, and sends base 16 although the ring says 17.
#[test]
fn stale_base_with_requests_in_flight_repeats_those_alone() {
    for format in BOTH {
        let (options, handle) = faulty();
        let mut rig = Rig::start(options);
        let mut bed = bed(&rig, format);
        bed.begin_writes(0, 17);
        bed.finish(17);
        hold(&handle);
        bed.begin_writes(20, 2);
        assert!(eventually(|| handle.hanging() == 2));

        let crashed = bed.crash(&mut rig, || let_go(&handle));
        rig.start_server(Options::default());
        let front_end = crashed.connect(&rig, format, feature_bits);
        front_end.announce_queue(&crashed.guest);
        let stale = if format == Format::Split { 16 } else { 0x8010_8010 };
        front_end.ok(code::SET_VRING_BASE, &vring_state(0, stale), &[]);
        front_end.ok(code::SET_VRING_ENABLE, &vring_state(0, 1), &[]);
        let mut bed = Bed { front_end, guest: crashed.guest, log: crashed.log };
        bed.finish(2);

        assert_written(&rig, 20..22);
        assert!(eventually(|| writes(&rig) == 2), "{} writes", writes(&rig));
        assert!(rig.image_bytes(0, 17 * BLOCK).iter().all(|&byte| byte == 0));
    }
}

/// A server died after it made completions visible. Its guest waits for an interrupt, because the last interrupt went
/// to a descriptor that the VMM had dropped.
#[test]
fn new_call_descriptor_is_signalled_for_what_the_dead_server_had_answered() {
    for format in BOTH {
        let mut rig = Rig::start(Options::default());
        let mut bed = bed(&rig, format);
        bed.begin_writes(0, 1);
        // Does not wait for the call descriptor, because the server also signals that when the queue starts.
        assert!(eventually(|| writes(&rig) == 1));

        let crashed = bed.crash(&mut rig, || ());
        rig.start_server(Options::default());
        let mut bed = crashed.reconnect(&rig, format);

        assert!(eventually(|| take_signals(&bed.guest.call) > 0));
        bed.finish(1);
        assert_eq!(writes(&rig), 0, "it was done again");
    }
}

#[test]
fn packed_ring_without_its_log_stays_stopped_after_a_death_at_work() {
    let (options, handle) = faulty();
    let mut rig = Rig::start(options);
    let mut bed = bed(&rig, Format::Packed);
    bed.begin_writes(0, 3);
    bed.finish(3);
    hold(&handle);
    bed.begin_writes(20, 2);
    assert!(eventually(|| handle.hanging() == 2));

    let mut crashed = bed.crash(&mut rig, || let_go(&handle));
    rig.start_server(Options::default());
    let front_end = connect(&rig, Format::Packed);
    crashed.log = Log::get(&front_end, 1); // a new one
    let bed = crashed.reconnect(&rig, Format::Packed);

    assert!(bed.guest.err_signalled());
}

/// One worker has the fake engine, the others do not.
fn fake_in_the_first_worker(config: EngineConfig) -> (Options, FakeHandle) {
    let (engine, handle) = FakeEngine::new(config).unwrap();
    let (engine, first) = (Mutex::new(Some(engine)), AtomicBool::new(true));
    let factory = move || {
        if first.swap(false, Ordering::Relaxed) {
            return Ok(Box::new(engine.lock().unwrap().take().unwrap()) as Box<dyn Engine>);
        }
        Ok(Box::new(ThreadsEngine::new(EngineConfig::default())?) as Box<dyn Engine>)
    };
    (Options { engine: Some(Box::new(factory)), ..Options::default() }, handle)
}

#[test]
fn queue_that_moves_between_workers_keeps_its_log() {
    for format in BOTH {
        let config = EngineConfig { drain_timeout: Duration::from_millis(100), ..EngineConfig::default() };
        let (options, handle) = fake_in_the_first_worker(config);
        let mut rig = Rig::start(Options { workers: 2, ..options });
        let server = |rig: &Rig, worker| {
            rig.server.as_ref().unwrap().attach("test0", 0, WorkerId(worker), PATIENCE).unwrap();
        };
        let mut bed = bed(&rig, format);
        for worker in [1, 0, 1, 0] {
            server(&rig, worker);
            bed.begin_writes(0, 3);
            bed.finish(3);
        }
        hold(&handle);
        bed.begin_writes(20, 4);
        assert!(eventually(|| handle.hanging() == 4));

        let crashed = bed.crash(&mut rig, || let_go(&handle));
        rig.start_server(Options { workers: 2, ..Options::default() });
        let mut bed = crashed.reconnect(&rig, format);
        server(&rig, 1);
        bed.finish(4);

        assert_written(&rig, 20..24);
    }
}

/// The successor's engine is so small that it cannot start every request from the log, and it is told to stop
/// meanwhile. Returns how many blocks it had written when it stopped.
fn stop_with_some_not_begun(format: Format, protocol: fn(u64) -> u64) -> usize {
    const COUNT: u64 = 20;
    let (options, handle) = faulty();
    let mut rig = Rig::start(options);
    let mut bed = bed(&rig, format);
    hold(&handle);
    bed.begin_writes(20, COUNT);
    assert!(eventually(|| handle.hanging() == COUNT as usize));
    let crashed = bed.crash(&mut rig, || let_go(&handle));

    let config = EngineConfig { depth: 24, ..EngineConfig::default() };
    let (options, handle) = fake_in_the_first_worker(config);
    hold(&handle);
    rig.start_server(options);
    let front_end = crashed.connect(&rig, format, protocol);
    Crashed::start(&front_end, &crashed.guest);
    assert!(eventually(|| handle.hanging() > 0));
    std::thread::scope(|scope| {
        let stopping = scope.spawn(|| front_end.stop_queue(0));
        wait_for_stop(&rig, 0);
        assert!(!stopping.is_finished(), "stopped with requests in flight");
        let hanging = handle.hanging();
        assert!(hanging < COUNT as usize, "{hanging} of {COUNT} are begun: too much room");
        let_go(&handle);
        stopping.join().unwrap();
    });
    let written = |number: &u64| rig.image_bytes(number * BLOCK as u64, BLOCK) == block(*number);
    let at_stop = (20..20 + COUNT).filter(written).count();

    Crashed::start(&front_end, &crashed.guest);
    let mut bed = Bed { front_end, guest: crashed.guest, log: crashed.log };
    bed.finish(COUNT);
    assert_written(&rig, 20..20 + COUNT);
    at_stop
}

#[test]
fn stop_finishes_what_the_dead_server_had_begun_unless_it_may_leave_it_in_the_log() {
    const BASE_INFLIGHT: u64 = 1 << 20;
    for format in BOTH {
        assert_eq!(stop_with_some_not_begun(format, |offered| offered & !BASE_INFLIGHT), 20);
        let begun = stop_with_some_not_begun(format, |offered| offered);
        assert!((1..20).contains(&begun), "{begun}");
    }
}

#[test]
fn memory_that_the_server_makes_for_a_log_is_large_enough_and_sealed() {
    let rig = Rig::start(Options::default());
    for format in BOTH {
        let front_end = connect(&rig, format);
        let log = Log::get(&front_end, 4);
        // The log has room for the disk's longest ring in either format, and the mark of that size.
        let each = 32 + 256 * 32_u64;
        assert_eq!(log.bytes(), 4 * each.next_multiple_of(64) + 8);
        assert_eq!(log.body[16..20], [4, 0, 64, 0], "as it was asked for");
        assert_eq!(rustix::fs::fstat(&log.fd).unwrap().st_size as u64, log.bytes());
        assert!(rustix::fs::ftruncate(&log.fd, 0).is_err());
        assert!(contents(&log.view(), log.bytes()).iter().all(|&byte| byte == 0), "not new");
    }
}

#[test]
fn logs_that_cannot_be_are_refused_and_the_session_goes_on() {
    let rig = Rig::start(Options::default());
    let (mut front_end, fd) = (connect(&rig, Format::Split), memfd(1 << 20));
    let set =
        |front_end: &FrontEnd, body: &[u8], fds: &[_]| front_end.acked(code::SET_INFLIGHT_FD, body, fds);
    let good = inflight(4096, 0, 1, 64);
    let bad = [
        inflight(4096, 0, 0, 64),
        inflight(4096, 0, 5, 64),
        inflight(4096, 0, u16::MAX, u16::MAX),
        inflight(4096, 0, 1, 0),
        inflight(4096, 0, 1, 1),
        inflight(1 << 20, 0, 1, 1025),
        inflight(0, 0, 1, 64),
        inflight(1000, 0, 1, 64),
        inflight(4096, 4, 1, 64),
        inflight(4096, 1 << 20, 1, 64),
        inflight(4096, u64::MAX - 7, 1, 64),
        inflight(u64::MAX, 0, 4, 1024).split_off(8),
    ];
    for body in bad {
        assert_eq!(set(&front_end, &body, &[fd.as_fd()]), 1, "{body:?}");
    }
    assert_eq!(set(&front_end, &good, &[]), 1);
    assert_eq!(set(&front_end, &good, &[fd.as_fd(), fd.as_fd()]), 1);
    let unfit =
        [rig::passed::event(), std::io::pipe().unwrap().0.into(), std::fs::File::open("/").unwrap().into()];
    for unfit in &unfit {
        assert_eq!(set(&front_end, &good, &[unfit.as_fd()]), 1);
    }
    // The front-end passes a file that is larger than any log. The server maps only as much as a log needs.
    let sparse = memfd(1 << 45);
    front_end.ok(code::SET_INFLIGHT_FD, &inflight(1 << 45, 0, 1, 64), &[sparse.as_fd()]);
    front_end.ok(code::SET_INFLIGHT_FD, &good[..20], &[fd.as_fd()]);
    front_end.share_memory(16 * MIB);
    assert!(serves(&mut front_end.start_queue(0, QUEUE_SIZE, feature::USUAL)));
}

/// A second log would lose the parked requests, because they are in the first log, which no server would read again.
#[test]
fn other_log_for_a_running_ring_is_refused_and_the_same_one_again_changes_nothing() {
    for format in BOTH {
        let (options, engine) = faulty();
        let rig = Rig::start(options);
        let mut bed = bed(&rig, format);
        hold(&engine);
        bed.begin_writes(0, 3);
        assert!(eventually(|| engine.hanging() == 3));
        let other = Log::get(&bed.front_end, 1);
        assert_eq!(bed.front_end.acked(code::SET_INFLIGHT_FD, &other.body, &[other.fd.as_fd()]), 1);
        assert!(contents(&other.view(), other.bytes()).iter().all(|&byte| byte == 0), "written to");
        // The reply comes while requests hang, because no ring has to stop.
        bed.log.give(&bed.front_end);
        assert_eq!(mappings(&bed.log.fd), 1);
        let_go(&engine);
        bed.finish(3);
        bed.front_end.stop_queue(0);
        other.give(&bed.front_end);
        bed.front_end.announce_queue(&bed.guest);
        assert!(serves(&mut bed.guest));
        assert!(contents(&other.view(), other.bytes()).iter().any(|&byte| byte != 0), "not in use");
    }
}

#[test]
fn log_with_any_contents_stops_its_queue_or_is_served_and_the_server_goes_on() {
    let rig = Rig::start(Options::default());
    for seed in 0..60 {
        let format = BOTH[seed % 2];
        let mut front_end = connect(&rig, format);
        let log = layouts::tight(format, 1, QUEUE_SIZE);
        let mut random = fastrand::Rng::with_seed(seed as u64);
        let mut bytes = contents(&log.view(), log.bytes());
        bytes.iter_mut().for_each(|byte| *byte = if random.bool() { random.u8(0..8) } else { 0 });
        bytes[..16]
            .copy_from_slice(&[[0; 8], [1, 0, 64, 0, random.u8(..65), 0, random.u8(..65), 0]].concat());
        log.view().store(0, &bytes).unwrap();
        log.give(&front_end);
        front_end.share_memory(16 * MIB);
        let _guest = front_end.start_queue(0, QUEUE_SIZE, format.usual());
        front_end.stop_queue(0);
    }
    assert!(works(&rig));
}

#[test]
fn front_end_that_truncates_its_log_loses_its_session_and_nobody_else_does() {
    let rig = Rig::start(Options::default());
    let mut front_end = connect(&rig, Format::Split);
    let fd = memfd(8192);
    front_end.ok(code::SET_INFLIGHT_FD, &inflight(8192, 0, 1, QUEUE_SIZE), &[fd.as_fd()]);
    front_end.share_memory(16 * MIB);
    let mut guest = front_end.start_queue(0, QUEUE_SIZE, feature::USUAL);
    assert!(serves(&mut guest));

    rustix::fs::ftruncate(&fd, 0).unwrap();
    let range = GuestRange { addr: 8 * MIB, len_bytes: 16 };
    guest.view.store(GuestAddress(8 * MIB).0, &rig::header_bytes(kind::FLUSH, 0)).unwrap();
    guest.add(&[range], &[GuestRange { addr: 9 * MIB, len_bytes: 1 }]);
    guest.submit();

    assert!(front_end.is_closed());
    assert!(works(&rig));
}

#[test]
fn base_feature_without_a_log_is_refused() {
    let rig = Rig::start(Options::default());
    let front_end = rig.connect();
    front_end.send(code::SET_PROTOCOL_FEATURES, &(1_u64 << 20).to_ne_bytes(), &[]);
    assert!(front_end.is_closed());
}
