//! Which job a pool's thread takes next, and when another thread has to come. Counting only: no threads here.
//!
//! - Jobs that may take long and move no data of ours (`fdatasync`, `fallocate`) run on at most half of the
//!   threads, so that they cannot keep reads and writes from the rest; where both kinds wait, they take turns.
//! - Nobody calls for all the threads that a batch could use: one comes, and whoever takes a job while others
//!   wait calls one more before it makes its own call. Calls that do not wait (the page cache has the data) are
//!   over before more threads arrive, and none are woken for nothing. Measured on two processors, 4 KiB reads
//!   at depth 64 (2026-11): calling two or eight at a time costs up to 60 % more processor time with cached
//!   data and 13 to 40 % more with `O_DIRECT` (medians, on a busy machine), and is no faster with either.
//!
//! Not here: the threads (`pool.rs`).

use std::collections::VecDeque;

/// How a job is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    /// Reads and writes.
    Transfer,
    /// Everything else.
    Long,
}

/// What whoever got this has to do for the jobs that wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Help {
    Enough,
    /// Wake one thread of those that sleep.
    Wake,
    /// Start one.
    Start,
}

#[derive(Debug)]
pub(super) struct Schedule<T> {
    transfers: VecDeque<T>,
    long: VecDeque<T>,
    long_running: usize,
    long_had_last_turn: bool,
    /// All there are, those included that are coming.
    threads: usize,
    /// Called, and not yet at the queue.
    coming: usize,
    limits: Limits,
}

/// None is zero.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Threads there may be.
    pub threads: usize,
    /// Jobs of [`Class::Long`] at once.
    pub long: usize,
    /// Threads on their way at once: more than there are processors could not arrive together.
    pub coming: usize,
}

impl Limits {
    pub fn new(threads: usize, processors: usize) -> Self {
        Self { threads: threads.max(1), long: (threads / 2).max(1), coming: processors.max(1) }
    }
}

impl<T> Schedule<T> {
    /// `depth`: most jobs at once, without allocating.
    pub fn new(limits: Limits, depth: usize) -> Self {
        Self {
            transfers: VecDeque::with_capacity(depth),
            long: VecDeque::with_capacity(depth.min(64)),
            long_running: 0,
            long_had_last_turn: false,
            threads: 0,
            coming: 0,
            limits,
        }
    }

    #[inline]
    pub fn push(&mut self, class: Class, job: T) {
        match class {
            Class::Transfer => self.transfers.push_back(job),
            Class::Long => self.long.push_back(job),
        }
    }

    /// A job for a thread that is at the queue.
    #[inline]
    pub fn take(&mut self) -> Option<(Class, T)> {
        let long_may = self.long_running < self.limits.long && !self.long.is_empty();
        if long_may && (self.transfers.is_empty() || !self.long_had_last_turn) {
            self.long_had_last_turn = true;
            self.long_running += 1;
            return self.long.pop_front().map(|job| (Class::Long, job));
        }
        self.long_had_last_turn = false;
        self.transfers.pop_front().map(|job| (Class::Transfer, job))
    }

    /// A job that was taken is done.
    #[inline]
    pub fn ended(&mut self, class: Class) {
        if class == Class::Long {
            self.long_running -= 1;
        }
    }

    /// Counts one more thread as coming, if there is work for it.
    #[inline]
    pub fn call_help(&mut self, any_asleep: bool) -> Help {
        let startable = self.long.len().min(self.limits.long - self.long_running) + self.transfers.len();
        if startable.min(self.limits.coming) <= self.coming {
            return Help::Enough;
        }
        if !any_asleep && self.threads == self.limits.threads {
            return Help::Enough;
        }
        self.coming += 1;
        if any_asleep {
            return Help::Wake;
        }
        self.threads += 1;
        Help::Start
    }

    /// Counts threads as coming that are woken for another reason than work.
    pub fn called(&mut self, count: usize) {
        self.coming += count;
    }

    /// One that was called is at the queue.
    #[inline]
    pub fn arrived(&mut self) {
        self.coming -= 1;
    }

    /// One that was to be started could not be.
    pub fn not_started(&mut self) {
        self.coming -= 1;
        self.threads -= 1;
    }

    /// One that was at the queue ends.
    pub fn left(&mut self) {
        self.threads -= 1;
    }

    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Takes a job out that `is_it`.
    pub fn remove(&mut self, is_it: impl Fn(&T) -> bool) -> Option<T> {
        let queue = [&mut self.transfers, &mut self.long];
        queue.into_iter().find_map(|queue| queue.iter().position(&is_it).and_then(|at| queue.remove(at)))
    }

    pub fn clear(&mut self) {
        self.transfers.clear();
        self.long.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(threads: usize, jobs: &[(Class, u32)]) -> Schedule<u32> {
        let mut schedule = Schedule::new(Limits::new(threads, 4), 16);
        jobs.iter().for_each(|&(class, job)| schedule.push(class, job));
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
        schedule.ended(Long);
        assert_eq!(taken(&mut schedule), [3]);
    }

    #[test]
    fn one_thread_gives_both_kinds_their_turns() {
        let mut schedule = schedule(1, &[(Transfer, 1), (Transfer, 2), (Long, 3), (Long, 4)]);
        let mut order = Vec::new();
        while let Some((class, job)) = schedule.take() {
            schedule.ended(class);
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
        schedule.ended(Long);
        assert_eq!(schedule.call_help(true), Help::Wake);
    }

    #[test]
    fn removed_job_is_not_taken() {
        let mut schedule = schedule(2, &[(Transfer, 1), (Long, 2), (Transfer, 3)]);
        assert_eq!((schedule.remove(|&job| job == 2), schedule.remove(|&job| job == 2)), (Some(2), None));
        assert_eq!(taken(&mut schedule), [1, 3]);
    }
}
