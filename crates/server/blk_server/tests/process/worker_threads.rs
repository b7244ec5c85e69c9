//! Workers run with the CPUs, class, nice value and name of their options, even before they create their engine.
//!
//! The tests run again in a guest with two NUMA nodes and control groups, which allow more checks
//! (`worker_threads/in_a_guest.rs`).
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod bed;
mod in_a_guest;

use std::time::{Duration, Instant};

use bed::{Seen, start};
use blk_server::{SchedulingClass, WorkerOptions, WorkerOptionsError, parse_cpus};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

use crate::alone;
use crate::rig::{feature, ready};

const SCHED_OTHER: u64 = 0;
const SCHED_FIFO: u64 = 1;
const SCHED_RR: u64 = 2;
const SCHED_BATCH: u64 = 3;
const SCHED_IDLE: u64 = 5;

fn on(cpus: &[u32]) -> WorkerOptions {
    WorkerOptions { cpus: cpus.into(), ..WorkerOptions::default() }
}

fn class(class: SchedulingClass) -> WorkerOptions {
    WorkerOptions { class: Some(class), ..WorkerOptions::default() }
}

fn nice(nice: i8) -> WorkerOptions {
    WorkerOptions { nice: Some(nice), ..WorkerOptions::default() }
}

/// The CPUs of this process.
fn own_cpus() -> Vec<u32> {
    parse_cpus(&Seen::here().cpus).unwrap()
}

/// Runs `act` on a thread without CAP_SYS_NICE.
fn without_cap_sys_nice<T: Send>(act: impl FnOnce() -> T + Send) -> T {
    let thread = || {
        let mut sets = capabilities(None).unwrap();
        sets.effective.remove(CapabilitySet::SYS_NICE);
        sets.permitted.remove(CapabilitySet::SYS_NICE);
        set_capabilities(None, sets).unwrap();
        act()
    };
    std::thread::scope(|scope| scope.spawn(thread).join().unwrap())
}

#[test]
fn worker_is_named_and_bound_and_nice_before_its_engine_is_made_and_stays_so() {
    let _alone = alone();
    let cpus = own_cpus();
    let (first, last) = (cpus[0], cpus[cpus.len() - 1]);
    let options = [
        WorkerOptions { nice: Some(5), class: Some(SchedulingClass::Batch), ..on(&[first]) },
        WorkerOptions { nice: Some(7), class: Some(SchedulingClass::Idle), ..on(&[last]) },
    ];

    let bed = start(options.into()).unwrap();
    let (_front_end, mut guest) = ready(&bed.rig, feature::USUAL);
    assert_eq!(guest.read(0, 4096).status, Some(0));

    for seen in [bed.seen.clone(), bed.seen.iter().map(Seen::again).collect()] {
        let [a, b] = &seen[..] else { panic!("{seen:?}") };
        assert_eq!((a.name.as_str(), b.name.as_str()), ("bareblk-work-0", "bareblk-work-1"));
        assert_eq!((&a.cpus, &b.cpus), (&first.to_string(), &last.to_string()));
        assert_eq!((a.nice, a.policy), (5, SCHED_BATCH));
        assert_eq!((b.nice, b.policy), (7, SCHED_IDLE));
    }
}

#[test]
fn worker_without_options_runs_as_the_process_does() {
    let _alone = alone();
    let here = Seen::here();
    let bed = start(vec![WorkerOptions::default()]).unwrap();
    let worker = &bed.seen[0];
    assert_eq!((&worker.cpus, worker.nice, worker.policy), (&here.cpus, here.nice, SCHED_OTHER));
    assert_eq!(worker.group, here.group);
}

/// Needs a right that the tester may not have; without it, the error names it.
#[test]
fn real_time_class_is_set_or_refused_with_what_is_missing() {
    let _alone = alone();
    for (wish, policy) in [(SchedulingClass::Fifo(3), SCHED_FIFO), (SchedulingClass::RoundRobin(4), SCHED_RR)]
    {
        match start(vec![class(wish)]) {
            Ok(bed) => {
                assert_eq!(
                    (bed.seen[0].policy, Some(bed.seen[0].priority)),
                    (policy, wish.priority().map(u64::from))
                );
            }
            Err(error) => {
                let why = std::error::Error::source(&error).unwrap().to_string();
                assert!(why.contains("is not permitted"), "{why}");
            }
        }
    }
}

#[test]
fn more_than_the_process_is_entitled_to_is_refused_with_what_is_missing() {
    let _alone = alone();
    let (nice, class, both) = without_cap_sys_nice(|| {
        let refusal = |options: WorkerOptions| options.check().unwrap_err().to_string();
        let fine = WorkerOptions { nice: Some(19), class: Some(SchedulingClass::Batch), ..on(&own_cpus()) };
        (refusal(nice(-5)), refusal(class(SchedulingClass::Fifo(50))), fine.check().is_ok())
    });
    assert!(
        nice.starts_with(
            "nice -5 is not permitted: the process needs CAP_SYS_NICE, or a limit RLIMIT_NICE of 25"
        ),
        "{nice}"
    );
    assert!(
        class.starts_with(
            "class fifo:50 is not permitted: the process needs CAP_SYS_NICE, or a limit RLIMIT_RTPRIO of 50"
        ),
        "{class}"
    );
    assert!(both, "what needs no right is not refused");
}

#[test]
fn server_with_a_worker_that_cannot_be_does_not_start_and_leaves_nothing() {
    let _alone = alone();
    let Err(error) = start(vec![WorkerOptions::default(), on(&[1023])]) else { panic!("it starts") };
    assert_eq!(error.to_string(), "cannot apply the CPU or scheduling settings of worker 1");
    let why = std::error::Error::source(&error).unwrap().to_string();
    assert!(why.starts_with("CPU 1023 is offline or does not exist: the online CPUs are 0"), "{why}");
    // A joined thread stays in /proc for a moment: the kernel wakes the joiner first.
    let patience = Instant::now() + Duration::from_secs(300);
    while !worker_threads().is_empty() {
        assert!(Instant::now() < patience, "{:?}", worker_threads());
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn worker_threads() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).ok());
    names.filter(|name| name.starts_with("bareblk-work")).collect()
}

#[test]
fn checking_finds_what_starting_would_find() {
    let _alone = alone();
    on(&own_cpus()).check().unwrap();
    nice(10).check().unwrap();
    let error = on(&[0, 1022, 1023]).check().unwrap_err();
    assert!(matches!(&error, WorkerOptionsError::Offline { cpus, .. } if *cpus == [1022, 1023]), "{error}");
    assert!(matches!(nice(-128).check(), Err(WorkerOptionsError::Nice { nice: -128 })));
}

#[test]
fn more_workers_than_cpus_serve_all_the_same() {
    let _alone = alone();
    let cpu = own_cpus()[0];
    let bed = start(vec![on(&[cpu]); 4]).unwrap();
    let (front_end, mut first) = ready(&bed.rig, feature::USUAL);
    let mut others: Vec<_> = (1..4).map(|queue| front_end.start_queue(queue, 256, feature::USUAL)).collect();
    assert_eq!(first.read(0, 4096).status, Some(0));
    assert!(others.iter_mut().all(|guest| guest.read(0, 4096).status == Some(0)));
}
