//! Tests of Linux AIO beyond the contract: refusals, a full ring, a ring that is not mapped, and the end of the
//! engine.
//!
//! `tests/contract` tests the contract of every engine.

use std::os::unix::fs::OpenOptionsExt;

use disk_image::Alignment;
use rustix::event::{EventfdFlags, eventfd};

use super::context::IoEvent;
use super::*;
use crate::engine::Engine;

const DEPTH: u32 = 64;
const WHOLE: Alignment = Alignment { memory_bytes: 4096, offset_bytes: 4096 };

fn config(depth: u32) -> EngineConfig {
    EngineConfig { depth, ..EngineConfig::default() }
}

fn aio() -> LinuxAio {
    LinuxAio::make(&config(DEPTH)).unwrap()
}

fn aio_without_ring() -> LinuxAio {
    LinuxAio::new(Context::new(DEPTH + 1).unwrap(), None, &config(DEPTH)).unwrap()
}

/// The smallest possible context, with more blocks than the context accepts calls.
fn aio_with_more_blocks_than_the_kernel_takes() -> (LinuxAio, u32) {
    let context = Context::new(1).unwrap();
    let ring = UserRing::of(&context).unwrap();
    let depth = ring.event_count() + 20;
    (LinuxAio::new(context, Some(ring), &config(depth)).unwrap(), depth)
}

#[repr(align(4096))]
struct Page([u8; 4096]);

/// Memory that outlives every engine.
fn page() -> &'static mut Page {
    Box::leak(Box::new(Page([0; 4096])))
}

/// Four blocks: `1`, `2`, `3`, `4`.
fn direct_file() -> Arc<File> {
    let named = tempfile::NamedTempFile::new().unwrap();
    let contents: Vec<u8> = (1..=4_u8).flat_map(|block| [block; 4096]).collect();
    std::fs::write(named.path(), contents).unwrap();
    let mut options = File::options();
    Arc::new(options.read(true).write(true).custom_flags(libc::O_DIRECT).open(named.path()).unwrap())
}

fn attach(aio: &mut LinuxAio, file: &Arc<File>) -> Target {
    aio.register_file(0, &FileSpec::of_file(Arc::clone(file), WHOLE)).unwrap()
}

fn read_call(page: &mut Page, block: u64, flags: i32) -> Call {
    let buffers = Buffers::One { base: page.0.as_mut_ptr(), len_bytes: 4096 };
    Call { verb: Verb::Read, flags, offset_bytes: block * 4096, len_bytes: 4096, buffers }
}

const SYNC: Call = Call { verb: Verb::Sync, flags: 0, offset_bytes: 0, len_bytes: 0, buffers: Buffers::None };

fn queue(aio: &mut LinuxAio, name: u64, target: Target, call: &Call) {
    // SAFETY: 1. pages are never freed; 2. tests keep their files to the end.
    unsafe { aio.queue(name, target, call) }.unwrap();
}

/// Waits for `count` results, and returns them by the name of their call.
fn results(aio: &mut LinuxAio, count: usize) -> Vec<(u64, i32)> {
    let mut results = Vec::new();
    let deadline = std::time::Instant::now() + Duration::from_secs(300);
    while results.len() < count {
        assert!(std::time::Instant::now() < deadline, "{results:?}");
        aio.wait(Some(Duration::from_secs(1))).unwrap();
        aio.begin_reap();
        results.extend(std::iter::from_fn(|| aio.pop()).map(|raw| (raw.user_data, raw.result)));
    }
    results.sort_unstable();
    results
}

/// Queues a call that never ends, because no thread writes to `fd`.
fn queue_stuck(aio: &mut LinuxAio, name: u64, fd: &OwnedFd) {
    let poll = Iocb { buffer: libc::POLLIN as u64, ..iocb(name, fd.as_raw_fd(), Command::Poll) };
    assert!(aio.calls.push(poll));
}

fn kick_fd() -> Arc<OwnedFd> {
    Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap())
}

fn kick(fd: &OwnedFd) {
    rustix::io::write(fd, &1_u64.to_ne_bytes()).unwrap();
}

fn ready(aio: &mut LinuxAio) -> usize {
    let mut events = Vec::new();
    aio.take_ready(&mut events);
    events.len()
}

fn aio_max_nr() -> u32 {
    std::fs::read_to_string("/proc/sys/fs/aio-max-nr").unwrap().trim().parse().unwrap_or(u32::MAX)
}

#[test]
fn file_in_the_page_cache_is_refused_with_the_reason() {
    let mut engine = LinuxAioEngine::new(config(8)).unwrap();
    engine.start().unwrap();
    let file = Arc::new(tempfile::tempfile().unwrap());
    let refused = engine.attach_file(FileSpec::of_file(file, Alignment::BUFFERED)).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::Unsupported);
    assert!(refused.to_string().starts_with("linux-aio needs O_DIRECT (--cache none"), "{refused}");
}

#[test]
fn depth_beyond_the_hosts_limit_is_refused_with_the_limit() {
    let limit = aio_max_nr();
    assert!(limit < MAX_DEPTH - 2, "this host has no limit that could be exceeded");
    let refused = LinuxAioEngine::new(config(limit + 1)).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::QuotaExceeded);
    let text = refused.to_string();
    assert!(text.starts_with("fs.aio-max-nr is exhausted: "), "{text}");
    assert!(text.contains(&format!(" of {limit} are in use")), "{text}");
    assert!(text.contains(&format!(", {} more are needed", limit + 2)), "{text}");
}

#[test]
fn depth_of_nothing_is_refused() {
    let refused = LinuxAioEngine::new(config(0)).unwrap_err();
    assert_eq!(refused.to_string(), "linux-aio depth 0 is not between 1 and 268435454");
}

#[test]
fn old_kernel_and_forbidden_calls_are_told_apart() {
    let kinds =
        [Errno::NOSYS, Errno::PERM, Errno::NOMEM].map(|errno| context::cannot_set_up(errno, 1).kind());
    let expected = [io::ErrorKind::Unsupported, io::ErrorKind::PermissionDenied, io::ErrorKind::OutOfMemory];
    assert_eq!(kinds, expected);
    assert_eq!(cannot_poll(Errno::INVAL.into()).kind(), io::ErrorKind::Unsupported);
}

#[test]
fn description_says_whether_completions_cost_a_system_call() {
    let engine = LinuxAioEngine::new(config(8)).unwrap();
    assert_eq!(engine.describe(), "linux-aio: 8 calls at once, completions without a system call: yes");
}

#[test]
fn ring_that_is_passed_many_times_gives_every_result_once() {
    let (mut aio, file, page) = (aio(), direct_file(), page());
    let target = attach(&mut aio, &file);
    let rounds = 3 * u64::from(UserRing::of(&aio.context).unwrap().event_count()) / u64::from(DEPTH) + 1;
    for round in 0..rounds {
        let names = round * u64::from(DEPTH)..(round + 1) * u64::from(DEPTH);
        for name in names.clone() {
            queue(&mut aio, name, target, &read_call(page, name % 4, 0));
        }
        let expected: Vec<(u64, i32)> = names.map(|name| (name, 4096)).collect();
        assert_eq!(results(&mut aio, DEPTH as usize), expected);
    }
    assert_eq!(page.0[0], page.0[4095]);
}

#[test]
fn calls_beyond_what_the_kernel_takes_stay_queued_and_follow() {
    let ((mut aio, depth), file, page) =
        (aio_with_more_blocks_than_the_kernel_takes(), direct_file(), page());
    let target = attach(&mut aio, &file);
    for name in 0..depth.into() {
        queue(&mut aio, name, target, &read_call(page, 0, 0));
    }
    aio.submit().unwrap();
    let left = aio.calls.pending().len();
    assert!(left > 0, "the kernel took them all");
    let expected: Vec<(u64, i32)> = (0..depth.into()).map(|name| (name, 4096)).collect();
    assert_eq!(results(&mut aio, depth as usize), expected);
}

#[test]
fn call_beyond_the_context_is_made_by_a_thread_and_the_kicks_keep_their_place() {
    let (mut aio, file, page) = (aio(), direct_file(), page());
    let (target, fd) = (attach(&mut aio, &file), kick_fd());
    aio.watch(Arc::clone(&fd), WatchToken(1)).unwrap();
    kick(&fd);
    aio.begin_reap();
    assert!(aio.pop().is_none() && !aio.kicks_armed);
    for name in 0..=u64::from(DEPTH) {
        queue(&mut aio, name, target, &read_call(page, 0, 0));
    }
    aio.submit().unwrap();
    assert!(aio.kicks_armed);
    assert_eq!((results(&mut aio, DEPTH as usize + 1).len(), aio.pool.threads()), (DEPTH as usize + 1, 1));
}

#[test]
fn worker_whose_calls_the_kernel_does_not_take_neither_sleeps_for_ever_nor_misses_a_kick() {
    let (mut aio, depth) = aio_with_more_blocks_than_the_kernel_takes();
    let (nobody, kicks) = (kick_fd(), kick_fd());
    aio.watch(Arc::clone(&kicks), WatchToken(1)).unwrap();
    (0..depth.into()).for_each(|name| queue_stuck(&mut aio, name, &nobody));
    for _ in 0..3 {
        aio.wait(None).unwrap();
        aio.begin_reap();
        assert!(aio.pop().is_none());
        assert!(!aio.calls.pending().is_empty());
        assert_eq!(ready(&mut aio), 0);
        kick(&kicks);
        aio.wait(None).unwrap();
        aio.begin_reap();
        assert!(aio.pop().is_none());
        assert_eq!(ready(&mut aio), 1);
    }
}

#[test]
fn refused_calls_fail_alone_at_the_head_and_inside_of_a_batch() {
    let (mut aio, file, page) = (aio(), direct_file(), page());
    let target = attach(&mut aio, &file);
    let unknown_flag = 1 << 30;
    for (name, flags) in [(0, unknown_flag), (1, 0), (2, unknown_flag), (3, unknown_flag), (4, 0)] {
        queue(&mut aio, name, target, &read_call(page, 0, flags));
    }
    let refused = -libc::EOPNOTSUPP;
    assert_eq!(results(&mut aio, 5), [(0, refused), (1, 4096), (2, refused), (3, refused), (4, 4096)]);
}

#[test]
fn sync_is_made_by_the_kernel_and_needs_no_thread() {
    let (mut aio, file) = (aio(), direct_file());
    let target = attach(&mut aio, &file);
    queue(&mut aio, 1, target, &SYNC);
    assert_eq!(results(&mut aio, 1), [(1, 0)]);
    assert_eq!((aio.has_fdsync, aio.pool.threads()), (true, 0));
}

#[test]
fn sync_that_the_kernel_does_not_know_is_made_by_a_thread_from_then_on() {
    let (mut aio, file) = (aio(), direct_file());
    // An eventfd cannot be synced, which gives the same error.
    aio.files.push(Some(Arc::new(File::from(eventfd(0, EventfdFlags::empty()).unwrap()))));
    aio.pool.attach(FileId(0));
    queue(&mut aio, 1, Target::Registered(0), &SYNC);
    assert_eq!(results(&mut aio, 1), [(1, -libc::EINVAL)]);
    aio.pool.detach(FileId(0));
    assert_eq!((aio.has_fdsync, aio.pool.threads()), (false, 1));
    let target = attach(&mut aio, &file);
    queue(&mut aio, 2, target, &SYNC);
    assert_eq!(results(&mut aio, 1), [(2, 0)]);
}

#[test]
fn call_that_was_not_submitted_is_cancelled_at_once() {
    let (mut aio, file, page) = (aio(), direct_file(), page());
    let target = attach(&mut aio, &file);
    let allocate = Call { verb: Verb::Allocate, len_bytes: 4096, ..SYNC };
    queue(&mut aio, 1, target, &read_call(page, 0, 0));
    queue(&mut aio, 2, target, &read_call(page, 0, 0));
    queue(&mut aio, 3, target, &allocate);
    aio.cancel(1);
    aio.cancel(3);
    assert_eq!(results(&mut aio, 3), [(1, -libc::ECANCELED), (2, 4096), (3, -libc::ECANCELED)]);
}

#[test]
fn worker_that_never_sleeps_hears_of_every_kick() {
    let mut aio = aio();
    let fd = kick_fd();
    aio.watch(Arc::clone(&fd), WatchToken(1)).unwrap();
    for _ in 0..3 {
        kick(&fd);
        aio.begin_reap();
        assert!(aio.pop().is_none());
        assert_eq!(ready(&mut aio), 1);
        aio.submit().unwrap();
    }
}

#[test]
fn kick_while_the_poll_is_not_armed_is_reported_by_the_next_one() {
    let mut aio = aio();
    let fd = kick_fd();
    aio.watch(Arc::clone(&fd), WatchToken(1)).unwrap();
    kick(&fd);
    aio.begin_reap();
    assert!(aio.pop().is_none());
    assert_eq!(ready(&mut aio), 1);
    kick(&fd);
    aio.wait(None).unwrap();
    aio.begin_reap();
    assert!(aio.pop().is_none());
    assert_eq!(ready(&mut aio), 1);
}

#[test]
fn more_kicked_fds_than_one_system_call_takes_are_all_reported() {
    let mut aio = aio();
    let fds: Vec<_> = (0..200).map(|_| kick_fd()).collect();
    for (token, fd) in (0..).zip(&fds) {
        aio.watch(Arc::clone(fd), WatchToken(token)).unwrap();
        kick(fd);
    }
    let mut tokens = std::collections::HashSet::new();
    while tokens.len() < fds.len() {
        aio.wait(Some(Duration::from_secs(300))).unwrap();
        aio.begin_reap();
        assert!(aio.pop().is_none());
        let mut events = Vec::new();
        aio.take_ready(&mut events);
        assert!(!events.is_empty(), "only {} of 200", tokens.len());
        tokens.extend(events.iter().map(|event| match event {
            Event::Readable(token) => token.0,
            other => panic!("{other:?}"),
        }));
    }
}

#[test]
fn without_a_ring_results_and_kicks_come_out_of_system_calls() {
    let (mut aio, file, page) = (aio_without_ring(), direct_file(), page());
    let (target, fd) = (attach(&mut aio, &file), kick_fd());
    aio.watch(Arc::clone(&fd), WatchToken(1)).unwrap();
    for round in 0..5 {
        for name in 0..u64::from(DEPTH) {
            queue(&mut aio, name, target, &read_call(page, round % 4, 0));
        }
        kick(&fd);
        assert_eq!(results(&mut aio, DEPTH as usize).len(), DEPTH as usize);
        assert_eq!(ready(&mut aio), 1);
    }
}

#[test]
fn engine_dropped_with_a_call_outstanding_leaves_the_context_to_it() {
    let (mut aio, fd) = (aio(), kick_fd());
    queue_stuck(&mut aio, 5, &fd);
    aio.submit().unwrap();
    let context = Context::of_id(aio.context.address());
    drop(aio);
    kick(&fd);
    let mut events = [IoEvent::default(); 2];
    let taken = context.take(1, &mut events, Some(Duration::from_secs(300))).unwrap();
    assert_eq!((taken, events[0].data), (1, 5));
}

#[test]
fn dropped_engines_give_back_their_share_of_the_hosts_limit() {
    let depth = (aio_max_nr() / 4).min(1 << 18);
    let made = (0..5).map(|_| LinuxAioEngine::new(config(depth)).map(drop)).filter(Result::is_ok).count();
    assert_eq!(made, 5);
}
