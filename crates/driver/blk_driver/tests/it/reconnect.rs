//! Back-ends that disconnect and return: no request is lost or ends twice, and the report states what the driver did.
//!
//! - Each case runs with an in-flight log (the rings remain, and the server resubmits requests that were not
//!   acknowledged) and without one (new rings, and the driver sends the requests again).
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use blk_driver::{
    Buffer, Completion, Device, Durability, Event, Options, Queue, QueueError, Reconnect, ReconnectReport,
    Request, RequestError, Work,
};
use guest_mem::GuestRange;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::contract;
use crate::contract::{Setting, USUAL, User, one, part, pattern};
use crate::peers;
use crate::peers::{DISK_BYTES, MIB, Own, PATIENCE, SECTOR, StorageDaemon, eventually};

/// Whether there is an in-flight log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Log {
    With,
    Without,
}

/// Runs each of these cases with and without a log.
macro_rules! with_and_without_a_log {
    ($($name:ident),* $(,)?) => {
        mod with_a_log {
            $(#[test] fn $name() { super::$name(super::Log::With); })*
        }
        mod without_a_log {
            $(#[test] fn $name() { super::$name(super::Log::Without); })*
        }
    };
}

with_and_without_a_log!(
    requests_pushed_while_the_back_end_is_away_are_done_when_it_is_back,
    requests_that_the_old_back_end_had_done_are_not_done_again,
    idle_owner_keeps_no_other_queue_waiting_and_goes_on_when_it_calls,
    back_end_that_does_not_come_back_is_given_up_and_everything_is_lost,
    deadline_holds_while_the_back_end_is_away,
    memory_registered_while_the_back_end_is_away_is_known_to_the_next_one,
    device_dropped_while_its_back_end_is_away_ends_its_queues,
    load_survives_a_server_that_is_restarted_again_and_again,
    load_on_packed_rings_survives_a_server_that_is_restarted_again_and_again,
    load_without_indirect_tables_survives_restarts_of_split_and_packed_rings,
);

fn patient(options: Options, log: Log) -> Options {
    let in_flight_log = Some(log == Log::With);
    Options { reconnect: Reconnect::For(PATIENCE), in_flight_log, ..options }
}

/// Returns the next report, and skips other events.
fn report(device: &Device) -> ReconnectReport {
    loop {
        match device.next_event(PATIENCE) {
            Some(Event::Reconnected(report)) => return report,
            Some(Event::Disconnected | Event::ConfigChanged(_)) => {}
            other => panic!("{other:?}"),
        }
    }
}

/// Takes `count` completions.
fn take(queue: &mut Queue, count: usize) -> Vec<Completion> {
    let mut taken = Vec::new();
    let mut out = [Completion::default(); 8];
    while taken.len() < count {
        let some = queue.wait(&mut out, PATIENCE).unwrap();
        assert!(some > 0, "{} of {count} came", taken.len());
        taken.extend_from_slice(&out[..some]);
    }
    taken
}

fn all_ok(completions: &[Completion]) -> bool {
    completions.iter().all(|completion| completion.result == Ok(()))
}

/// Pushes writes of 4 KiB blocks: block `n` from buffer `n` with token `n`.
fn push_writes(queue: &mut Queue, buffers: &[Buffer]) {
    for (at, buffer) in (0_u64..).zip(buffers) {
        buffer.write(0, &pattern(at, 4096));
        let data = [buffer.range()];
        let work = Work::Write { sector: at * 8, data: &data, durability: Durability::Cached };
        queue.push(&Request::new(work, at)).unwrap();
    }
    queue.submit();
}

fn buffers(device: &Device, count: usize) -> Vec<Buffer> {
    (0..count).map(|_| device.pool().take(4096).unwrap()).collect()
}

fn requests_pushed_while_the_back_end_is_away_are_done_when_it_is_back(log: Log) {
    let mut own = Own::start(1);
    let (device, mut queues) = USUAL.connect(patient(own.options(), log));
    own.stop();
    assert_eq!(device.next_event(PATIENCE), Some(Event::Disconnected));
    let buffers = buffers(&device, 20);
    push_writes(&mut queues[0], &buffers);
    own.start_again();
    let mut ended = take(&mut queues[0], 20);
    let report = report(&device);
    let sent_again = if log == Log::With { 0 } else { 20 };
    assert_eq!((report.kept_rings, report.resubmitted), (log == Log::With, sent_again));
    assert_eq!((report.completed, report.owners_waited_for), (0, 0));
    assert!(report.attempts > 0 && report.away > Duration::ZERO);
    assert!(all_ok(&ended), "{ended:?}");
    ended.sort_by_key(|completion| completion.token);
    assert!(ended.iter().map(|completion| completion.token).eq(0..20), "each once");
    assert!((0..20).all(|at| own.place.image_bytes(at * 4096, 4096) == pattern(at, 4096)));
}

fn requests_that_the_old_back_end_had_done_are_not_done_again(log: Log) {
    let mut own = Own::start(1);
    let (device, mut queues) = USUAL.connect(patient(own.options(), log));
    let buffers = buffers(&device, 20);
    push_writes(&mut queues[0], &buffers);
    assert!(eventually(|| (0..20).all(|at| own.place.image_bytes(at * 4096, 4096) == pattern(at, 4096))));
    // The server ends after it has finished the requests that it began.
    own.stop();
    queues[0].clear_signal();
    own.place.erase();
    own.start_again();
    // Wait for the next back-end first; otherwise the requests would complete normally and not be part of the
    // reconnect.
    let mut signal = [PollFd::from_borrowed_fd(queues[0].completion_fd(), PollFlags::IN)];
    assert_eq!(poll(&mut signal, Some(&Timespec { tv_sec: 20, tv_nsec: 0 })), Ok(1));
    let ended = take(&mut queues[0], 20);
    let report = report(&device);
    assert_eq!((report.resubmitted, report.completed), (0, if log == Log::With { 0 } else { 20 }));
    assert!(all_ok(&ended), "{ended:?}");
    assert!(own.place.image_bytes(0, 20 * 4096).iter().all(|&byte| byte == 0), "a write was done again");
}

fn idle_owner_keeps_no_other_queue_waiting_and_goes_on_when_it_calls(log: Log) {
    let mut own = Own::start(2);
    let (device, mut queues) = Setting { queues: 2, ..USUAL }.connect(patient(own.options(), log));
    let mut idle = queues.pop().unwrap();
    let idle_buffers = buffers(&device, 3);
    own.stop();
    push_writes(&mut idle, &idle_buffers);
    own.start_again();
    assert_eq!(one(&mut queues[0], Work::Flush).result, Ok(()));
    let report = report(&device);
    assert_eq!(report.owners_waited_for, if log == Log::With { 0 } else { 1 });
    assert!(report.resubmitted < 3, "the idle owner's are not in it");
    assert!(all_ok(&take(&mut idle, 3)));
}

fn back_end_that_does_not_come_back_is_given_up_and_everything_is_lost(log: Log) {
    let mut own = Own::start(1);
    let reconnect = Reconnect::For(Duration::from_millis(200));
    let (device, mut queues) = USUAL.connect(Options { reconnect, ..patient(own.options(), log) });
    own.stop();
    let buffers = buffers(&device, 5);
    push_writes(&mut queues[0], &buffers);
    let ended = take(&mut queues[0], 5);
    assert!(ended.iter().all(|completion| completion.result == Err(RequestError::Lost)), "{ended:?}");
    let mut out = [Completion::default()];
    assert_eq!(queues[0].wait(&mut out, PATIENCE), Err(QueueError::Disconnected { queue: 0 }));
    assert_eq!(device.next_event(PATIENCE), Some(Event::Disconnected));
    let Some(Event::GaveUp { reason }) = device.next_event(PATIENCE) else { panic!("not given up") };
    assert!(reason.contains(&own.place.socket.display().to_string()), "{reason}");
}

#[test]
fn back_end_that_is_not_to_be_waited_for_is_lost_at_once() {
    let mut own = Own::start(1);
    let (device, mut queues) = USUAL.connect(own.options());
    own.stop();
    assert_eq!(device.next_event(PATIENCE), Some(Event::Disconnected));
    assert!(matches!(device.next_event(PATIENCE), Some(Event::GaveUp { .. })));
    let mut out = [Completion::default()];
    let error = queues[0].wait(&mut out, PATIENCE);
    assert_eq!(error, Err(QueueError::Disconnected { queue: 0 }));
    own.start_again();
    assert_eq!(device.next_event(Duration::from_millis(100)), None, "the device reports no more events");
}

fn deadline_holds_while_the_back_end_is_away(log: Log) {
    let mut own = Own::start(1);
    let (device, mut queues) = USUAL.connect(patient(own.options(), log));
    own.stop();
    let buffer = device.pool().take(4096).unwrap();
    let data = [buffer.range()];
    let deadline = Some(Instant::now() + Duration::from_millis(50));
    let read = Work::Read { sector: 0, data: &data };
    queues[0].push(&Request { deadline, ..Request::new(read, 3) }).unwrap();
    queues[0].submit();
    let ended = take(&mut queues[0], 1);
    assert_eq!((ended[0].token, ended[0].result), (3, Err(RequestError::DeadlinePassed)));
    own.start_again();
    let returned = take(&mut queues[0], 1);
    assert_eq!((returned[0].token, returned[0].result), (3, Err(RequestError::Returned)));
    assert_eq!(report(&device).resubmitted, 0, "it had ended");
    assert_eq!(one(&mut queues[0], Work::Flush).result, Ok(()));
}

fn memory_registered_while_the_back_end_is_away_is_known_to_the_next_one(log: Log) {
    let mut own = Own::start(1);
    let (device, mut queues) = USUAL.connect(patient(own.options(), log));
    own.stop();
    assert_eq!(device.next_event(PATIENCE), Some(Event::Disconnected));
    let user = User::new();
    device.register(user.memory()).unwrap();
    own.start_again();
    let bytes = pattern(8, 4096);
    user.write(0, &bytes);
    let data = [GuestRange { addr: user.addr, len_bytes: 4096 }];
    let write = Work::Write { sector: 0, data: &data, durability: Durability::Cached };
    assert_eq!(one(&mut queues[0], write).result, Ok(()));
    assert_eq!(own.place.image_bytes(0, 4096), bytes);
    assert_eq!(report(&device).owners_waited_for, 0);
}

#[test]
fn disk_that_grew_while_its_back_end_was_away_is_seen() {
    let mut own = Own::start(1);
    let (device, mut queues) = USUAL.connect(patient(own.options(), Log::With));
    own.stop();
    own.place.resize(DISK_BYTES + MIB);
    own.start_again();
    assert_eq!(device.next_event(PATIENCE), Some(Event::Disconnected));
    let Some(Event::ConfigChanged(info)) = device.next_event(PATIENCE) else { panic!("not seen") };
    assert_eq!(info.capacity_sectors, (DISK_BYTES + MIB) / SECTOR);
    let buffer = device.pool().take(4096).unwrap();
    let data = [part(buffer.range(), 0, 4096)];
    let last = Work::Read { sector: info.capacity_sectors - 8, data: &data };
    assert_eq!(one(&mut queues[0], last).result, Ok(()));
}

fn device_dropped_while_its_back_end_is_away_ends_its_queues(log: Log) {
    let mut own = Own::start(1);
    let (device, mut queues) = USUAL.connect(patient(own.options(), log));
    own.stop();
    let buffers = buffers(&device, 4);
    push_writes(&mut queues[0], &buffers);
    drop(device);
    let ended = take(&mut queues[0], 4);
    assert!(ended.iter().all(|completion| completion.result == Err(RequestError::Lost)), "{ended:?}");
}

/// Blocks of 4 KiB that are written repeatedly with changing contents. Each block has at most one write in flight.
struct Load {
    queue: Queue,
    buffers: Vec<Buffer>,
    /// The contents of each block when nothing is in flight.
    versions: Vec<u64>,
    in_flight: Vec<bool>,
    ended: u64,
    random: u64,
}

const BLOCKS: usize = 64;

impl Load {
    fn new(device: &Device, queue: Queue) -> Self {
        let buffers = buffers(device, BLOCKS);
        let random = 0x1234_5678 + u64::from(queue.index());
        Self { queue, buffers, versions: vec![0; BLOCKS], in_flight: vec![false; BLOCKS], ended: 0, random }
    }

    fn sector(&self, block: usize) -> u64 {
        (u64::from(self.queue.index()) * BLOCKS as u64 + block as u64) * 8
    }

    fn content(&self, block: usize) -> Vec<u8> {
        pattern(self.versions[block] << 8 | self.sector(block), 4096)
    }

    /// Makes one pass: writes to some idle blocks, and takes completions.
    fn step(&mut self) {
        for _ in 0..8 {
            self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let block = (self.random >> 40) as usize % BLOCKS;
            if self.in_flight[block] || self.queue.room(1) == 0 {
                continue;
            }
            self.versions[block] += 1;
            self.buffers[block].write(0, &self.content(block));
            let data = [self.buffers[block].range()];
            let durability = if self.random & 0x8000 == 0 { Durability::Cached } else { Durability::Durable };
            let work = Work::Write { sector: self.sector(block), data: &data, durability };
            self.queue.push(&Request::new(work, block as u64)).unwrap();
            self.in_flight[block] = true;
        }
        self.queue.submit();
        self.take(Duration::from_millis(20));
    }

    fn take(&mut self, limit: Duration) {
        let mut out = [Completion::default(); 16];
        let count = self.queue.wait(&mut out, limit).unwrap();
        for completion in &out[..count] {
            assert_eq!(completion.result, Ok(()), "nothing is lost");
            let block = completion.token as usize;
            assert!(std::mem::replace(&mut self.in_flight[block], false), "block {block} ended twice");
            self.ended += 1;
        }
    }

    /// Waits until nothing is in flight, and then reads every block.
    fn finish(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        while self.in_flight.contains(&true) {
            assert!(Instant::now() < deadline, "{} never ended", self.queue.in_flight());
            self.take(PATIENCE);
        }
        for block in (0..BLOCKS).filter(|&block| self.versions[block] > 0) {
            let (sector, expected) = (self.sector(block), self.content(block));
            let buffer = &self.buffers[block];
            let read = contract::read(&mut self.queue, buffer, sector, 4096);
            assert!(read == expected, "block {block}, version {}", self.versions[block]);
        }
    }
}

/// Runs loads on all `queues` while `disturb` runs; then checks the contents.
fn survives(device: &Device, queues: Vec<Queue>, disturb: impl FnOnce()) {
    let stop = AtomicBool::new(false);
    let run = |queue: Queue| {
        let mut load = Load::new(device, queue);
        while !stop.load(Ordering::Relaxed) {
            load.step();
        }
        load.finish();
        load.ended
    };
    std::thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = queues.into_iter().map(|queue| scope.spawn(move || run(queue))).collect();
        disturb();
        stop.store(true, Ordering::Relaxed);
        assert!(threads.into_iter().map(|thread| thread.join().unwrap()).all(|ended| ended > 0));
    });
}

/// Restarts the server under a load on two queues.
fn restarts(setting: Setting, log: Log) {
    let mut own = Own::start(2);
    let (device, queues) = Setting { queues: 2, ..setting }.connect(patient(own.options(), log));
    let device = &device;
    survives(device, queues, || {
        (0..5).for_each(|_| {
            std::thread::sleep(Duration::from_millis(50));
            own.stop();
            std::thread::sleep(Duration::from_millis(20));
            own.start_again();
            let report = report(device);
            assert_eq!((report.kept_rings, report.owners_waited_for), (log == Log::With, 0));
        });
    });
}

fn load_survives_a_server_that_is_restarted_again_and_again(log: Log) {
    restarts(USUAL, log);
}

fn load_on_packed_rings_survives_a_server_that_is_restarted_again_and_again(log: Log) {
    restarts(Setting { packed: true, ..USUAL }, log);
}

fn load_without_indirect_tables_survives_restarts_of_split_and_packed_rings(log: Log) {
    restarts(Setting { indirect: false, ..USUAL }, log);
    restarts(Setting { packed: true, indirect: false, ..USUAL }, log);
}

#[test]
fn load_survives_a_daemon_that_is_killed_again_and_again() {
    let Some(mut daemon) = StorageDaemon::start(2) else { return };
    let (device, queues) =
        Setting { queues: 2, ..USUAL }.connect(patient(peers::options(&daemon.place.socket), Log::Without));
    let device = &device;
    survives(device, queues, || {
        (0..5).for_each(|_| {
            std::thread::sleep(Duration::from_millis(50));
            daemon.kill();
            daemon.start_again();
            assert_eq!(report(device).owners_waited_for, 0);
        });
    });
}
