//! Tests of the ring: the features that it was created with, and the calls that reach the kernel.
//!
//! `tests/contract` tests the contract of every engine.

use disk_image::Alignment;

use super::*;
use crate::backend::{Buffers, Verb};
use crate::engine::Engine;

fn started(age: KernelAge) -> Uring {
    let config = EngineConfig { depth: 8, ..EngineConfig::default() };
    let mut ring = Uring::make(age, &IoUringOptions::default(), &config).unwrap();
    ring.start().unwrap();
    ring
}

fn some_file() -> FileSpec {
    FileSpec::of_file(Arc::new(tempfile::tempfile().unwrap()), Alignment::BUFFERED)
}

fn result_of(ring: &mut Uring) -> i32 {
    loop {
        ring.wait(None).unwrap();
        ring.begin_reap();
        if let Some(raw) = ring.pop() {
            return raw.result;
        }
    }
}

#[test]
fn each_age_gets_its_own_flags() {
    let features = [KernelAge::Before6_1, KernelAge::Before5_19, KernelAge::Linux5_15]
        .map(|age| IoUringEngine::as_if_on(age, EngineConfig::default()).unwrap().features());
    assert!(features.iter().all(|features| !features.deferred_task_run));
    assert_eq!(features[2].files, FileTableKind::Plain);
    assert!(features[2].to_string().contains("files by descriptor"));
}

#[test]
fn depth_beyond_the_kernels_limit_is_refused() {
    let config = EngineConfig { depth: 40_000, ..EngineConfig::default() };
    let error = IoUringEngine::new(config).unwrap_err();
    assert_eq!(error.to_string(), "io_uring depth 40000 is not between 1 and 32768");
}

#[test]
fn opcode_that_is_not_needed_is_refused_by_a_restricted_ring() {
    let mut ring = started(KernelAge::Newest);
    if !ring.features.restricted {
        return xtask::skip::skip(xtask::skip::Reason::KernelBefore(5, 10), "restrictions of a ring");
    }
    ring.control.push_back(opcode::Nop::new().build().user_data(5));
    ring.calls += 1;
    assert_eq!(result_of(&mut ring), -libc::EACCES);
}

#[test]
fn flags_of_a_write_reach_the_kernel() {
    let mut ring = started(KernelAge::Newest);
    let spec = some_file();
    let target = ring.register_file(0, &spec).unwrap();
    let mut data = [0_u8; 512];
    let buffers = Buffers::One { base: data.as_mut_ptr(), len_bytes: 512 };
    let unknown_flag = 1 << 30;
    let call = Call { verb: Verb::Write, flags: unknown_flag, offset_bytes: 0, len_bytes: 512, buffers };
    // SAFETY: 1. `data` and `spec` live until the result below.
    unsafe { ring.queue(1, target, &call) }.unwrap();
    assert_eq!(result_of(&mut ring), -libc::EOPNOTSUPP);
}

#[test]
fn full_submission_ring_is_reported_and_empty_after_submit() {
    let mut ring = started(KernelAge::Newest);
    let spec = some_file();
    let target = ring.register_file(0, &spec).unwrap();
    let call = Call { verb: Verb::Sync, flags: 0, offset_bytes: 0, len_bytes: 0, buffers: Buffers::None };
    // SAFETY: 1. no buffers; 2. `spec` lives to the end of the test, the ring is dropped first.
    let queue = |ring: &mut Uring, name| unsafe { ring.queue(name, target, &call) };
    assert!((0..8).all(|name| queue(&mut ring, name).is_ok()));
    assert!(queue(&mut ring, 8).is_err());
    ring.submit().unwrap();
    assert!(queue(&mut ring, 8).is_ok());
    let results: Vec<i32> = (0..9).map(|_| result_of(&mut ring)).collect();
    assert_eq!(results, [0; 9]);
}

#[test]
fn poll_ended_by_a_full_completion_ring_is_armed_again() {
    let mut ring = started(KernelAge::Newest);
    let fd = Arc::new(rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap());
    let id = ring.watch(Arc::clone(&fd), WatchToken(9)).unwrap();
    ring.submit().unwrap();
    assert!(ring.watches.may_go_on(id, true));
    ring.arm(id, &fd);
    ring.submit().unwrap();
    rustix::io::write(&fd, &1_u64.to_ne_bytes()).unwrap();
    ring.wait(None).unwrap();
    ring.begin_reap();
    assert!(ring.pop().is_none());
    let mut events = Vec::new();
    ring.take_ready(&mut events);
    assert!(matches!(events[..], [Event::Readable(WatchToken(9))]), "{events:?}");
}

/// Kicks the fd that several watches share once. Runs passes until all have fired, and returns their tokens.
fn ready_after_kick(ring: &mut Uring, fd: &OwnedFd, count: usize) -> usize {
    rustix::io::write(fd, &1_u64.to_ne_bytes()).unwrap();
    let mut tokens = std::collections::HashSet::new();
    while tokens.len() < count {
        ring.wait(Some(Duration::from_secs(300))).unwrap();
        ring.begin_reap();
        assert!(ring.pop().is_none());
        let mut events = Vec::new();
        ring.take_ready(&mut events);
        assert!(!events.is_empty(), "only {} of {count} watches fired", tokens.len());
        tokens.extend(events.iter().map(|event| match event {
            Event::Readable(token) => token.0,
            other => panic!("{other:?}"),
        }));
    }
    tokens.len()
}

fn more_kicks_than_completions_fit(age: KernelAge) {
    let mut ring = started(age);
    let count = 3 * ring.ring.params().cq_entries() as usize;
    let fd = Arc::new(rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap());
    for token in 0..count as u64 {
        ring.watch(Arc::clone(&fd), WatchToken(token)).unwrap();
    }
    ring.submit().unwrap();
    assert_eq!(ready_after_kick(&mut ring, &fd, count), count);
    assert_eq!(ready_after_kick(&mut ring, &fd, count), count);
}

#[test]
fn more_kicks_than_completions_fit_and_none_is_lost() {
    more_kicks_than_completions_fit(KernelAge::Newest);
}

#[test]
fn more_kicks_than_completions_fit_and_none_is_lost_before_6_1() {
    more_kicks_than_completions_fit(KernelAge::Before6_1);
}

#[test]
fn more_kicks_than_completions_fit_and_none_is_lost_on_5_15() {
    more_kicks_than_completions_fit(KernelAge::Linux5_15);
}

#[test]
fn ring_made_on_another_thread_is_used_by_its_worker() {
    let make = || IoUringEngine::new(EngineConfig { depth: 8, ..EngineConfig::default() }).unwrap();
    let mut engine = std::thread::spawn(make).join().unwrap();
    engine.start().unwrap();
    let file = Arc::new(tempfile::tempfile().unwrap());
    let alignment = disk_image::Alignment { memory_bytes: 1, offset_bytes: 1 };
    let file = engine.attach_file(crate::FileSpec::of_file(file, alignment)).unwrap();
    let buffers = guest_mem::IoVecs::with_capacity(0);
    engine.push(crate::Op { token: 3, file, kind: crate::OpKind::Flush, buffers }).unwrap();
    let mut events = Vec::new();
    while events.is_empty() {
        engine.wait(None).unwrap();
        engine.reap(&mut events);
    }
    assert!(matches!(&events[..], [Event::Completed(c)] if c.result == Ok(())));
}

/// The CPUs on which each thread may run that the kernel started for calls of this thread, from /proc.
fn cpus_of_kernel_workers() -> Vec<String> {
    let name = format!("iou-wrk-{}", rustix::thread::gettid().as_raw_nonzero());
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path());
    let line = |task: std::path::PathBuf| {
        let status = std::fs::read_to_string(task.join("status")).ok()?;
        status.starts_with(&format!("Name:\t{name}\n")).then_some(())?;
        let cpus = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
        Some(cpus.trim().to_owned())
    };
    tasks.filter_map(line).collect()
}

#[test]
fn kernels_threads_for_calls_that_block_run_where_the_worker_may() {
    // Runs on a separate thread, because binding a thread to CPUs cannot be undone.
    let bound = std::thread::spawn(|| {
        let cpus = rustix::thread::sched_getaffinity(None).unwrap();
        let last = (0..rustix::thread::CpuSet::MAX_CPU).rfind(|&cpu| cpus.is_set(cpu)).unwrap();
        let mut only = rustix::thread::CpuSet::new();
        only.set(last);
        rustix::thread::sched_setaffinity(None, &only).unwrap();
        let mut ring = started(KernelAge::Newest);
        let spec = some_file();
        let target = ring.register_file(0, &spec).unwrap();
        let call = Call { verb: Verb::Sync, flags: 0, offset_bytes: 0, len_bytes: 0, buffers: Buffers::None };
        // SAFETY: 1. no buffers; 2. `spec` lives to the end of the test, the ring is dropped first.
        unsafe { ring.queue(1, target, &call) }.unwrap();
        assert_eq!(result_of(&mut ring), 0);
        let found = cpus_of_kernel_workers();
        drop(ring);
        (found, last.to_string())
    });
    let (found, last) = bound.join().unwrap();
    assert!(!found.is_empty(), "a sync needs no thread of the kernel's any more: find another call");
    assert!(found.iter().all(|cpus| *cpus == last), "{found:?} instead of {last}");
}

/// Tests deferred task-run, restrictions and multishot polls on the guest's kernel: 6.1 on Debian 12.
#[cfg(target_arch = "x86_64")] // the guest image exists only for this architecture
#[test]
fn engine_passes_its_own_tests_on_the_guests_kernel() {
    use xtask::guest::{GuestImage, OwnTests};
    let image = GuestImage::prepare(|step| eprintln!("{step}")).unwrap();
    let tests = OwnTests::new(&image, "/storage", "on_the_guests_kernel").with_temporary_files_in("/storage");
    // Linux before 6.4 needs a second to release a registered file, and this test has 200 files.
    let tests = tests.without("file_that_was_detached_is_closed_by_the_kernel_thread_too");
    let passed = tests.run().unwrap_or_else(|error| panic!("{error:#}"));
    println!("{}: {} tests, {:?}", passed.kernel, passed.count, passed.output.wall);
    let console = &passed.output.console;
    assert!(
        console.contains("opcode_that_is_not_needed_is_refused_by_a_restricted_ring ... ok"),
        "{console}"
    );
    let skipped: Vec<&str> = console.lines().filter(|line| line.starts_with("skipped:")).collect();
    // The guest's root is a tmpfs, which has no O_DIRECT before Linux 6.6. The guest's small memory has no huge page.
    let is_known = |line: &&str| line.contains("O_DIRECT") || line.contains("no free huge page");
    assert!(skipped.iter().all(is_known), "{skipped:?}");
}
