//! Decides which job a thread takes next, and when the pool needs another thread. Starts no threads itself.
//!
//! - Each file has its share of the threads (`shares.rs`), and files are served round-robin, so calls that hang on one
//!   disk never occupy all threads. A file's own jobs keep their order.
//! - Jobs that may take long and move no data (`fdatasync`, `fallocate`) use at most half of the threads, which leaves
//!   the others to reads and writes. If both kinds wait, they alternate. Each file has its share of that half, too.
//! - The pool calls one thread per batch, even if more could be used. A thread that takes a job while others wait calls
//!   another thread before it makes its own call. Short calls then end before more threads arrive. Calling several at
//!   once costs more processor time and is no faster (docs/decisions/0014).

use std::collections::VecDeque;

use crate::core::shares::Shares;
use crate::engine::FileId;

/// The kind of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    /// Reads and writes.
    Transfer,
    /// Everything else.
    Long,
}

/// The action that waiting jobs require.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Help {
    Enough,
    /// Wake one sleeping thread.
    Wake,
    /// Start a thread.
    Start,
}

#[derive(Debug)]
pub(super) struct Schedule<T> {
    /// Indexed by file.
    lanes: Vec<Lane<T>>,
    /// Files with waiting jobs, without duplicates. The first is served next.
    turns: VecDeque<FileId>,
    /// Each file's share of the threads.
    shares: Shares,
    /// Each file's share of the threads that may run jobs of [`Class::Long`].
    long_shares: Shares,
    /// All threads, including those that were called and have not arrived.
    threads: usize,
    /// Threads that were called and have not arrived.
    coming: usize,
    limits: Limits,
}

/// The waiting jobs of one file.
#[derive(Debug)]
struct Lane<T> {
    transfers: VecDeque<T>,
    long: VecDeque<T>,
    long_had_last_turn: bool,
}

impl<T> Default for Lane<T> {
    fn default() -> Self {
        Self { transfers: VecDeque::new(), long: VecDeque::new(), long_had_last_turn: false }
    }
}

impl<T> Lane<T> {
    fn is_empty(&self) -> bool {
        self.transfers.is_empty() && self.long.is_empty()
    }

    fn queue(&mut self, class: Class) -> &mut VecDeque<T> {
        match class {
            Class::Transfer => &mut self.transfers,
            Class::Long => &mut self.long,
        }
    }

    /// The kind of job to serve next; `None` if no job may be served.
    fn next_class(&self, long_may: bool) -> Option<Class> {
        let long_may = long_may && !self.long.is_empty();
        if long_may && (self.transfers.is_empty() || !self.long_had_last_turn) {
            return Some(Class::Long);
        }
        (!self.transfers.is_empty()).then_some(Class::Transfer)
    }
}

/// The limits of a pool. None is zero.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Maximum number of threads. With many files there may be more (`shares.rs`).
    pub threads: u32,
    /// Maximum number of jobs of [`Class::Long`] at once. With many files there may be more.
    pub long: u32,
    /// Maximum number of called threads that have not arrived. More than the number of processors could not arrive
    /// together.
    pub coming: usize,
}

impl Limits {
    pub fn new(threads: u32, processors: usize) -> Self {
        Self { threads: threads.max(1), long: (threads / 2).max(1), coming: processors.max(1) }
    }
}

impl<T> Schedule<T> {
    pub fn new(limits: Limits) -> Self {
        Self {
            lanes: Vec::new(),
            turns: VecDeque::new(),
            shares: Shares::new(limits.threads, 1),
            long_shares: Shares::new(limits.long, 1),
            threads: 0,
            coming: 0,
            limits,
        }
    }

    /// Says that all files belong to one disk.
    pub fn serve_one_disk(&mut self) {
        self.shares.do_not_split();
        self.long_shares.do_not_split();
    }

    /// Gives the file its shares, and reserves capacity for `jobs` waiting jobs.
    pub fn attach(&mut self, file: FileId, jobs: usize) {
        self.shares.attach(file);
        self.long_shares.attach(file);
        let place = file.0 as usize;
        if place >= self.lanes.len() {
            self.lanes.resize_with(place + 1, Lane::default);
        }
        self.lanes[place].transfers.reserve(jobs);
        self.lanes[place].long.reserve(jobs);
        self.turns.reserve(self.lanes.len());
    }

    /// Removes the shares. No job of the file may wait or run.
    pub fn detach(&mut self, file: FileId) {
        self.shares.detach(file);
        self.long_shares.detach(file);
        self.lanes[file.0 as usize] = Lane::default();
        self.turns.retain(|&other| other != file);
    }

    #[inline]
    pub fn push(&mut self, file: FileId, class: Class, job: T) {
        let lane = &mut self.lanes[file.0 as usize];
        if lane.is_empty() && !self.turns.contains(&file) {
            self.turns.push_back(file);
        }
        lane.queue(class).push_back(job);
    }

    /// Returns a job for a thread that has arrived, from the next file that may use another thread.
    #[inline]
    pub fn take(&mut self) -> Option<(Class, T)> {
        for _ in 0..self.turns.len() {
            let file = self.turns.pop_front()?;
            let taken = self.take_of(file);
            if !self.lanes[file.0 as usize].is_empty() {
                self.turns.push_back(file);
            }
            if taken.is_some() {
                return taken;
            }
        }
        None
    }

    #[inline]
    fn take_of(&mut self, file: FileId) -> Option<(Class, T)> {
        let lane = &mut self.lanes[file.0 as usize];
        let class = lane.next_class(self.long_shares.room(file) > 0)?;
        if !self.shares.take(file) {
            return None;
        }
        lane.long_had_last_turn = class == Class::Long;
        if class == Class::Long {
            let taken = self.long_shares.take(file);
            debug_assert!(taken, "there was room");
        }
        lane.queue(class).pop_front().map(|job| (class, job))
    }

    /// Records the end of a job.
    #[inline]
    pub fn ended(&mut self, file: FileId, class: Class) {
        self.shares.give_back(file);
        if class == Class::Long {
            self.long_shares.give_back(file);
        }
    }

    /// Counts another thread as called if there is work for it.
    #[inline]
    pub fn call_help(&mut self, any_asleep: bool) -> Help {
        if self.coming >= self.limits.coming || !self.has_startable(self.coming) {
            return Help::Enough;
        }
        if !any_asleep && self.threads >= self.shares.places() as usize {
            return Help::Enough;
        }
        self.coming += 1;
        if any_asleep {
            return Help::Wake;
        }
        self.threads += 1;
        Help::Start
    }

    /// Whether more jobs than `count` may start.
    #[inline]
    fn has_startable(&self, count: usize) -> bool {
        let startable = self.turns.iter().map(|&file| {
            let lane = &self.lanes[file.0 as usize];
            let long = lane.long.len().min(self.long_shares.room(file));
            (lane.transfers.len() + long).min(self.shares.room(file))
        });
        let mut sum = 0;
        startable.into_iter().any(|of_file| {
            sum += of_file;
            sum > count
        })
    }

    /// Counts threads that are woken for a reason other than work.
    pub fn called(&mut self, count: usize) {
        self.coming += count;
    }

    /// Records that a called thread has arrived.
    #[inline]
    pub fn arrived(&mut self) {
        self.coming -= 1;
    }

    /// Records that a thread could not be started.
    pub fn not_started(&mut self) {
        self.coming -= 1;
        self.threads -= 1;
    }

    /// Records that an arrived thread ends.
    pub fn left(&mut self) {
        self.threads -= 1;
    }

    pub fn threads(&self) -> usize {
        self.threads
    }

    #[cfg(test)]
    pub fn knows(&self, file: FileId) -> bool {
        self.shares.used(file).is_some()
    }

    /// Removes a job for which `is_it` returns true.
    pub fn remove(&mut self, is_it: impl Fn(&T) -> bool) -> Option<T> {
        let queues = self.lanes.iter_mut().flat_map(|lane| [&mut lane.transfers, &mut lane.long]);
        let mut found = queues.filter_map(|queue| {
            let at = queue.iter().position(&is_it)?;
            queue.remove(at)
        });
        found.next()
    }

    pub fn clear(&mut self) {
        self.turns.clear();
        for lane in &mut self.lanes {
            lane.transfers.clear();
            lane.long.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: FileId = FileId(0);
    const OTHER: FileId = FileId(1);

    fn schedule(threads: u32, jobs: &[(Class, u32)]) -> Schedule<u32> {
        let mut schedule = Schedule::new(Limits::new(threads, 4));
        schedule.attach(FILE, 16);
        jobs.iter().for_each(|&(class, job)| schedule.push(FILE, class, job));
        schedule
    }

    fn taken(schedule: &mut Schedule<u32>) -> Vec<u32> {
        std::iter::from_fn(|| schedule.take().map(|(_, job)| job)).collect()
    }

    use Class::{Long, Transfer};

    #[test]
    fn long_jobs_beyond_half_of_the_threads_wait_until_one_ends() {
        let mut schedule = schedule(4, &[(Long, 1), (Long, 2), (Long, 3), (Transfer, 4), (Transfer, 5)]);
        assert_eq!(taken(&mut schedule), [1, 4, 2, 5]);
        schedule.ended(FILE, Long);
        assert_eq!(taken(&mut schedule), [3]);
    }

    #[test]
    fn one_thread_gives_both_kinds_their_turns() {
        let mut schedule = schedule(1, &[(Transfer, 1), (Transfer, 2), (Long, 3), (Long, 4)]);
        let mut order = Vec::new();
        while let Some((class, job)) = schedule.take() {
            schedule.ended(FILE, class);
            order.push(job);
        }
        assert_eq!(order, [3, 1, 4, 2]);
    }

    #[test]
    fn help_is_woken_before_it_is_started_and_stays_within_the_bound() {
        let jobs: Vec<_> = (0..16).map(|job| (Transfer, job)).collect();
        let mut schedule = schedule(3, &jobs);
        assert_eq!([false; 3].map(|asleep| schedule.call_help(asleep)), [Help::Start; 3]);
        assert_eq!(schedule.call_help(false), Help::Enough);
        schedule.arrived();
        assert_eq!((schedule.call_help(true), schedule.threads()), (Help::Wake, 3));
    }

    #[test]
    fn no_more_threads_are_on_their_way_than_there_are_processors() {
        let jobs: Vec<_> = (0..16).map(|job| (Transfer, job)).collect();
        let mut schedule = schedule(16, &jobs);
        (0..4).for_each(|_| _ = schedule.call_help(false));
        assert_eq!((schedule.call_help(true), schedule.threads()), (Help::Enough, 4));
        schedule.arrived();
        assert_eq!(schedule.call_help(true), Help::Wake);
    }

    #[test]
    fn no_more_threads_are_on_their_way_than_there_are_jobs() {
        let mut schedule = schedule(16, &[(Transfer, 1)]);
        assert_eq!([false; 2].map(|asleep| schedule.call_help(asleep)), [Help::Start, Help::Enough]);
    }

    #[test]
    fn nobody_is_called_for_long_jobs_that_may_not_start() {
        let mut schedule = schedule(2, &[(Long, 1), (Long, 2)]);
        assert_eq!(schedule.take(), Some((Long, 1)));
        assert_eq!(schedule.call_help(true), Help::Enough);
        schedule.ended(FILE, Long);
        assert_eq!(schedule.call_help(true), Help::Wake);
    }

    #[test]
    fn removed_job_is_not_taken() {
        let mut schedule = schedule(2, &[(Transfer, 1), (Long, 2), (Transfer, 3)]);
        assert_eq!((schedule.remove(|&job| job == 2), schedule.remove(|&job| job == 2)), (Some(2), None));
        assert_eq!(taken(&mut schedule), [1, 3]);
    }

    #[test]
    fn file_whose_jobs_never_end_leaves_threads_to_another() {
        let jobs: Vec<_> = (0..100).map(|job| (Transfer, job)).collect();
        let mut schedule = schedule(8, &jobs);
        schedule.attach(OTHER, 16);
        assert_eq!(taken(&mut schedule), [0, 1, 2, 3, 4, 5]);
        schedule.push(OTHER, Transfer, 200);
        schedule.push(OTHER, Long, 201);
        assert_eq!(taken(&mut schedule), [201, 200]);
    }

    #[test]
    fn files_of_one_disk_keep_no_threads_from_each_other() {
        let mut schedule = Schedule::new(Limits::new(8, 4));
        schedule.serve_one_disk();
        [FILE, OTHER].into_iter().for_each(|file| schedule.attach(file, 16));
        (0..100).for_each(|job| schedule.push(FILE, Transfer, job));
        assert_eq!(taken(&mut schedule).len(), 8);
    }

    #[test]
    fn file_that_comes_when_all_threads_hang_gets_more_threads() {
        let jobs: Vec<_> = (0..4).map(|job| (Transfer, job)).collect();
        let mut schedule = schedule(4, &jobs);
        (0..4).for_each(|_| _ = schedule.call_help(false));
        (0..4).for_each(|_| schedule.arrived());
        assert_eq!(taken(&mut schedule).len(), 4);
        schedule.attach(OTHER, 16);
        schedule.push(OTHER, Transfer, 9);
        assert_eq!((schedule.call_help(false), taken(&mut schedule)), (Help::Start, vec![9]));
    }

    #[test]
    fn hung_syncs_of_many_files_leave_one_to_each_other_file() {
        let mut schedule = schedule(8, &[]);
        (1..20).for_each(|file| schedule.attach(FileId(file), 16));
        (0..19).for_each(|file| schedule.push(FileId(file), Long, file));
        assert_eq!(taken(&mut schedule).len(), 19);
        schedule.push(FileId(19), Long, 19);
        assert_eq!((schedule.call_help(false), taken(&mut schedule)), (Help::Start, vec![19]));
    }

    #[test]
    fn files_with_jobs_take_turns() {
        let mut schedule = schedule(8, &[(Transfer, 1), (Transfer, 2), (Transfer, 3)]);
        schedule.attach(OTHER, 16);
        schedule.push(OTHER, Transfer, 4);
        assert_eq!(taken(&mut schedule), [1, 4, 2, 3]);
    }

    #[test]
    fn no_thread_is_called_for_jobs_of_a_file_that_has_its_share() {
        let jobs: Vec<_> = (0..100).map(|job| (Transfer, job)).collect();
        let mut schedule = schedule(8, &jobs);
        schedule.attach(OTHER, 16);
        assert_eq!((taken(&mut schedule).len(), schedule.call_help(true)), (6, Help::Enough));
    }
}
