//! The balancer: a thread that reads the counters of workers and queues, applies the rule (`balance/`), and moves
//! queues.
//!
//! `busy worker → BalancerWakeup → reading → Decider → Balanced::move_queue → BalanceReport`
//!
//! - The balancer has no timer. A worker that was busy during the last [`PERIOD`] wakes the balancer, at most once per
//!   period for all workers together. While no worker is busy, the balancer sleeps.
//! - The balancer uses at most 1% of a CPU: after a slow reading it pauses for longer.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use rustix::time::{ClockId, clock_gettime};
use tracing::{info, warn};

use crate::control::balance::{Decider, Move};
use crate::data_path::assignment::balanced::{Balanced, Reading};
use crate::data_path::report::{BalanceDecision, BalanceReport, MoveOutcome};
use crate::data_path::worker::balancer_wakeup::{BalancerWakeup, PERIOD};
use crate::host::caches::Caches;
use crate::host::error_line::error_line;

/// Readings use at most 1/`COST_LIMIT` of a CPU.
const COST_LIMIT: u32 = 100;
/// A moving queue takes no new requests until its requests in flight complete, but at most for this long.
const DRAIN_LIMIT: Duration = Duration::from_millis(100);
/// Number of decisions that the report keeps.
const HISTORY_LEN: usize = 64;

/// Processor time of this thread.
fn own_cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

/// A server's running balancer. It ends with the server.
#[derive(Debug)]
pub(crate) struct Balancer {
    wakeup: Arc<BalancerWakeup>,
    history: Arc<Mutex<History>>,
    thread: Mutex<Option<JoinHandle<()>>>,
    caches: Caches,
}

#[derive(Debug, Default)]
struct History {
    readings: u64,
    moves: u64,
    failed: u64,
    decisions: VecDeque<BalanceDecision>,
}

impl Balancer {
    /// # Errors
    /// The process has no free descriptors.
    pub(crate) fn new() -> std::io::Result<Self> {
        Ok(Self {
            wakeup: Arc::new(BalancerWakeup::new()?),
            history: Arc::default(),
            thread: Mutex::default(),
            // Read now, because the server may drop the right to read the CPU caches before it starts the thread.
            caches: Caches::here(),
        })
    }

    /// The event with which workers wake the balancer. The server creates workers before it starts the balancer.
    pub(crate) fn wakeup(&self) -> Arc<BalancerWakeup> {
        Arc::clone(&self.wakeup)
    }

    /// Starts the thread unless it already runs.
    ///
    /// # Errors
    /// The thread cannot be created.
    pub(crate) fn start(&self, balanced: Box<dyn Balanced>) -> std::io::Result<()> {
        let mut thread = self.thread();
        if thread.is_some() {
            return Ok(());
        }
        let mut balancer = BalancerThread::new(balanced, self.wakeup(), Arc::clone(&self.history));
        balancer.caches = self.caches.clone();
        let builder = std::thread::Builder::new().name("bareblk-balance".into());
        *thread = Some(builder.spawn(move || balancer.run())?);
        Ok(())
    }

    pub(crate) fn report(&self) -> BalanceReport {
        let history = self.history.lock().unwrap_or_else(PoisonError::into_inner);
        let decisions = history.decisions.iter().cloned().collect();
        BalanceReport { readings: history.readings, moves: history.moves, failed: history.failed, decisions }
    }

    /// Forbids further readings and moves.
    pub(crate) fn quit(&self) {
        self.wakeup.quit();
    }

    /// Ends the thread after its current move.
    pub(crate) fn stop(&self) {
        self.quit();
        let thread = self.thread().take();
        let _ = thread.map(JoinHandle::join);
    }

    fn thread(&self) -> MutexGuard<'_, Option<JoinHandle<()>>> {
        self.thread.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Balancer {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The thread's own state.
struct BalancerThread {
    balanced: Box<dyn Balanced>,
    wakeup: Arc<BalancerWakeup>,
    history: Arc<Mutex<History>>,
    decider: Decider,
    last: Option<(Instant, Reading)>,
    /// The part of the time since the last reading that the balancer itself used, for longer pauses and moves, but not
    /// for waiting for a busy worker.
    own_time: Duration,
    /// CPUs that this process may use.
    cpus: usize,
    caches: Caches,
}

impl BalancerThread {
    fn new(balanced: Box<dyn Balanced>, wakeup: Arc<BalancerWakeup>, history: Arc<Mutex<History>>) -> Self {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            balanced,
            wakeup,
            history,
            decider: Decider::default(),
            last: None,
            own_time: Duration::ZERO,
            cpus,
            caches: Caches::default(),
        }
    }

    fn run(mut self) {
        while self.wakeup.wait() {
            let (start, cpu_before) = (Instant::now(), own_cpu_time());
            let moves = self.decide(start);
            // Processor time, because wall-clock time is long exactly when CPUs are scarce and balancing matters.
            let cost = own_cpu_time().saturating_sub(cpu_before);
            let pause = PERIOD.max(cost.saturating_mul(COST_LIMIT));
            self.wakeup.pause(start, pause);
            let moving = Instant::now();
            for wanted in moves {
                if self.wakeup.is_quitting() {
                    return;
                }
                self.make(wanted);
            }
            self.own_time = pause.max(moving.elapsed());
        }
    }

    fn decide(&mut self, now: Instant) -> Vec<Move> {
        let reading = self.balanced.read();
        self.record(|history| history.readings += 1);
        let last =
            self.last.as_ref().map(|(at, last)| reading.since(last, now.saturating_duration_since(*at)));
        self.last = Some((now, reading));
        let Some(mut interval) = last else { return Vec::new() };
        (interval.at, interval.cpus) = (now.saturating_duration_since(self.wakeup.origin), self.cpus);
        interval.own_time = self.own_time;
        for worker in &mut interval.workers {
            worker.cache = self.caches.of(&worker.cpus);
        }
        self.decider.decide(&interval)
    }

    fn make(&mut self, wanted: Move) {
        let (at, start) = (SystemTime::now(), Instant::now());
        let name = &wanted.queue;
        let result = self.balanced.move_queue(&name.disk, name.queue, wanted.to, DRAIN_LIMIT);
        let outcome = match result {
            Ok(()) => {
                info!(
                    disk = name.disk,
                    queue = name.queue,
                    "queue moved to worker {}: {}",
                    wanted.to,
                    wanted.why
                );
                MoveOutcome::Moved { took: start.elapsed() }
            }
            Err(error) => {
                let error = error_line(&*error);
                warn!(
                    disk = name.disk,
                    queue = name.queue,
                    "queue not moved to worker {}: {error}",
                    wanted.to
                );
                MoveOutcome::Failed { error }
            }
        };
        let failed = matches!(outcome, MoveOutcome::Failed { .. });
        let Move { queue, from, to, why } = wanted;
        let decision = BalanceDecision { at, disk: queue.disk, queue: queue.queue, from, to, why, outcome };
        self.record(|history| history.note(decision, failed));
    }

    fn record(&self, change: impl FnOnce(&mut History)) {
        change(&mut self.history.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

impl History {
    fn note(&mut self, decision: BalanceDecision, failed: bool) {
        if failed {
            self.failed += 1;
        } else {
            self.moves += 1;
        }
        if self.decisions.len() == HISTORY_LEN {
            self.decisions.pop_front();
        }
        self.decisions.push_back(decision);
    }
}

#[cfg(test)]
#[path = "balancer_tests.rs"]
mod tests;
