//! Many jobs on shared queues. Each job keeps its own requests in flight, submitted one by one. The threads that run
//! the jobs reap all completions, including those of other threads' jobs.
//!
//! `warm up → count → end` (set by the caller's thread, noticed by each thread in its next pass) `→ drain → Tally`
//!
//! - Each submission has one request, as in a block layer, so the driver decides for each request whether to notify.
//! - A thread may run several jobs alternately, as a virtual CPU does. A kernel does not preempt a thread that holds or
//!   waits for a spinlock, but these threads can be preempted. Spinning locks are therefore measured with no more
//!   threads than cores, however many jobs there are.
//! - Other jobs' completions are handed to them without a lock (`mailboxes.rs`).
//! - Each thread counts, in its own memory, the completions that it found within the measured interval. It reads its
//!   CPU time and lock time when it notices that the interval begins and ends.
//! - The clock is read twice per request and batch, and once per pass, under both kick policies alike.

use std::sync::OnceLock;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU8, AtomicU64};
use std::thread::{Builder, Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use blk_driver::{Buffer, Completion, Durability, Pool, PushError, QueueStats, Request, SharedQueue, Work};
use guest_mem::GuestRange;
use lock_api::RawMutex;
use qspinlock::LockTimes;

use super::mailboxes::{Mailboxes, Slots};
use super::moments::Moments;
use crate::experiment::SampleError;
use crate::load::cpu::Usage;
use crate::load::{Job, Sectors, WARM_UP, nanos};
use crate::runner::Xorshift;
use crate::stop::Stop;

/// Time between two checks of the clock and of the user's request to stop.
const LOOK: Duration = Duration::from_millis(20);
/// If nothing completes for this long, the measurement fails.
const PATIENCE: Duration = Duration::from_secs(30);
/// After an error, the measurement waits only this long for requests in flight.
const LITTLE_PATIENCE: Duration = Duration::from_secs(2);
/// Longest sleep for a completion, which another thread may have reaped meanwhile.
const NAP: Duration = Duration::from_millis(2);
/// Most completions reaped at once.
const BATCH: usize = 64;
/// Number of spinning passes before the thread yields its core.
const SPINS: u32 = 64;

/// A queue and the memory for its requests.
#[derive(Debug)]
pub(crate) struct Station<L: RawMutex> {
    pub queue: SharedQueue<L>,
    pub pool: Pool,
}

/// How a thread waits when it has no requests to send and no completions to reap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Idle {
    /// Polls again, because the device is in this process and completes at once.
    Poll,
    /// Sleeps until the device signals; a thread with several queues polls and yields instead.
    Sleep,
}

/// The load of a crowd.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Crowd {
    /// The options of each job; `seed` is that of the first job.
    pub job: Job,
    /// Job n uses station n modulo the number of stations.
    pub jobs: usize,
    /// Number of threads. Each runs consecutive jobs, evenly divided.
    pub threads: usize,
    /// Share of reads: 0 for writes only, 100 for reads only.
    pub read_percent: u8,
    pub idle: Idle,
}

/// The measurements of all threads together.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tally {
    pub requests: u64,
    /// Length of the counted time.
    pub seconds: f64,
    pub latency_us: Moments,
    pub usage: Usage,
    /// Sum of the counted times of all threads.
    pub thread_seconds: f64,
    pub lock: LockTimes,
    /// The queues' counters in the measured interval.
    pub kicks: u64,
    pub pushed: u64,
}

#[allow(clippy::cast_precision_loss)] // counts of one sample
impl Tally {
    fn and(self, part: &Self) -> Self {
        Self {
            requests: self.requests + part.requests,
            seconds: self.seconds + part.seconds,
            latency_us: self.latency_us.and(part.latency_us),
            usage: self.usage.and(part.usage),
            thread_seconds: self.thread_seconds + part.thread_seconds,
            lock: self.lock.and(part.lock),
            kicks: self.kicks + part.kicks,
            pushed: self.pushed + part.pushed,
        }
    }

    pub fn iops(&self) -> f64 {
        if self.seconds > 0.0 { self.requests as f64 / self.seconds } else { 0.0 }
    }

    /// Divides `total` by the number of requests.
    pub fn per_io(&self, total: f64) -> Option<f64> {
        (self.requests > 0).then(|| total / self.requests as f64)
    }

    /// Share of the threads' time, in %, as in fio.
    pub fn share(&self, spent: Duration) -> Option<f64> {
        (self.thread_seconds > 0.0).then(|| 100.0 * spent.as_secs_f64() / self.thread_seconds)
    }
}

const WARMING_UP: u8 = 0;
const COUNTING: u8 = 1;
const ENDING: u8 = 2;

/// State that all threads share.
struct Common {
    crowd: Crowd,
    mailboxes: Mailboxes,
    clock: Instant,
    phase: AtomicU8,
    /// The counted time, on `clock`; it begins when `from_ns` is set.
    from_ns: AtomicU64,
    until_ns: AtomicU64,
    failure: OnceLock<String>,
}

impl Common {
    /// Starts counting, for `seconds`.
    fn count(&self, seconds: f64) {
        let from_ns = self.now_ns();
        let length_ns = nanos(Duration::from_secs_f64(seconds));
        // Relaxed: a thread that sees only one of the two values misses at most one batch at the beginning.
        self.until_ns.store(from_ns.saturating_add(length_ns), Relaxed);
        self.from_ns.store(from_ns, Relaxed);
    }

    fn counts(&self, now_ns: u64) -> bool {
        now_ns >= self.from_ns.load(Relaxed) && now_ns < self.until_ns.load(Relaxed)
    }

    fn fail(&self, what: &str) {
        let _ = self.failure.set(what.to_owned());
        self.phase.store(ENDING, Relaxed); // no other data depends on it
    }

    fn now_ns(&self) -> u64 {
        nanos(self.clock.elapsed())
    }
}

/// Puts `stations` under the load.
pub(crate) fn run<L>(stations: &[Station<L>], crowd: Crowd, stop: &Stop) -> Result<Tally, SampleError>
where
    L: RawMutex + Send + Sync,
{
    let common = Common {
        crowd,
        mailboxes: Mailboxes::new(crowd.jobs),
        clock: Instant::now(),
        phase: AtomicU8::new(WARMING_UP),
        from_ns: AtomicU64::new(u64::MAX),
        until_ns: AtomicU64::new(0),
        failure: OnceLock::new(),
    };
    let tally = std::thread::scope(|scope| {
        let hands: Result<Vec<_>, _> =
            (0..crowd.threads).map(|thread| start(scope, &common, stations, thread)).collect();
        if let Err(why) = &hands {
            common.fail(why);
        }
        let counted = conduct(&common, stations, stop);
        if stop.is_asked() {
            common.fail("stopped by the user");
        }
        let parts = hands.unwrap_or_default().into_iter().map(ScopedJoinHandle::join);
        parts.fold(counted, |sum, part| part.map_or(sum, |part| sum.and(&part)))
    });
    match common.failure.get() {
        _ if stop.is_asked() => Err(SampleError::Interrupted),
        Some(why) => Err(SampleError::Unavailable(format!("the load ended: {why}"))),
        None => Ok(tally),
    }
}

fn start<'s, 'e, L>(
    scope: &'s Scope<'s, 'e>,
    common: &'e Common,
    stations: &'e [Station<L>],
    thread: usize,
) -> Result<ScopedJoinHandle<'s, Tally>, String>
where
    L: RawMutex + Send + Sync,
{
    let Crowd { jobs, threads, .. } = common.crowd;
    let own = thread * jobs / threads..(thread + 1) * jobs / threads;
    let seat = |job| Seat::new(common, stations, job);
    let seats = own.map(seat).collect::<Result<Vec<_>, _>>()?;
    let body = move || Hand::new(common, stations, seats).work();
    Builder::new().name("lab-load".into()).spawn_scoped(scope, body).map_err(|why| why.to_string())
}

/// Sets the phases of the run; returns the queues' counts.
fn conduct<L: RawMutex>(common: &Common, stations: &[Station<L>], stop: &Stop) -> Tally {
    let seconds = common.crowd.job.seconds;
    let mut now = Tally { seconds, ..Tally::default() };
    for (phase, lasts) in [(WARMING_UP, seconds * WARM_UP), (COUNTING, seconds)] {
        let before = stats(stations);
        if common.phase.load(Relaxed) != ENDING {
            common.phase.store(phase, Relaxed); // no other data depends on it
        }
        if phase == COUNTING {
            common.count(lasts);
        }
        let end = Instant::now() + Duration::from_secs_f64(lasts);
        while Instant::now() < end && common.phase.load(Relaxed) == phase && !stop.is_asked() {
            std::thread::sleep(LOOK.min(end.saturating_duration_since(Instant::now())));
        }
        let after = stats(stations);
        (now.kicks, now.pushed) = (after.kicks - before.kicks, after.pushed - before.pushed);
    }
    common.phase.store(ENDING, Relaxed);
    now
}

fn stats<L: RawMutex>(stations: &[Station<L>]) -> QueueStats {
    stations.iter().map(|station| station.queue.stats()).fold(QueueStats::default(), |sum, part| QueueStats {
        kicks: sum.kicks + part.kicks,
        pushed: sum.pushed + part.pushed,
        ..sum
    })
}

/// The state of one job.
struct Seat<'c> {
    /// Index of the station that the job uses.
    station: usize,
    slots: Slots<'c>,
    sectors: Sectors,
    random: Xorshift,
    buffer: Buffer,
}

impl<'c> Seat<'c> {
    fn new<L: RawMutex>(common: &'c Common, stations: &[Station<L>], job: usize) -> Result<Self, String> {
        let station = job % stations.len();
        let each = common.crowd.job;
        let seed = each.seed.wrapping_add(job as u64);
        let buffer = stations[station].pool.take(u32::from(each.depth) * each.block_bytes);
        Ok(Self {
            station,
            slots: Slots::new(&common.mailboxes, job, u32::from(each.depth)),
            sectors: Sectors::of(&Job { seed, ..each }),
            random: Xorshift::new(!seed),
            buffer: buffer.map_err(|error| error.to_string())?,
        })
    }

    /// Sends one request for each free slot; returns how many the queue took, and whether it took all.
    fn fill<L: RawMutex>(&mut self, common: &Common, queue: &SharedQueue<L>) -> Result<(u32, bool), String> {
        let mut count = 0;
        while let Some(slot) = self.slots.next_free() {
            if !self.send(common, queue, slot)? {
                self.slots.take_back(slot);
                return Ok((count, false));
            }
            count += 1;
        }
        Ok((count, true))
    }

    /// Sends one request; returns whether the queue took it.
    fn send<L: RawMutex>(
        &mut self,
        common: &Common,
        queue: &SharedQueue<L>,
        slot: u32,
    ) -> Result<bool, String> {
        let Crowd { job: Job { block_bytes, .. }, read_percent, .. } = common.crowd;
        let addr = self.buffer.range().addr + u64::from(slot) * u64::from(block_bytes);
        let data = &[GuestRange { addr, len_bytes: block_bytes }];
        let sector = self.sectors.next();
        let work = if self.random.below(100) < u64::from(read_percent) {
            Work::Read { sector, data }
        } else {
            Work::Write { sector, data, durability: Durability::Cached }
        };
        let token = self.slots.send(slot, common.now_ns());
        match queue.submit(&[Request::new(work, token)]) {
            Ok(taken) => Ok(taken == 1),
            Err(PushError::Full { .. }) => Ok(false),
            Err(error) => Err(error.to_string()),
        }
    }
}

/// The state of one thread.
struct Hand<'c, L: RawMutex> {
    common: &'c Common,
    stations: &'c [Station<L>],
    seats: Vec<Seat<'c>>,
    /// The stations of its jobs.
    own_stations: Vec<usize>,
    /// The job that is served first in this pass. It changes from pass to pass, so that it is not always the same jobs
    /// that find the queue full.
    first: usize,
    found: [Completion; BATCH],
    requests: u64,
    latency_us: Moments,
}

/// An error ends the thread and is shown to the user.
type Ended = Result<(), String>;

impl<'c, L: RawMutex> Hand<'c, L> {
    fn new(common: &'c Common, stations: &'c [Station<L>], seats: Vec<Seat<'c>>) -> Self {
        let mut own_stations: Vec<_> = seats.iter().map(|seat| seat.station).collect();
        own_stations.sort_unstable();
        own_stations.dedup();
        Self {
            common,
            stations,
            seats,
            own_stations,
            first: 0,
            found: [Completion::default(); BATCH],
            requests: 0,
            latency_us: Moments::default(),
        }
    }

    fn work(mut self) -> Tally {
        let warm_up = self.keep_busy(WARMING_UP);
        let before = (Instant::now(), Usage::of_this_thread(), LockTimes::of_this_thread());
        let counted = warm_up.and_then(|()| self.keep_busy(COUNTING));
        let usage = Usage::of_this_thread().since(before.1);
        let lock = LockTimes::of_this_thread().since(before.2);
        let thread_seconds = before.0.elapsed().as_secs_f64();
        if let Err(why) = counted.and_then(|()| self.drain()) {
            self.common.fail(&why);
        }
        let (requests, latency_us) = (self.requests, self.latency_us);
        Tally { requests, latency_us, usage, thread_seconds, lock, ..Tally::default() }
    }

    fn keep_busy(&mut self, phase: u8) -> Ended {
        let (mut idle_turns, mut last) = (0, Instant::now());
        while self.common.phase.load(Relaxed) == phase {
            if self.turn(true)? {
                (idle_turns, last) = (0, Instant::now());
            } else {
                self.idle(&mut idle_turns, last)?;
            }
        }
        Ok(())
    }

    /// Reaps until all of this thread's requests are back.
    fn drain(&mut self) -> Ended {
        let (mut idle_turns, last) = (0, Instant::now());
        while self.seats.iter().any(|seat| seat.slots.has_any_out()) {
            if !self.turn(false)? {
                self.idle(&mut idle_turns, last)?;
            }
        }
        Ok(())
    }

    /// Makes one pass over all jobs. Returns whether anything was sent or found.
    fn turn(&mut self, sends: bool) -> Result<bool, String> {
        let (mut any, mut full) = (false, None);
        let count = self.seats.len();
        for place in 0..count {
            let seat = &mut self.seats[(self.first + place) % count];
            any |= seat.slots.take().map_err(|error| error.to_string())? > 0;
            if sends && full != Some(seat.station) {
                let (sent, all) = seat.fill(self.common, &self.stations[seat.station].queue)?;
                any |= sent > 0;
                full = full.or((!all).then_some(seat.station));
            }
        }
        self.first = (self.first + 1) % count.max(1);
        for place in 0..self.own_stations.len() {
            any |= self.reap(self.own_stations[place])?;
        }
        Ok(any)
    }

    /// Reaps completions of any job; sleeps for them if allowed.
    fn reap(&mut self, station: usize) -> Result<bool, String> {
        let queue = &self.stations[station].queue;
        let found = match self.common.crowd.idle {
            Idle::Sleep if self.own_stations.len() == 1 => queue.wait(&mut self.found, NAP),
            _ => queue.completions(&mut self.found),
        };
        let count = found.map_err(|error| error.to_string())?;
        if count == 0 {
            return Ok(false);
        }
        let now_ns = self.common.now_ns();
        let counts = self.common.counts(now_ns);
        for completion in &self.found[..count] {
            completion.result.map_err(|error| error.to_string())?;
            let sent_ns =
                self.common.mailboxes.hand_over(completion.token).map_err(|error| error.to_string())?;
            if !counts {
                continue;
            }
            #[allow(clippy::cast_precision_loss)] // 2^53 ns are 104 days
            self.latency_us.note(now_ns.saturating_sub(sent_ns) as f64 / 1000.0);
        }
        self.requests += if counts { count as u64 } else { 0 };
        Ok(true)
    }

    /// `last` is the time of the last progress.
    fn idle(&mut self, turns: &mut u32, last: Instant) -> Ended {
        *turns += 1;
        let broken = self.common.failure.get().is_some();
        let patience = if broken { LITTLE_PATIENCE } else { PATIENCE };
        if !turns.is_multiple_of(SPINS) {
            std::hint::spin_loop();
        } else if last.elapsed() > patience {
            return Err(format!("no request completed for {} s", patience.as_secs()));
        } else {
            std::thread::yield_now();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use blk_driver::{KickPolicy, PoolOptions, alone};
    use qspinlock::{Metered, StdMutex};
    use virtqueue::RingFeatures;

    use super::*;
    use crate::load::Pattern;
    use crate::load::shared_queue::null_device::{By, ExitBell};

    type Lock = Metered<StdMutex>;

    fn crowd(jobs: usize, threads: usize, idle: Idle) -> Crowd {
        let (pattern, block_bytes, depth) = (Pattern::Random, 512, 8);
        let job = Job { pattern, block_bytes, depth, file_bytes: 1 << 20, seconds: 0.03, seed: 5 };
        Crowd { job, jobs, threads, read_percent: 50, idle }
    }

    /// Returns the crowd's measurements, and the queue's counts of pushed and completed requests.
    fn under_load(by: By, event_idx: bool, policy: KickPolicy, crowd: Crowd) -> (Tally, QueueStats) {
        let bell = ExitBell::new(Duration::from_micros(1), by).unwrap();
        let features = RingFeatures { event_idx, indirect: true, packed: false };
        let pool = PoolOptions { size_bytes: 1 << 20, huge_pages: false };
        let (queue, pool, end) = alone(64, features, pool, bell.clone()).unwrap();
        let device = bell.attach(&end).unwrap();
        let stations = [Station { queue: SharedQueue::<Lock>::new(queue, policy), pool }];
        let tally = run(&stations, crowd, &Stop::default()).unwrap();
        drop(device);
        assert_eq!(bell.fault(), None);
        (tally, stations[0].queue.stats())
    }

    #[test]
    fn every_request_comes_back_once_with_either_policy() {
        for policy in [KickPolicy::Locked, KickPolicy::Unlocked] {
            let (tally, stats) = under_load(By::Notifier, false, policy, crowd(3, 3, Idle::Poll));
            assert!(stats.pushed > 0 && stats.pushed == stats.completed, "{policy:?}: {stats:?}");
            assert!(tally.requests <= stats.completed, "{tally:?}");
            assert_eq!(tally.kicks, tally.pushed, "the device requests a notification for every request");
        }
    }

    #[test]
    fn requests_come_back_from_a_device_on_a_thread_of_its_own() {
        let crowd = crowd(2, 2, Idle::Poll);
        let (_, stats) = under_load(By::Thread, false, KickPolicy::Unlocked, crowd);
        assert!(stats.pushed > 0 && stats.pushed == stats.completed, "{stats:?}");
    }

    #[test]
    fn requests_come_back_where_the_device_rearms_after_every_chain() {
        let crowd = crowd(2, 2, Idle::Poll);
        let (_, stats) = under_load(By::Notifier, true, KickPolicy::Unlocked, crowd);
        assert!(stats.pushed > 0 && stats.pushed == stats.completed, "{stats:?}");
        assert!(stats.kicks <= stats.pushed, "{stats:?}");
    }

    /// 20 jobs of depth 8 want 160 requests in flight, but the queue has room for 64, so it is always full.
    #[test]
    fn more_jobs_than_threads_and_room_are_all_served() {
        let (tally, stats) = under_load(By::Notifier, false, KickPolicy::Unlocked, crowd(20, 2, Idle::Poll));
        assert!(stats.pushed > 160 && stats.pushed == stats.completed, "{stats:?}");
        assert!(tally.thread_seconds > 0.0 && tally.lock.acquired > 0, "{tally:?}");
    }

    #[test]
    fn device_that_never_answers_ends_the_sample_when_the_user_wants_it() {
        let bell = ExitBell::new(Duration::ZERO, By::Notifier).unwrap();
        let features = RingFeatures { event_idx: false, indirect: true, packed: false };
        let pool = PoolOptions { size_bytes: 1 << 20, huge_pages: false };
        let (queue, pool, _end) = alone(64, features, pool, bell).unwrap();
        let stations = [Station { queue: SharedQueue::<Lock>::new(queue, KickPolicy::Unlocked), pool }];
        let stop = Stop::default();
        stop.ask();
        let ended = run(&stations, crowd(1, 1, Idle::Poll), &stop);
        assert!(matches!(ended, Err(SampleError::Interrupted)), "{ended:?}");
    }
}
