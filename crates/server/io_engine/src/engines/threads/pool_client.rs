//! The worker's side of a pool: hands over calls, collects results, and sleeps.
//!
//! `hand_over → start → pool … collect → pop`, and `finished → pop` for calls that the worker made itself
//!
//! The worker checks the kick eventfds when it sleeps. While it is awake, it checks them after an amount of work
//! instead of a number of passes, because one pass may be long.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use super::pool::{Job, Pool};
use crate::backend::{Call, RawResult, Target};
use crate::config::EngineConfig;
use crate::engine::{Event, FileId, WatchId, WatchToken};
use crate::engines::epoll::EpollWatcher;

/// Work between two checks of the kicks. A pass without results counts as one unit.
const LOOK_AFTER: u32 = 256;
/// Work per result. One check per 64 calls costs each of them about 1% of its time.
const RESULT_WORK: u32 = 4;
/// Bytes per unit of work: a copy of 512 KiB takes as long as dozens of small calls.
const BYTES_PER_WORK: u32 = 16 << 10;

#[derive(Debug)]
pub(crate) struct PoolClient {
    pool: Pool,
    batch: VecDeque<Job>,
    /// Calls in the pool.
    away: usize,
    results: VecDeque<RawResult>,
    watcher: EpollWatcher,
    work: u32,
}

impl PoolClient {
    pub fn new(config: &EngineConfig) -> io::Result<Self> {
        let depth = config.depth as usize;
        let pool = Pool::new(config.threads, config.depth)?;
        let mut watcher = EpollWatcher::new()?;
        watcher.add_waker(pool.wake_fd())?;
        Ok(Self {
            pool,
            batch: VecDeque::with_capacity(depth),
            away: 0,
            results: VecDeque::with_capacity(depth),
            watcher,
            work: 0,
        })
    }

    pub fn serve_one_disk(&mut self) {
        self.pool.serve_one_disk();
    }

    /// Prepares for calls on this file.
    pub fn attach(&mut self, index: u32) {
        self.pool.attach(FileId(index));
    }

    pub fn detach(&mut self, index: u32) {
        self.pool.detach(FileId(index));
    }

    /// Queues a call for the pool. The next `start` starts it.
    #[inline]
    pub fn hand_over(&mut self, user_data: u64, target: Target, file: &Arc<File>, call: &Call) {
        let Target::Registered(index) = target else { unreachable!("files are known by their index") };
        self.batch.push_back(Job { user_data, owner: FileId(index), file: Arc::clone(file), call: *call });
    }

    #[inline]
    pub fn start(&mut self) {
        if !self.batch.is_empty() {
            self.away += self.batch.len();
            self.pool.push_batch(&mut self.batch);
        }
    }

    /// Records the result of a call that the worker made itself.
    #[inline]
    pub fn finished(&mut self, user_data: u64, result: i32) {
        self.results.push_back(RawResult { user_data, result });
        self.work = self.work.saturating_add(u32::try_from(result).unwrap_or(0) / BYTES_PER_WORK);
    }

    /// Records that the worker may have blocked in a call. The next `collect` checks the kicks.
    #[inline]
    pub fn waited(&mut self) {
        self.work = LOOK_AFTER;
    }

    /// Collects the pool's results, and checks the kicks after enough work.
    #[inline]
    pub fn collect(&mut self) {
        if self.away > 0 {
            let before = self.results.len();
            self.pool.take_results(&mut self.results);
            self.away -= self.results.len() - before;
        }
        #[allow(clippy::cast_possible_truncation)] // at most the engine's depth
        let results = self.results.len() as u32;
        self.work = self.work.saturating_add(1 + results * RESULT_WORK);
        if self.work >= LOOK_AFTER {
            self.work = 0;
            self.look();
        }
    }

    fn look(&mut self) {
        if !self.watcher.is_idle() {
            // If the error persists, `sleep` reports it.
            let _ = self.watcher.wait(Some(Duration::ZERO));
        }
    }

    #[inline]
    pub fn pop(&mut self) -> Option<RawResult> {
        self.results.pop_front()
    }

    /// Sleeps until a result or a kick is available.
    pub fn sleep(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        let may_sleep = self.arm();
        let slept = self.watcher.wait(if may_sleep { timeout } else { Some(Duration::ZERO) });
        self.end_sleep();
        slept
    }

    /// Returns whether to sleep. Until `disarm`, a result or a kick makes `descriptor` readable.
    pub fn arm(&mut self) -> bool {
        self.work = 0;
        self.results.is_empty() && (self.away == 0 || self.pool.arm())
    }

    pub fn disarm(&mut self) -> io::Result<()> {
        self.end_sleep();
        self.watcher.wait(Some(Duration::ZERO))
    }

    fn end_sleep(&mut self) {
        if self.away > 0 {
            self.pool.disarm();
        }
    }

    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.watcher.fd()
    }

    /// Removes a call that no thread has started.
    pub fn cancel(&mut self, user_data: u64) {
        let place = self.batch.iter().position(|job| job.user_data == user_data);
        let not_started = place.and_then(|place| self.batch.remove(place)).is_some();
        let not_taken = !not_started && self.pool.cancel(user_data);
        self.away -= usize::from(not_taken);
        if not_started || not_taken {
            self.finished(user_data, -libc::ECANCELED);
        }
    }

    pub fn take_ready(&mut self, events: &mut Vec<Event>) {
        self.watcher.take_ready(events);
    }

    pub fn watch(&mut self, fd: Arc<OwnedFd>, token: WatchToken) -> io::Result<WatchId> {
        self.watcher.watch(fd, token)
    }

    pub fn unwatch(&mut self, id: WatchId) {
        self.watcher.unwatch(id);
    }
}

/// An engine's files, by the index that calls use.
#[derive(Debug)]
pub(crate) struct Files<T>(Vec<Option<T>>);

impl<T> Files<T> {
    pub fn new() -> Self {
        Self(Vec::new())
    }

    pub fn put(&mut self, index: u32, file: T) -> Target {
        let place = index as usize;
        if place >= self.0.len() {
            self.0.resize_with(place + 1, || None);
        }
        self.0[place] = Some(file);
        Target::Registered(index)
    }

    pub fn remove(&mut self, index: u32) {
        if let Some(place) = self.0.get_mut(index as usize) {
            *place = None;
        }
    }

    /// The file of a call. The core queues calls only for attached files.
    #[inline]
    pub fn get_mut(&mut self, target: Target) -> Option<&mut T> {
        match target {
            Target::Registered(index) => self.0.get_mut(index as usize)?.as_mut(),
            Target::Fd(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;
    use crate::backend::Buffers;
    use crate::backend::Verb;

    fn client() -> PoolClient {
        let config = EngineConfig { depth: 8, threads: 2, ..EngineConfig::default() };
        let mut client = PoolClient::new(&config).unwrap();
        client.attach(0);
        client
    }

    const TARGET: Target = Target::Registered(0);

    fn file() -> Arc<File> {
        Arc::new(memfd_create("empty", MemfdFlags::CLOEXEC).unwrap().into())
    }

    fn sync() -> Call {
        Call { verb: Verb::Sync, flags: 0, offset_bytes: 0, len_bytes: 0, buffers: Buffers::None }
    }

    fn passes_until_a_kick_is_seen(client: &mut PoolClient, mut pass: impl FnMut(&mut PoolClient)) -> u32 {
        let kick = Arc::new(eventfd(1, EventfdFlags::NONBLOCK).unwrap());
        client.watch(kick, WatchToken(1)).unwrap();
        let mut events = Vec::new();
        for passes in 1..=LOOK_AFTER {
            pass(client);
            client.collect();
            client.take_ready(&mut events);
            if !events.is_empty() {
                return passes;
            }
        }
        panic!("not seen in {LOOK_AFTER} passes");
    }

    #[test]
    fn worker_that_never_sleeps_sees_a_kick_after_some_passes() {
        assert!(passes_until_a_kick_is_seen(&mut client(), |_| {}) > 1);
    }

    #[test]
    fn worker_that_waited_in_a_call_sees_a_kick_at_once() {
        assert_eq!(passes_until_a_kick_is_seen(&mut client(), PoolClient::waited), 1);
    }

    #[test]
    fn large_copies_bring_the_next_look_nearer() {
        let large = |client: &mut PoolClient| {
            client.finished(1, 1 << 20);
            client.finished(2, 1 << 20);
            client.finished(3, 1 << 20);
        };
        assert!(passes_until_a_kick_is_seen(&mut client(), large) < 4);
    }

    #[test]
    fn call_that_was_not_handed_over_yet_is_cancelled() {
        let mut client = client();
        client.hand_over(5, TARGET, &file(), &sync());
        client.cancel(5);
        client.start();
        client.collect();
        let result = client.pop().unwrap();
        assert_eq!((result.user_data, result.result, client.away), (5, -libc::ECANCELED, 0));
    }

    #[test]
    fn sleep_ends_with_the_result_of_the_pool() {
        let mut client = client();
        for name in 0..500 {
            client.hand_over(name, TARGET, &file(), &sync());
            client.start();
            let result = loop {
                client.collect();
                if let Some(result) = client.pop() {
                    break result;
                }
                client.sleep(None).unwrap();
            };
            assert_eq!((result.user_data, result.result, client.away), (name, 0, 0));
        }
    }
}
