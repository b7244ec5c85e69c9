//! Limits of IOPS and bandwidth on running servers: the most that guests may get, and that work continues.
//!
//! The upper bounds hold for the time that the test itself measures, so a busy machine cannot break them.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use blk_server::{AdminError, DiskLimits, LimitSettings, WorkerId};

use crate::rig::passed::{add_transfer, data_addr, serves};
use crate::rig::workers::{ENOUGH, guests, server};
use crate::rig::{CALM, FrontEnd, Guest, MIB, Options, Rig, eventually, feature, kind, ready};

const KIB: u64 = 1 << 10;
const RUN: Duration = Duration::from_millis(600);
/// With a rate of one byte per second, two requests of 512 KiB use up the credit of 1 MiB. The third waits for days.
const DAYS: &[(&str, u64)] = &[("bps", 1)];
/// The address of the data of long requests.
const LARGE_DATA: u64 = 8 * MIB;

fn settings(values: &[(&str, u64)]) -> LimitSettings {
    let mut settings = LimitSettings::default();
    values.iter().for_each(|&(key, value)| assert!(settings.set(key, Some(value))));
    settings
}

fn limits(values: &[(&str, u64)]) -> DiskLimits {
    DiskLimits { own: settings(values), ..DiskLimits::default() }
}

fn limit(rig: &Rig, values: &[(&str, u64)]) {
    server(rig).limit_disk("test0", limits(values)).unwrap();
}

fn limited(values: &[(&str, u64)], options: Options) -> Rig {
    let rig = Rig::start(options);
    limit(&rig, values);
    rig
}

/// Keeps `depth` requests in flight for [`RUN`]. Returns the number of completed requests.
fn load(guest: &mut Guest, verb: u32, bytes: u64, depth: u64) -> u64 {
    let until = Instant::now() + RUN;
    let add = |guest: &mut Guest| {
        let addr = data_addr(guest);
        add_transfer(guest, verb, 0, addr, bytes as u32);
    };
    (0..depth).for_each(|_| add(guest));
    guest.submit();
    let mut completed = 0;
    while Instant::now() < until {
        guest.next_used().expect("work goes on");
        completed += 1;
        add(guest);
        guest.submit();
    }
    completed
}

/// Adds requests of 512 KiB.
fn add_large(guest: &mut Guest, verb: u32, count: u32) {
    for _ in 0..count {
        add_transfer(guest, verb, 0, LARGE_DATA, 512 << 10);
    }
}

/// Runs the load on all queues at once. Returns the sum of the results, and the time from before the start until after
/// the end.
fn all_load(guests: &mut [Guest], verb: u32, bytes: u64, depth: u64) -> (u64, Duration) {
    let begin = Instant::now();
    let together = Barrier::new(guests.len());
    let completed = std::thread::scope(|scope| {
        let loads = guests.iter_mut().map(|guest| {
            let together = &together;
            scope.spawn(move || {
                together.wait();
                load(guest, verb, bytes, depth)
            })
        });
        loads.collect::<Vec<_>>().into_iter().map(|load| load.join().unwrap()).sum()
    });
    (completed, begin.elapsed())
}

/// Checks that `used` is at most what the rate allows in this time, plus the credit, and a turn, a quantum and a
/// request of each queue.
fn assert_bound(used: u64, rate: u64, elapsed: Duration, credit: u64, of_queues: u64) {
    let allowed = rate as f64 * elapsed.as_secs_f64() + (credit + rate / 1000 + 1 + of_queues) as f64;
    assert!(used as f64 <= allowed, "{used} instead of at most {allowed} in {elapsed:?}");
}

#[test]
fn iops_hold_for_one_queue_and_for_many_and_work_goes_on() {
    for queues in [1, 4] {
        let rig = limited(&[("iops", 500)], Options { workers: 2, ..Options::buffered() });
        let mut front_end = rig.connect();
        let mut guests = guests(&mut front_end, feature::USUAL, queues);
        let (completed, elapsed) = all_load(&mut guests, kind::IN, 4 * KIB, 16);
        assert_bound(completed, 500, elapsed, 50, 2 * u64::from(queues));
        assert!(completed >= 60, "{completed} in {elapsed:?}");
        let report = server(&rig).report();
        let throttling = &report.disks[0].throttling;
        assert!(throttling.throttled_requests > 0 && throttling.throttled_time > Duration::ZERO);
        assert_eq!((throttling.rates[0].credit, throttling.rates[0].capacity), (0, 50));
    }
}

#[test]
fn bandwidth_holds_for_tiny_and_for_huge_requests() {
    let rate = 4 * MIB;
    for (bytes, depth) in [(512, 64), (256 * KIB, 2)] {
        let rig = limited(&[("bps", rate)], Options::buffered());
        let (_front_end, guest) = ready(&rig, feature::USUAL);
        let (completed, elapsed) = all_load(&mut [guest], kind::IN, bytes, depth);
        assert_bound(completed * bytes, rate, elapsed, MIB, 64 * KIB + bytes);
        assert!(completed >= 2, "{completed} in {elapsed:?}");
    }
}

#[test]
fn long_requests_count_as_several_and_flushes_count_as_writes() {
    let rig = limited(&[("iops", 400), ("iops-size", 4 * KIB)], Options::buffered());
    let (_front_end, guest) = ready(&rig, feature::USUAL);
    let (completed, elapsed) = all_load(&mut [guest], kind::IN, 16 * KIB, 16);
    assert_bound(completed * 4, 400, elapsed, 40, 5);
    let rig = limited(&[("iops-write", 400)], Options::buffered());
    let (_front_end, guest) = ready(&rig, feature::USUAL);
    let (completed, elapsed) = all_load(&mut [guest], kind::FLUSH, 0, 16);
    assert_bound(completed, 400, elapsed, 40, 2);
}

/// Runs a guest that stops its queue or reconnects as soon as the limit stops the queue, to get rid of its debt.
fn bytes_of_a_guest_that_starts_again(reconnects: bool) {
    let rate = 4 * MIB;
    let rig = limited(&[("bps", rate)], Options::buffered());
    let (mut front_end, mut guest) = ready(&rig, feature::USUAL);
    let (begin, mut used, mut rounds) = (Instant::now(), 0, 0);
    while begin.elapsed() < RUN {
        add_large(&mut guest, kind::IN, 4);
        guest.submit();
        std::thread::sleep(Duration::from_millis(10));
        // Requests in flight complete before the queue stops.
        if reconnects {
            drop(front_end);
            used += completed(&mut guest, Duration::from_millis(50)) * (512 << 10);
            (front_end, guest) = ready(&rig, feature::USUAL);
        } else {
            front_end.stop_queue(0);
            used += completed(&mut guest, Duration::ZERO) * (512 << 10);
            guest = front_end.start_queue(0, 256, feature::USUAL);
        }
        rounds += 1;
    }
    let elapsed = begin.elapsed();
    assert_bound(used, rate, elapsed, MIB, 64 * KIB + 512 * KIB);
    assert!(used > 0 && rounds > 2, "{used} bytes in {rounds} rounds");
}

fn completed(guest: &mut Guest, patience: Duration) -> u64 {
    let (mut count, until) = (0, Instant::now() + patience);
    loop {
        match guest.ring.pop_used().unwrap() {
            Some(_) => count += 1,
            None if Instant::now() >= until => return count,
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

#[test]
fn guest_that_resets_its_queue_gets_no_more() {
    bytes_of_a_guest_that_starts_again(false);
}

#[test]
fn guest_that_reconnects_gets_no_more() {
    bytes_of_a_guest_that_starts_again(true);
}

/// A guest with a request that waits for days.
fn waiting(options: Options) -> (Rig, FrontEnd, Guest) {
    let rig = limited(DAYS, options);
    let (front_end, mut guest) = ready(&rig, feature::USUAL);
    add_large(&mut guest, kind::IN, 3);
    guest.submit();
    assert!((0..2).all(|_| guest.next_used().is_some()));
    std::thread::sleep(CALM);
    assert!(guest.ring.pop_used().unwrap().is_none(), "the third request waits");
    (rig, front_end, guest)
}

#[test]
fn change_of_the_limits_reaches_a_request_that_waits() {
    let (rig, _front_end, mut guest) = waiting(Options::buffered());
    limit(&rig, &[("bps", 100 * MIB)]);
    assert!(guest.next_used().is_some());
    assert!(serves(&mut guest));
    limit(&rig, &[]);
    assert!(serves(&mut guest));
    assert!(server(&rig).report().disks[0].throttling.rates.is_empty());
}

#[test]
fn stop_of_a_queue_and_of_the_server_do_not_wait_for_the_limits() {
    let (mut rig, front_end, _guest) = waiting(Options::buffered());
    assert_ne!(front_end.stop_queue(0), 0);
    assert!(rig.stop().is_clean());
    let (mut rig, _front_end, _guest) = waiting(Options::buffered());
    assert!(rig.stop().is_clean());
}

#[test]
fn queue_that_waits_moves_to_another_worker_and_goes_on_there() {
    let (rig, _front_end, mut guest) = waiting(Options { workers: 2, ..Options::buffered() });
    for worker in [1, 0, 1] {
        server(&rig).attach("test0", 0, WorkerId(worker), ENOUGH).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        assert!(guest.ring.pop_used().unwrap().is_none(), "a move gives no credit");
    }
    limit(&rig, &[]);
    assert!(guest.next_used().is_some());
    assert!(serves(&mut guest));
}

#[test]
fn memory_of_a_queue_that_waits_changes() {
    let (rig, mut front_end, mut guest) = waiting(Options::buffered());
    front_end.add_region(64 * MIB, MIB);
    front_end.remove_region(64 * MIB);
    limit(&rig, &[]);
    assert!(guest.next_used().is_some());
    assert!(serves(&mut guest));
}

#[test]
fn disk_beside_one_that_waits_is_served() {
    let (rig, _front_end, _guest) = waiting(Options { disks: 2, ..Options::buffered() });
    let mut front_end = rig.connect_to(1);
    let mut others = guests(&mut front_end, feature::USUAL, 1);
    assert!((0..50).all(|_| serves(&mut others[0])));
}

#[test]
fn reads_of_another_queue_go_on_while_writes_wait() {
    let rig = limited(&[("bps-write", 1)], Options::buffered());
    let mut front_end = rig.connect();
    let mut guests = guests(&mut front_end, feature::USUAL, 2);
    add_large(&mut guests[0], kind::OUT, 3);
    guests[0].submit();
    assert!(eventually(|| server(&rig).report().disks[0].queues[0].counters.writes == 2));
    assert!((0..50).all(|_| guests[1].read(0, 4096).status == Some(0)));
}

#[test]
fn disks_of_a_group_share_its_limit_and_leave_it_at_once() {
    let rig = Rig::start(Options { disks: 2, workers: 2, ..Options::buffered() });
    let groups = [("acme".to_owned(), settings(&[("iops", 400)]))];
    let member = DiskLimits { group: Some("acme".into()), ..DiskLimits::default() };
    let disks = ["test0", "test1"].map(|name| (name.to_owned(), member.clone()));
    server(&rig).limit_all(&groups, &disks).unwrap();
    let mut front_ends = [rig.connect(), rig.connect_to(1)];
    let mut both: Vec<Guest> =
        front_ends.iter_mut().flat_map(|front_end| guests(front_end, feature::USUAL, 1)).collect();
    let (completed, elapsed) = all_load(&mut both, kind::IN, 4 * KIB, 16);
    assert_bound(completed, 400, elapsed, 40, 6);
    assert!(completed >= 50, "{completed} in {elapsed:?}");
    let group = &server(&rig).report().groups[0];
    assert_eq!((group.name.as_str(), group.disks.len()), ("acme", 2));
    assert!(group.rates[0].used >= completed);
    // When a limit blocks the whole group, a disk that leaves the group is served.
    server(&rig).limit_group("acme", settings(DAYS)).unwrap();
    server(&rig).limit_disk("test1", DiskLimits::default()).unwrap();
    assert!((0..16).all(|_| both[1].next_used().is_some()));
    assert!(serves(&mut both[1]));
}

#[test]
fn requests_that_the_server_refuses_cost_nothing() {
    let rig = limited(DAYS, Options::buffered());
    let (_front_end, mut guest) = ready(&rig, feature::USUAL);
    for _ in 0..4 {
        add_transfer(&mut guest, kind::IN, u64::MAX / 1024, LARGE_DATA, 512 << 10);
    }
    guest.submit();
    assert!((0..4).all(|_| guest.next_used().is_some()));
    assert!(serves(&mut guest));
}

#[test]
fn wait_counts_while_it_lasts_and_is_not_lost_when_the_queue_stops() {
    let (rig, front_end, _guest) = waiting(Options::buffered());
    let waited = || {
        let throttling = rig.report_of(0).throttling;
        (throttling.throttled_requests, throttling.throttled_time)
    };
    let (first, before) = (waited(), Instant::now());
    assert!(first.0 >= 1 && first.1 > Duration::ZERO);
    std::thread::sleep(Duration::from_millis(50));
    let longer = waited();
    assert!(longer.0 == first.0 && longer.1 >= first.1 + Duration::from_millis(40));
    front_end.stop_queue(0);
    let stopped = waited();
    assert!(stopped.0 == first.0 && stopped.1 >= longer.1.saturating_sub(Duration::from_millis(2)));
    assert!(stopped.1 <= first.1 + before.elapsed() + Duration::from_millis(2));
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(waited(), stopped);
}

#[test]
fn use_is_what_requests_cost_and_goes_on_when_the_group_changes() {
    let rig = Rig::start(Options { disks: 2, ..Options::buffered() });
    let groups = [("acme".to_owned(), settings(&[("bps", 1 << 30)]))];
    let member = || DiskLimits { group: Some("acme".into()), ..limits(&[("bps", 1 << 30)]) };
    server(&rig).limit_all(&groups, &[("test0".to_owned(), member())]).unwrap();
    let (_front_end, mut guest) = ready(&rig, feature::USUAL);
    assert!((0..5).all(|_| guest.read(0, 4096).status == Some(0)));
    let used = || (rig.report_of(0).throttling.rates[0].used, server(&rig).report().groups[0].rates[0].used);
    assert_eq!(used(), (5 * 4096, 5 * 4096));
    server(&rig).limit_disk("test1", member()).unwrap();
    assert_eq!(used(), (5 * 4096, 5 * 4096));
}

#[test]
fn limits_that_make_no_sense_are_refused_and_change_nothing() {
    let rig = limited(&[("iops", 500)], Options::buffered());
    let refused = |limits| server(&rig).limit_disk("test0", limits).unwrap_err();
    let error = refused(limits(&[("iops", 0)])).to_string();
    assert!(error.starts_with("disk `test0`: iops = 0 is out of range: choose from 1"), "{error}");
    let elsewhere = DiskLimits { group: Some("none".into()), ..DiskLimits::default() };
    assert!(matches!(refused(elsewhere), AdminError::NoGroup { .. }));
    assert!(matches!(server(&rig).limit_group("none", settings(&[])), Err(AdminError::NoGroup { .. })));
    assert_eq!(server(&rig).report().disks[0].throttling.limits, limits(&[("iops", 500)]));
}
