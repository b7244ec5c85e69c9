//! Tests the balancer's thread with a stand-in for the server.
#![allow(clippy::unwrap_used)]

use super::*;
use crate::control::balance::tuning::STALE;
use crate::data_path::assignment::balanced::{QueueName, QueueReading};
use crate::data_path::counters::{QueueCounters, WorkerCounters};
use crate::data_path::report::WorkerReport;
use crate::data_path::worker::balancer_wakeup::BusyWatch;
use crate::data_path::worker::worker_options::{WorkerId, WorkerOptions};

/// Long enough for a slow machine: only a hang takes longer.
const PATIENCE: Duration = Duration::from_secs(300);

/// Two workers and two queues, both on worker 0, which is fully busy with them.
#[derive(Default)]
struct Fake {
    start: Mutex<Option<Instant>>,
    moved: Mutex<Vec<(String, u16, WorkerId)>>,
    refuses: bool,
    /// Processor time that a reading uses.
    reading: Duration,
}

impl Balanced for Arc<Fake> {
    fn read(&self) -> Reading {
        let begin = own_cpu_time();
        while own_cpu_time() - begin < self.reading {}
        let since = self.start.lock().unwrap().get_or_insert_with(Instant::now).elapsed();
        let worker = |id: u32, cpu_time| {
            let counters =
                WorkerCounters { cpu_time, submission_time: cpu_time, ..WorkerCounters::default() };
            WorkerReport {
                id: WorkerId(id),
                options: WorkerOptions::default(),
                node: None,
                queues: 0,
                counters,
            }
        };
        let queue = |queue| QueueReading {
            name: QueueName { disk: "a".into(), queue },
            worker: WorkerId(0),
            counters: QueueCounters { worker_time: since / 2, ..QueueCounters::default() },
            attached: false,
            most_workers: None,
        };
        Reading {
            workers: vec![worker(0, since), worker(1, Duration::ZERO)],
            queues: vec![queue(0), queue(1)],
        }
    }

    fn move_queue(
        &self,
        disk: &str,
        queue: u16,
        to: WorkerId,
        _: Duration,
    ) -> Result<(), Box<dyn std::error::Error>> {
        self.moved.lock().unwrap().push((disk.to_owned(), queue, to));
        if self.refuses { Err("it is stuck".into()) } else { Ok(()) }
    }
}

/// Wakes the balancer like a busy worker until it decides.
fn first_decision(fake: &Arc<Fake>) -> BalanceReport {
    let balancer = Balancer::new().unwrap();
    balancer.start(Box::new(Arc::clone(fake))).unwrap();
    let deadline = Instant::now() + PATIENCE;
    loop {
        balancer.wakeup().wake(Instant::now());
        std::thread::sleep(Duration::from_millis(5));
        let report = balancer.report();
        if !report.decisions.is_empty() {
            return report;
        }
        assert!(Instant::now() < deadline, "no decision: {report:?}");
    }
}

/// How often the balancer was woken since the last call.
fn wakes(wakeup: &BalancerWakeup) -> u64 {
    let mut counter = [0u8; 8];
    rustix::io::ioctl_fionbio(&wakeup.fd, true).unwrap();
    rustix::io::read(&wakeup.fd, &mut counter).map_or(0, |_| u64::from_ne_bytes(counter))
}

#[test]
fn busy_worker_gets_rid_of_a_queue_and_the_report_says_why() {
    let fake = Arc::new(Fake::default());
    let report = first_decision(&fake);
    assert_eq!(*fake.moved.lock().unwrap(), [("a".to_owned(), 0, WorkerId(1))]);
    let decision = &report.decisions[0];
    let names = (decision.disk.as_str(), decision.queue, decision.from, decision.to);
    assert_eq!(names, ("a", 0, WorkerId(0), WorkerId(1)));
    assert!(decision.why.contains("queue 0 of `a`"), "{}", decision.why);
    assert!(matches!(decision.outcome, MoveOutcome::Moved { .. }), "{decision:?}");
    assert_eq!((report.moves, report.failed), (1, 0));
    assert!(report.readings > 3, "{report:?}");
}

#[test]
fn move_that_fails_is_reported_with_its_error() {
    let fake = Arc::new(Fake { refuses: true, ..Fake::default() });
    let report = first_decision(&fake);
    assert_eq!(report.decisions[0].outcome, MoveOutcome::Failed { error: "it is stuck".into() });
    assert_eq!((report.moves, report.failed), (0, 1));
}

#[test]
fn readings_that_take_long_are_rare_and_still_lead_to_decisions() {
    let fake = Arc::new(Fake { reading: (STALE + PERIOD) / COST_LIMIT, ..Fake::default() });
    let report = first_decision(&fake);
    assert!(matches!(report.decisions[0].outcome, MoveOutcome::Moved { .. }), "{report:?}");
}

#[test]
fn balancer_that_no_worker_wakes_takes_no_reading_and_ends_when_told() {
    let fake = Arc::new(Fake::default());
    let balancer = Balancer::new().unwrap();
    balancer.start(Box::new(Arc::clone(&fake))).unwrap();
    std::thread::sleep(3 * PERIOD);
    assert_eq!(balancer.report().readings, 0);
    drop(balancer);
    assert_eq!(Arc::strong_count(&fake), 1, "the thread is gone");
}

#[test]
fn calls_of_all_workers_wake_the_balancer_once_per_period() {
    let wakeup = BalancerWakeup::new().unwrap();
    (0..1_000).for_each(|ms| wakeup.wake(wakeup.origin + Duration::from_millis(ms)));
    assert_eq!(wakes(&wakeup), 10);
}

#[test]
fn calls_during_a_pause_do_not_wake_the_balancer() {
    let wakeup = BalancerWakeup::new().unwrap();
    wakeup.pause(wakeup.origin, Duration::from_secs(2));
    wakeup.wake(wakeup.origin + Duration::from_millis(1_999));
    assert_eq!(wakes(&wakeup), 0);
    wakeup.wake(wakeup.origin + Duration::from_secs(2));
    assert_eq!(wakes(&wakeup), 1);
}

#[test]
fn worker_that_works_a_fiftieth_of_the_period_wakes_the_balancer() {
    let wakeup = Arc::new(BalancerWakeup::new().unwrap());
    let mut watch = BusyWatch::new(Arc::clone(&wakeup), wakeup.origin);
    watch.check(wakeup.origin + PERIOD, PERIOD / 50);
    assert_eq!(wakes(&wakeup), 1);
}

#[test]
fn worker_that_works_less_does_not_wake_it_and_is_checked_again_a_period_later() {
    let wakeup = Arc::new(BalancerWakeup::new().unwrap());
    let mut watch = BusyWatch::new(Arc::clone(&wakeup), wakeup.origin);
    watch.check(wakeup.origin + PERIOD, PERIOD / 60);
    watch.check(wakeup.origin + 2 * PERIOD, PERIOD / 60 * 2);
    assert_eq!(wakes(&wakeup), 0);
    assert_eq!(watch.next_check(), wakeup.origin + 3 * PERIOD);
}

#[test]
fn worker_that_slept_for_long_does_not_wake_it_for_a_short_burst() {
    let wakeup = Arc::new(BalancerWakeup::new().unwrap());
    let mut watch = BusyWatch::new(Arc::clone(&wakeup), wakeup.origin);
    watch.check(wakeup.origin + 100 * PERIOD, PERIOD);
    assert_eq!(wakes(&wakeup), 0);
}

#[test]
fn only_the_last_decisions_are_kept() {
    let mut history = History::default();
    for queue in 0..100 {
        let (from, to) = (WorkerId(0), WorkerId(1));
        let outcome = MoveOutcome::Moved { took: Duration::ZERO };
        let (at, disk, why) = (SystemTime::UNIX_EPOCH, String::new(), String::new());
        history.note(BalanceDecision { at, disk, queue, from, to, why, outcome }, false);
    }
    assert_eq!((history.decisions.len(), history.moves), (HISTORY_LEN, 100));
    assert_eq!(history.decisions.back().map(|decision| decision.queue), Some(99));
}
