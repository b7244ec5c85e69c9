//! Tests the pool with real threads. A call that waits is a read of one byte from an empty pipe.
//!
//! See also: which thread takes which job (`schedule.rs`).

use std::io::{PipeWriter, Write};

use rustix::fs::{MemfdFlags, memfd_create};

use super::*;
use crate::backend::Buffers;
use crate::engines::epoll::EpollWatcher;

const OWNER: FileId = FileId(0);
const NEIGHBOUR: FileId = FileId(1);
/// A test that waits this long has failed.
const PATIENCE: Duration = Duration::from_secs(300);
/// Reads at the file's own position, because a pipe has no offsets.
const NO_OFFSET: u64 = u64::MAX;

impl Pool {
    pub fn threads(&self) -> usize {
        self.shared.state().schedule.threads()
    }

    fn asleep(&self) -> usize {
        self.shared.state().sleepers.len()
    }

    fn written(&self) -> u64 {
        let mut count = [0; 8];
        rustix::io::read(&self.shared.wake, &mut count).map_or(0, |_| u64::from_ne_bytes(count))
    }

    fn push(&self, jobs: impl IntoIterator<Item = Job>) {
        let is_new = !self.shared.state().schedule.knows(OWNER);
        if is_new {
            self.attach(OWNER);
        }
        let mut jobs = jobs.into_iter().collect();
        self.push_batch(&mut jobs);
        assert!(jobs.is_empty());
    }

    /// Polls until `count` results are available.
    fn take(&self, count: usize) -> Vec<u64> {
        let mut results = VecDeque::new();
        wait_until(|| {
            self.take_results(&mut results);
            results.len() >= count
        });
        results.iter().map(|result| result.user_data).collect()
    }
}

fn wait_until(mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "never happened");
        std::thread::yield_now();
    }
}

fn empty_file() -> Arc<File> {
    Arc::new(memfd_create("empty", MemfdFlags::CLOEXEC).unwrap().into())
}

/// A file whose reads wait, and its writer: each written byte ends one read.
fn waiting_file() -> (Arc<File>, PipeWriter) {
    let (reader, writer) = std::io::pipe().unwrap();
    (Arc::new(OwnedFd::from(reader).into()), writer)
}

/// Reads one byte into memory that is never freed.
fn read_one(user_data: u64, file: &Arc<File>, offset_bytes: u64) -> Job {
    let base = Box::leak(Box::new(0_u8));
    let buffers = Buffers::One { base, len_bytes: 1 };
    let call = Call { verb: Verb::Read, flags: 0, offset_bytes, len_bytes: 1, buffers };
    Job { user_data, owner: OWNER, file: Arc::clone(file), call }
}

fn quick(user_data: u64, file: &Arc<File>) -> Job {
    let call = Call { verb: Verb::Read, flags: 0, offset_bytes: 0, len_bytes: 0, buffers: Buffers::None };
    Job { user_data, owner: OWNER, file: Arc::clone(file), call }
}

#[test]
fn pool_grows_to_its_bound_and_further_jobs_wait() {
    let pool = Pool::new(3, 8).unwrap();
    let (file, mut bytes) = waiting_file();
    pool.push((0..5).map(|name| read_one(name, &file, NO_OFFSET)));
    wait_until(|| pool.threads() == 3 && (0..5).filter(|&name| pool_has(&pool, name)).count() == 2);
    bytes.write_all(&[1; 5]).unwrap();
    let mut names = pool.take(5);
    names.sort_unstable();
    assert_eq!((names, pool.threads()), (vec![0, 1, 2, 3, 4], 3));
}

/// Whether the job still waits in the pool.
fn pool_has(pool: &Pool, name: u64) -> bool {
    let mut state = pool.shared.state();
    let job = state.schedule.remove(|job| job.user_data == name);
    job.map(|job| state.schedule.push(OWNER, job.class(), job)).is_some()
}

#[test]
fn jobs_that_come_one_by_one_share_one_thread() {
    let pool = Pool::new(64, 8).unwrap();
    let file = empty_file();
    for name in 0..100 {
        pool.push([quick(name, &file)]);
        assert_eq!(pool.take(1), [name]);
        wait_until(|| pool.asleep() == pool.threads());
    }
    assert_eq!(pool.threads(), 1);
}

#[test]
fn idle_pool_loses_all_its_threads_and_grows_again() {
    let pool = Pool::with(8, 64, Duration::from_millis(1), start_thread).unwrap();
    let file = empty_file();
    for _ in 0..3 {
        pool.push((0..64).map(|name| quick(name, &file)));
        assert_eq!(pool.take(64).len(), 64);
        wait_until(|| pool.threads() == 0);
        assert_eq!(pool.asleep(), 0);
    }
}

#[test]
fn job_that_no_thread_took_is_cancelled_and_has_no_result() {
    let pool = Pool::new(1, 8).unwrap();
    let (file, mut bytes) = waiting_file();
    pool.push([read_one(1, &file, NO_OFFSET)]);
    wait_until(|| !pool_has(&pool, 1));
    pool.push([quick(2, &empty_file()), quick(3, &empty_file())]);
    assert_eq!([1, 2, 2].map(|name| pool.cancel(name)), [false, true, false]);
    bytes.write_all(&[1]).unwrap();
    assert_eq!(pool.take(2), [1, 3]);
}

#[test]
fn result_says_that_the_file_was_let_go() {
    let pool = Pool::new(2, 8).unwrap();
    let file = empty_file();
    for name in 0..2000 {
        pool.push([quick(name, &file)]);
        pool.take(1);
        assert_eq!(Arc::strong_count(&file), 1, "after {name}");
    }
}

#[test]
fn eventfd_is_written_once_per_arming_and_never_without() {
    let pool = Pool::new(2, 64).unwrap();
    let (file, mut bytes) = waiting_file();
    pool.push((0..32).map(|name| quick(name, &empty_file())));
    pool.take(32);
    assert_eq!(pool.written(), 0);
    pool.push((0..4).map(|name| read_one(name, &file, NO_OFFSET)));
    assert!(pool.arm());
    bytes.write_all(&[1; 4]).unwrap();
    pool.take(4);
    wait_until(|| pool.written() == 1);
    pool.push([quick(1, &file)]);
    pool.take(1);
    assert_eq!(pool.written(), 0);
}

#[test]
fn arming_with_a_result_there_is_refused_and_nothing_is_written() {
    let pool = Pool::new(2, 8).unwrap();
    pool.push([quick(1, &empty_file())]);
    wait_until(|| !pool.shared.state().results.is_empty());
    assert!(!pool.arm());
    pool.push([quick(2, &empty_file())]);
    assert_eq!((pool.take(2).len(), pool.written()), (2, 0));
}

#[test]
fn worker_that_sleeps_between_batches_of_every_size_is_always_woken() {
    let pool = Pool::new(4, 64).unwrap();
    let mut watcher = EpollWatcher::new().unwrap();
    watcher.add_waker(pool.wake_fd()).unwrap();
    let (file, mut results) = (empty_file(), VecDeque::new());
    for round in 0..20_000 {
        let count = 1 + round % 7;
        pool.push((0..count).map(|name| quick(name, &file)));
        let mut done = 0;
        while done < count {
            // Waits longer in some rounds, so that arming coincides with every stage of a thread's work.
            (0..round % 13 * 40).for_each(|_| std::hint::spin_loop());
            if pool.arm() {
                let slept = Instant::now();
                watcher.wait(Some(PATIENCE)).unwrap();
                assert!(slept.elapsed() < PATIENCE, "asleep for ever in round {round}");
                pool.disarm();
            }
            pool.take_results(&mut results);
            done += results.drain(..).len() as u64;
        }
    }
}

#[test]
fn jobs_are_done_by_the_worker_where_no_thread_can_be_had() {
    let pool = Pool::with(4, 8, IDLE, |_| Err(io::ErrorKind::WouldBlock.into())).unwrap();
    for _ in 0..2 {
        pool.push((0..3).map(|name| quick(name, &empty_file())));
        let mut results = VecDeque::new();
        pool.take_results(&mut results);
        assert_eq!((results.len(), pool.threads()), (3, 0));
    }
}

#[test]
fn one_thread_does_all_jobs_where_no_second_can_be_had() {
    let only_from_the_worker = |shared| match std::thread::current().name() {
        Some("bareblk-io") => Err(io::ErrorKind::WouldBlock.into()),
        _ => start_thread(shared),
    };
    let pool = Pool::with(4, 64, IDLE, only_from_the_worker).unwrap();
    pool.push((0..64).map(|name| quick(name, &empty_file())));
    assert_eq!((pool.take(64).len(), pool.threads()), (64, 1));
}

#[test]
fn dropped_pool_leaves_a_running_call_its_file_and_its_memory() {
    let pool = Pool::new(1, 8).unwrap();
    let (file, mut bytes) = waiting_file();
    let byte: &'static std::sync::atomic::AtomicU8 = Box::leak(Box::default());
    let mut job = read_one(1, &file, NO_OFFSET);
    job.call.buffers = Buffers::One { base: byte.as_ptr(), len_bytes: 1 };
    pool.push([job]);
    wait_until(|| !pool_has(&pool, 1));
    drop(pool);
    assert_eq!((Arc::strong_count(&file), byte.load(Ordering::Relaxed)), (2, 0));
    bytes.write_all(&[7]).unwrap();
    wait_until(|| Arc::strong_count(&file) == 1);
    assert_eq!(byte.load(Ordering::Relaxed), 7);
}

#[test]
fn dropped_pool_starts_no_waiting_job_and_its_threads_end() {
    let pool = Pool::new(1, 8).unwrap();
    let (file, mut bytes) = waiting_file();
    let waiting = empty_file();
    pool.push([read_one(1, &file, NO_OFFSET)]);
    wait_until(|| !pool_has(&pool, 1));
    pool.push([quick(2, &waiting)]);
    let shared = Arc::downgrade(&pool.shared);
    drop(pool);
    assert_eq!(Arc::strong_count(&waiting), 1);
    bytes.write_all(&[1]).unwrap();
    wait_until(|| shared.strong_count() == 0);
}

#[test]
fn dropped_pool_sends_its_sleeping_threads_home() {
    let pool = Pool::new(4, 64).unwrap();
    pool.push((0..64).map(|name| quick(name, &empty_file())));
    pool.take(64);
    let shared = Arc::downgrade(&pool.shared);
    drop(pool);
    wait_until(|| shared.strong_count() == 0);
}

#[test]
fn file_whose_calls_hang_keeps_no_thread_from_another_one() {
    let pool = Pool::new(4, 64).unwrap();
    let (file, mut bytes) = waiting_file();
    pool.attach(NEIGHBOUR);
    pool.push((0..40).map(|name| read_one(name, &file, NO_OFFSET)));
    wait_until(|| pool.threads() == 3);
    pool.push([Job { owner: NEIGHBOUR, ..quick(100, &empty_file()) }]);
    assert_eq!(pool.take(1), [100]);
    bytes.write_all(&[1; 40]).unwrap();
    assert_eq!(pool.take(40).len(), 40);
}
