//! Simulates queues, late workers and storage in discrete time, and checks the guarantees of the limits.

#![allow(clippy::cast_possible_truncation, clippy::cast_precision_loss)] // the test's own values are small

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

use fastrand::Rng;
use proptest::prelude::*;

use super::bucket::{EPOCH, virtual_time};
use super::disk_throttle::{BucketSet, DiskThrottle, Membership};
use super::gate::{Cost, Direction, QueueGate};
use super::limits::{LimitKind, LimitSettings};
use super::usage::Usage;

const MS: u64 = 1_000_000;
const SECOND: u64 = 1000 * MS;
const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
/// The simulation starts at this instant of the host's clock.
const START: u64 = 3600 * SECOND;

/// The load of one queue: always `depth` requests of `bytes`.
#[derive(Clone, Debug)]
struct Load {
    disk: usize,
    depth: u32,
    bytes: u64,
    service_ns: u64,
    /// One event in this many resets the queue; 0: none does.
    resets: u64,
    /// The worker that serves the queue; `None`: one of its own.
    worker: Option<usize>,
    /// How late that worker wakes in addition to [`lateness`].
    late_ns: u64,
}

impl Load {
    fn reads(disk: usize, depth: u32, bytes: u64) -> Self {
        Self { disk, depth, bytes, service_ns: 50_000, resets: 0, worker: None, late_ns: 0 }
    }

    fn on(self, worker: usize) -> Self {
        Self { worker: Some(worker), ..self }
    }
}

/// A request that was started.
#[derive(Clone, Copy, Debug)]
struct Started {
    at: u64,
    disk: usize,
    queue: usize,
    bytes: u64,
}

/// How late a worker wakes: 60 µs on average, and rarely 5 ms.
fn lateness(random: &mut Rng) -> u64 {
    if random.u32(..1000) == 0 { 5 * MS } else { random.u64(..120_000) }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Completed,
    /// The queue's worker wakes.
    Wakes,
}

/// The state of a simulation.
struct Simulation<'s> {
    disks: &'s [Arc<DiskThrottle>],
    loads: &'s [Load],
    random: Rng,
    gates: Vec<QueueGate>,
    running: Vec<u32>,
    /// When each queue waits to be served.
    opens: Vec<u64>,
    events: BinaryHeap<Reverse<(u64, usize, Event)>>,
    started: Vec<Started>,
    wake_ups: u64,
}

impl<'s> Simulation<'s> {
    fn new(disks: &'s [Arc<DiskThrottle>], loads: &'s [Load], seed: u64) -> Self {
        let mut random = Rng::with_seed(seed);
        let gates = loads.iter().map(|load| QueueGate::new(Arc::clone(&disks[load.disk]))).collect();
        let opens: Vec<u64> = loads.iter().map(|_| START + random.u64(..MS)).collect();
        let events =
            opens.iter().enumerate().map(|(queue, at)| Reverse((*at, queue, Event::Wakes))).collect();
        let (running, started) = (vec![0; loads.len()], Vec::new());
        Self { disks, loads, random, gates, running, opens, events, started, wake_ups: 0 }
    }

    fn handle(&mut self, at: u64, queue: usize, event: Event) {
        match event {
            Event::Completed => {
                self.running[queue] -= 1;
                self.serve(queue, at);
            }
            Event::Wakes => {
                let worker = self.loads[queue].worker;
                let is_its =
                    |other: usize| other == queue || (worker.is_some() && self.loads[other].worker == worker);
                let due: Vec<usize> =
                    (0..self.loads.len()).filter(|&other| is_its(other) && self.opens[other] <= at).collect();
                self.wake_ups += u64::from(!due.is_empty());
                due.into_iter().for_each(|queue| self.serve(queue, at));
            }
        }
    }

    /// Starts requests of the queue until its gate shuts or it has none left.
    fn serve(&mut self, queue: usize, at: u64) {
        let load = &self.loads[queue];
        if load.resets > 0 && self.random.u64(..load.resets) == 0 {
            self.gates[queue] = QueueGate::new(Arc::clone(&self.disks[load.disk]));
        }
        let now = virtual_time(at);
        if self.gates[queue].is_shut(now) {
            return;
        }
        self.opens[queue] = u64::MAX;
        let cost = Cost { direction: Direction::Read, ops: 1, bytes: load.bytes };
        while self.running[queue] < load.depth {
            if !self.gates[queue].admit(cost, now) {
                let opens = (self.gates[queue].shut_until().unwrap() - EPOCH).max(at);
                self.opens[queue] = opens;
                let wakes = opens + load.late_ns + lateness(&mut self.random);
                self.events.push(Reverse((wakes, queue, Event::Wakes)));
                break;
            }
            self.running[queue] += 1;
            self.started.push(Started { at, disk: load.disk, queue, bytes: load.bytes });
            self.events.push(Reverse((at + load.service_ns, queue, Event::Completed)));
        }
    }
}

/// Runs the loads for `duration`. Returns the started requests in order, and how often a worker woke for a gate.
fn run(disks: &[Arc<DiskThrottle>], loads: &[Load], duration: u64, seed: u64) -> (Vec<Started>, u64) {
    let mut simulation = Simulation::new(disks, loads, seed);
    while let Some(Reverse((at, queue, event))) = simulation.events.pop() {
        if at > START + duration {
            break;
        }
        simulation.handle(at, queue, event);
    }
    (simulation.started, simulation.wake_ups)
}

fn settings(values: &[(&str, u64)]) -> LimitSettings {
    let mut settings = LimitSettings::default();
    values.iter().for_each(|&(key, value)| assert!(settings.set(key, Some(value))));
    settings.check().unwrap();
    settings
}

/// A disk with limits of its own.
fn disk(values: &[(&str, u64)]) -> Vec<Arc<DiskThrottle>> {
    let own = BucketSet::new(settings(values));
    vec![Arc::new(DiskThrottle::new(own, None, &Arc::<Usage>::default()).unwrap())]
}

/// A group, with a disk for each weight.
fn group(values: &[(&str, u64)], weights: &[u64]) -> Vec<Arc<DiskThrottle>> {
    let buckets = BucketSet::new(settings(values));
    let member = |&weight: &u64| {
        let (disks, least_weight) = (weights.len() as u64, *weights.iter().min().unwrap());
        let member = Membership { buckets: buckets.clone(), disks, weight, least_weight };
        Arc::new(DiskThrottle::new(BucketSet::default(), Some(&member), &Arc::<Usage>::default()).unwrap())
    };
    weights.iter().map(member).collect()
}

/// The sum of `amount` over the requests for which `counts` holds.
fn sum(started: &[Started], amount: fn(&Started) -> u64, counts: impl Fn(&Started) -> bool) -> u64 {
    started.iter().filter(|request| counts(request)).map(amount).sum()
}

fn one(_: &Started) -> u64 {
    1
}

fn bytes(request: &Started) -> u64 {
    request.bytes
}

/// The requests after the first second, in which the first queues use up the credit.
fn steady(started: &[Started]) -> &[Started] {
    &started[started.partition_point(|request| request.at < START + SECOND)..]
}

/// How far the fullest window exceeds `rate`, in units.
fn excess(started: &[Started], amount: fn(&Started) -> u64, rate: u64) -> f64 {
    let (mut sum, mut least, mut most) = (0.0_f64, f64::MAX, f64::MIN);
    for request in started {
        let paid = rate as f64 * (request.at - START) as f64 / SECOND as f64;
        least = least.min(sum - paid);
        sum += amount(request) as f64;
        most = most.max(sum - paid - least);
    }
    most
}

/// The largest deviation from the rate in any window of `length` after the first second, in percent.
fn worst_window(started: &[Started], amount: fn(&Started) -> u64, rate: u64, length: u64) -> f64 {
    let last = (started.last().unwrap().at - START) / length;
    let mut windows = vec![0; last as usize];
    for request in started {
        if let Some(window) = windows.get_mut(((request.at - START) / length) as usize) {
            *window += amount(request);
        }
    }
    let wanted = rate as f64 * length as f64 / SECOND as f64;
    let skipped = (SECOND / length) as usize;
    let deviation = |count: &u64| (*count as f64 / wanted - 1.0).abs() * 100.0;
    windows.iter().skip(skipped).map(deviation).fold(0.0, f64::max)
}

#[test]
fn thousand_iops_of_one_queue_are_exact_in_each_second() {
    let (started, _) = run(&disk(&[("iops", 1000)]), &[Load::reads(0, 32, 4 * KIB)], 10 * SECOND, 1);
    assert!(worst_window(&started, one, 1000, SECOND) <= 1.0);
    assert!(worst_window(&started, one, 1000, 100 * MS) <= 5.0);
}

#[test]
fn twenty_thousand_iops_of_64_queues_are_exact_and_wake_a_worker_no_more_often_than_turns_begin() {
    let loads: Vec<Load> = (0..64).map(|_| Load::reads(0, 8, 4 * KIB)).collect();
    let (started, wake_ups) = run(&disk(&[("iops", 20_000)]), &loads, 5 * SECOND, 2);
    assert!(worst_window(&started, one, 20_000, SECOND) <= 1.0);
    assert!(worst_window(&started, one, 20_000, 100 * MS) <= 5.0);
    let per_queue: Vec<u64> =
        (0..64).map(|queue| sum(steady(&started), one, |request| request.queue == queue)).collect();
    let (least, most) = (*per_queue.iter().min().unwrap(), *per_queue.iter().max().unwrap());
    assert!(most * 97 <= least * 103, "{least} to {most}");
    // Each queue wakes at most a few times for one request.
    assert!(wake_ups < 4 * started.len() as u64, "{wake_ups} wake-ups for {} requests", started.len());
}

#[test]
fn queue_of_depth_one_beside_eight_deep_ones_gets_its_share() {
    let deep = (0..8).map(|_| Load::reads(0, 128, 4 * KIB));
    let loads: Vec<Load> = deep.chain([Load::reads(0, 1, 4 * KIB)]).collect();
    let (started, _) = run(&disk(&[("iops", 5000)]), &loads, 5 * SECOND, 3);
    assert!(worst_window(&started, one, 5000, SECOND) <= 1.0);
    let started = steady(&started);
    let share = sum(started, one, |request| request.queue == 8) as f64 / started.len() as f64;
    assert!((0.108..=0.114).contains(&share), "{share}");
}

/// The share of each queue in what the queues of one disk start.
fn queue_shares(loads: &[Load], iops: u64) -> Vec<f64> {
    let (started, _) = run(&disk(&[("iops", iops)]), loads, 3 * SECOND, 8);
    assert!(worst_window(&started, one, iops, SECOND) <= 1.0);
    assert!(worst_window(&started, one, iops, 100 * MS) <= 5.0);
    let started = steady(&started);
    let of = |queue| sum(started, one, |request| request.queue == queue) as f64 / started.len() as f64;
    (0..loads.len()).map(of).collect()
}

#[test]
fn few_queues_share_a_turn_that_has_many_units_for_each() {
    for late_ns in [0, 100_000] {
        for iops in [20_000, 100_000] {
            for queues in [2, 3, 9, 16] {
                // Two workers, of which one wakes later, serve the queues.
                let load =
                    |queue| Load { late_ns: late_ns * (queue as u64 % 2), ..Load::reads(0, 128, 4 * KIB) };
                let loads: Vec<Load> = (0..queues).map(|queue| load(queue).on(queue % 2)).collect();
                assert_within_3_percent(&queue_shares(&loads, iops), &vec![1.0 / queues as f64; queues]);
            }
        }
    }
}

#[test]
fn queue_of_depth_one_beside_eight_deep_ones_keeps_its_share_of_long_turns() {
    for service_ns in [50_000, 150_000, 300_000] {
        let first = Load { service_ns, ..Load::reads(0, 1, 4 * KIB) };
        let deep = (1..9).map(|queue| Load::reads(0, 128, 4 * KIB).on(queue % 2));
        let loads: Vec<Load> = std::iter::once(first.on(0)).chain(deep).collect();
        assert_within_3_percent(&queue_shares(&loads, 20_000), &[1.0 / 9.0; 9]);
    }
}

#[test]
fn bandwidth_is_exact_and_large_requests_get_no_more_than_small_ones() {
    let loads = [Load::reads(0, 4, MIB), Load::reads(0, 64, 4 * KIB)];
    let rate = 100 * MIB;
    let (started, _) = run(&disk(&[("bps", rate)]), &loads, 10 * SECOND, 4);
    assert!(worst_window(&started, bytes, rate, SECOND) <= 1.0);
    assert!(worst_window(&started, bytes, rate, 100 * MS) <= 10.5);
    let started = steady(&started);
    let share =
        sum(started, bytes, |request| request.queue == 0) as f64 / sum(started, bytes, |_| true) as f64;
    assert!((0.47..=0.53).contains(&share), "{share}");
}

fn shares(disks: &[Arc<DiskThrottle>], loads: &[Load], amount: fn(&Started) -> u64) -> Vec<f64> {
    let (started, _) = run(disks, loads, 10 * SECOND, 5);
    let started = steady(&started);
    let all = sum(started, amount, |_| true) as f64;
    (0..disks.len()).map(|disk| sum(started, amount, |request| request.disk == disk) as f64 / all).collect()
}

fn assert_within_3_percent(shares: &[f64], fair: &[f64]) {
    let close = shares.iter().zip(fair).all(|(share, fair)| (share / fair - 1.0).abs() <= 0.03);
    assert!(close, "{shares:?} instead of {fair:?}");
}

#[test]
fn eight_equal_disks_of_a_group_get_equal_shares() {
    for rate in [1000, 20_000] {
        let disks = group(&[("iops", rate)], &[100; 8]);
        let loads: Vec<Load> = (0..8).map(|disk| Load::reads(disk, 32, 4 * KIB)).collect();
        assert_within_3_percent(&shares(&disks, &loads, one), &[0.125; 8]);
    }
}

#[test]
fn weights_of_a_group_are_the_ratio_of_its_shares() {
    for rate in [1000, 20_000] {
        let disks = group(&[("iops", rate)], &[400, 100]);
        let loads = [Load::reads(0, 32, 4 * KIB), Load::reads(1, 32, 4 * KIB)];
        assert_within_3_percent(&shares(&disks, &loads, one), &[0.8, 0.2]);
    }
}

#[test]
fn disk_whose_worker_always_wakes_late_gets_its_share_of_a_group() {
    for (weights, fair) in
        [(&[100; 8][..], &[0.125; 8][..]), (&[400, 100], &[0.8, 0.2]), (&[100; 2], &[0.5; 2])]
    {
        for late_ns in [0, 400_000] {
            let disks = group(&[("iops", 20_000)], weights);
            let load = |disk: usize| Load {
                late_ns: late_ns * (disk as u64 % 4) / 3,
                ..Load::reads(disk, 32, 4 * KIB).on(disk % 4)
            };
            let loads: Vec<Load> = (0..weights.len()).map(load).collect();
            assert_within_3_percent(&shares(&disks, &loads, one), fair);
        }
    }
}

#[test]
fn disk_with_64_queues_gets_no_more_of_a_group_than_a_disk_with_one() {
    let disks = group(&[("iops", 1000)], &[100, 100]);
    let many = (0..64).map(|_| Load::reads(0, 8, 4 * KIB));
    let loads: Vec<Load> = many.chain([Load::reads(1, 8, 4 * KIB)]).collect();
    assert_within_3_percent(&shares(&disks, &loads, one), &[0.5, 0.5]);
}

#[test]
fn large_requests_get_no_more_of_a_group_than_small_ones() {
    let disks = group(&[("bps", 100 * MIB)], &[100, 100]);
    let loads = [Load::reads(0, 4, MIB), Load::reads(1, 64, 4 * KIB)];
    assert_within_3_percent(&shares(&disks, &loads, bytes), &[0.5, 0.5]);
}

#[test]
fn disk_that_is_alone_in_its_group_gets_the_whole_rate() {
    let disks = group(&[("iops", 1000)], &[100; 8]);
    let (started, _) = run(&disks, &[Load::reads(3, 32, 4 * KIB)], 5 * SECOND, 6);
    assert!(worst_window(&started, one, 1000, SECOND) <= 1.0);
}

#[test]
fn burst_lasts_for_its_credit_and_then_the_rate_holds() {
    let limits = [("iops", 300), ("iops-max", 3000), ("iops-max-length", 4)];
    let (started, _) = run(&disk(&limits), &[Load::reads(0, 32, 4 * KIB)], 10 * SECOND, 7);
    // 12,000 requests of credit last 12,000 / (3000 - 300) = 4.4 s.
    let until = |at: u64| {
        sum(&started, one, |_| true).min(started.iter().filter(|s| s.at < START + at).count() as u64)
    };
    assert!((11_900..=12_600).contains(&until(4 * SECOND)), "{}", until(4 * SECOND));
    let late = started.len() as u64 - until(6 * SECOND);
    assert!((1180..=1220).contains(&late), "{late}");
}

/// As [`group`], with the disks' own limits.
fn group_with_own(values: &[(&str, u64)], members: &[(u64, &[(&str, u64)])]) -> Vec<Arc<DiskThrottle>> {
    let buckets = BucketSet::new(settings(values));
    let least_weight = members.iter().map(|(weight, _)| *weight).min().unwrap();
    let member = |(weight, own): &(u64, &[(&str, u64)])| {
        let (disks, own) = (members.len() as u64, BucketSet::new(settings(own)));
        let member = Membership { buckets: buckets.clone(), disks, weight: *weight, least_weight };
        Arc::new(DiskThrottle::new(own, Some(&member), &Arc::<Usage>::default()).unwrap())
    };
    members.iter().map(member).collect()
}

/// The example of docs/how-to/limits.md.
#[test]
fn disk_of_weight_400_whose_own_limit_is_below_its_share_gets_that_limit() {
    let disks = group_with_own(&[("iops", 20_000)], &[(100, &[]), (400, &[("iops", 15_000)])]);
    let loads = [Load::reads(0, 64, 4 * KIB), Load::reads(1, 64, 4 * KIB)];
    assert_within_3_percent(&shares(&disks, &loads, one), &[0.25, 0.75]);
}

#[test]
fn disk_whose_own_limit_is_just_below_its_share_of_a_large_group_gets_that_limit() {
    let own: &[(&str, u64)] = &[("iops", 1500)];
    let members: Vec<(u64, &[(&str, u64)])> =
        (0..64).map(|disk| (100, if disk == 0 { own } else { &[] })).collect();
    let disks = group_with_own(&[("iops", 100_000)], &members);
    let loads: Vec<Load> = (0..64).map(|disk| Load::reads(disk, 64, 4 * KIB)).collect();
    let share = shares(&disks, &loads, one)[0] * 100_000.0;
    assert!((1400.0..=1515.0).contains(&share), "{share} IOPS instead of 1500");
}

#[test]
fn disk_of_great_weight_whose_queues_use_little_wastes_nothing() {
    for queues in [1, 4, 16] {
        let disks = group(&[("iops", 20_000)], &[10_000, 1]);
        let service_ns = queues as u64 * MS;
        let heavy = (0..queues).map(|_| Load { service_ns, ..Load::reads(0, 1, 4 * KIB) });
        let loads: Vec<Load> = heavy.chain([Load::reads(1, 64, 4 * KIB)]).collect();
        let shares = shares(&disks, &loads, one);
        assert_within_3_percent(&shares[1..], &[0.95]);
    }
}

/// Each queue is busy alone until it has its share, and then does not use it.
#[test]
fn queues_that_save_up_units_start_no_burst() {
    let (rate, disks) = (100_000, disk(&[("iops", 100_000)]));
    let mut gates: Vec<QueueGate> = (0..200).map(|_| QueueGate::new(Arc::clone(&disks[0]))).collect();
    let cost = Cost { direction: Direction::Read, ops: 1, bytes: 0 };
    let mut now = virtual_time(START);
    for gate in &mut gates {
        // The first queue uses up the credit. All double their bookings until these are a turn.
        for _ in 0..10 {
            while gate.admit(cost, now) {}
            now = gate.shut_until().unwrap();
        }
        assert!(gate.admit(cost, now));
    }
    let burst = |gate: &mut QueueGate| (0_u64..).take_while(|_| gate.admit(cost, now)).count() as u64;
    let burst: u64 = gates.iter_mut().map(burst).sum();
    assert!(burst <= 17 * gates.len() as u64 + rate / 50, "{burst}");
}

#[test]
fn debt_beyond_63_bits_is_no_credit() {
    let disks = disk(&[("bps", 1000)]);
    let lane = disks[0].lane(LimitKind::Bps).unwrap();
    (0..2048 * 1024).for_each(|_| lane.owe(1 << 42));
    let mut gate = QueueGate::new(Arc::clone(&disks[0]));
    let small = Cost { direction: Direction::Read, ops: 1, bytes: 4 * KIB };
    let admitted = (0..100_000).filter(|_| gate.admit(small, virtual_time(START))).count();
    assert_eq!(admitted, 0);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// No window has more than its rate, the credit, the units of 20 ms, four turns and the longest request of each disk,
    /// and 17 quanta of each queue; whether queues are reset, disks share a group or not.
    #[test]
    fn no_load_exceeds_the_bound_in_any_window(
        rate in 50_u64..50_000,
        weights in prop::collection::vec(1_u64..500, 1..4),
        loads in prop::collection::vec((0_usize..3, 1_u32..64, 1_u64..64, 1_000_u64..5_000_000, 0_u64..200), 1..8),
        is_bytes: bool,
        seed: u64,
    ) {
        let (key, rate, amount): (_, _, fn(&Started) -> u64) =
            if is_bytes { ("bps", rate * 16 * KIB, bytes) } else { ("iops", rate, one) };
        let disks = if weights.len() == 1 { disk(&[(key, rate)]) } else { group(&[(key, rate)], &weights) };
        let load = |(disk, depth, sectors, service_ns, resets): (usize, u32, u64, u64, u64)| {
            // About a third of the queues are reset, at most every few events.
            let resets = if resets < 60 { resets + 3 } else { 0 };
            // Some requests are longer than the quanta that a queue collects.
            Load { depth, service_ns, resets, ..Load::reads(disk % weights.len(), depth, sectors * 64 * KIB) }
        };
        let loads: Vec<Load> = loads.into_iter().map(load).collect();
        let (started, _) = run(&disks, &loads, 2 * SECOND, seed);
        let credit = (rate / 10).max(if is_bytes { MIB } else { 1 });
        let turn = (rate / 10).max(64 * KIB * u64::from(is_bytes)).max(1);
        let largest = loads.iter().map(|load| if is_bytes { load.bytes } else { 1 }).max().unwrap();
        let quantum = if is_bytes { 64 * KIB } else { 1 };
        let of_queues = loads.len() as u64 * (largest.min(16 * quantum) + quantum);
        let slack = credit + rate / 50 + disks.len() as u64 * (4 * turn + largest) + of_queues;
        prop_assert!(excess(&started, amount, rate) <= slack as f64, "{} of {slack}", excess(&started, amount, rate));
        // Work continues: at least one load always has requests, unless the loads cannot use the rate.
        let most = loads.iter().map(|load| u64::from(load.depth) * SECOND / load.service_ns).max().unwrap();
        if !is_bytes && most > 2 * rate && loads.iter().all(|load| load.resets == 0) {
            prop_assert!(started.len() as u64 >= rate, "{} of {}", started.len(), 2 * rate);
        }
    }

    /// A load that stays within half of the credit never waits, so it sets no timer.
    #[test]
    fn load_within_the_limit_never_waits(
        rate in 100_u64..50_000, gaps in prop::collection::vec(0_u64..4, 1..2000), queues in 1_usize..5
    ) {
        let disks = disk(&[("iops", rate)]);
        let mut gates: Vec<QueueGate> = (0..queues).map(|_| QueueGate::new(Arc::clone(&disks[0]))).collect();
        let cost = Cost { direction: Direction::Write, ops: 1, bytes: 0 };
        // The load's own bucket: each request pays its part of the rate, and half of the credit may be used at once.
        let (interval, half) = (SECOND / rate + 1, 50 * MS);
        let (mut at, mut paid_at) = (virtual_time(START), 0);
        for (number, gap) in gaps.into_iter().enumerate() {
            at += gap * interval;
            paid_at = std::cmp::max(paid_at, at - half) + interval;
            at = at.max(paid_at);
            prop_assert!(gates[number % queues].admit(cost, at), "request {number}");
            prop_assert_eq!(gates[number % queues].shut_until(), None);
        }
    }
}
