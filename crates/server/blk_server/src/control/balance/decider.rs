//! Decides which queues to move now: applies the rule's limits on patience, cost and stays.
//!
//! Each interval costs at most [`MOST_MOVES`] × queues × workers comparisons. The stored state covers only the queues
//! and workers of the last interval.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use super::estimates::Estimates;
use super::interval::Interval;
use super::model::{Model, Queue};
use super::tuning::{
    BUSY, CROWD_DELAY, FIRST_STAY, LONGEST_STAY, MARGIN, MOST_MOVES, MOVE_COST, PATIENCE, RESTLESS_STAYS,
    STALE,
};
use crate::data_path::assignment::balanced::QueueName;
use crate::data_path::worker::worker_options::WorkerId;

/// A queue that should move to another worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Move {
    pub(crate) queue: QueueName,
    pub(crate) from: WorkerId,
    pub(crate) to: WorkerId,
    /// The reason with figures, for the operator.
    pub(crate) why: String,
}

/// How long a moved queue stays on its worker.
#[derive(Debug, Default)]
struct Stay {
    since: Duration,
    /// Zero if the queue has never moved.
    length: Duration,
}

impl Stay {
    fn is_over(&self, now: Duration) -> bool {
        now >= self.since.saturating_add(self.length)
    }

    /// How long the queue would stay after a move now: longer if its last move was recent.
    fn next_length(&self, now: Duration) -> Duration {
        let rested = now >= self.since.saturating_add(self.length.saturating_mul(RESTLESS_STAYS));
        if self.length.is_zero() || rested { FIRST_STAY } else { (self.length * 2).min(LONGEST_STAY) }
    }
}

/// A move that would reduce the pressure.
struct Candidate {
    queue: usize,
    to: usize,
    /// Whether the new worker uses a different last-level cache.
    is_far: bool,
    /// The higher pressure of the two workers after the move, and the pressure of the target worker.
    after: (f64, f64),
}

impl Candidate {
    /// A move within a last-level cache ranks first: the data that the queue and its guest share stays in that cache.
    fn rank(&self) -> (bool, (f64, f64)) {
        (self.is_far, self.after)
    }
}

/// Turns intervals into moves.
#[derive(Debug, Default)]
pub(crate) struct Decider {
    estimates: Estimates,
    /// For each worker: the number of consecutive intervals in which it had a queue worth moving.
    patience: HashMap<WorkerId, u32>,
    stays: HashMap<QueueName, Stay>,
}

impl Decider {
    /// Returns at most [`MOST_MOVES`] moves. After a move, even a failed one, the queue stays on its worker for a time
    /// that grows with each move.
    pub(crate) fn decide(&mut self, interval: &Interval) -> Vec<Move> {
        self.forget_queues_that_went(interval);
        if interval.length.saturating_sub(interval.own_time) > STALE {
            // The interval was mostly idle, so earlier loads do not predict the next ones.
            self.estimates.forget_loads();
            self.patience.clear();
            return Vec::new();
        }
        self.estimates.learn(interval);
        let estimates = std::mem::take(&mut self.estimates);
        let mut model = Model::new(interval, &estimates);
        let movable: Vec<bool> =
            model.queues.iter().map(|queue| self.is_movable(queue, interval.at)).collect();
        self.count_patience(&model, &movable, interval.at);
        let moves = self.choose(&mut model, movable, interval.at);
        self.estimates = estimates;
        moves
    }

    #[cfg(test)]
    pub(super) fn known_queues(&self) -> usize {
        self.stays.len()
    }

    fn forget_queues_that_went(&mut self, interval: &Interval) {
        let there: HashSet<_> = interval.queues.iter().map(|queue| &queue.name).collect();
        self.stays.retain(|name, _| there.contains(name));
    }

    fn is_movable(&self, queue: &Queue<'_>, now: Duration) -> bool {
        !queue.reading.attached && self.stays.get(&queue.reading.name).is_none_or(|stay| stay.is_over(now))
    }

    fn count_patience(&mut self, model: &Model<'_>, movable: &[bool], now: Duration) {
        let counted = (0..model.workers.len()).map(|at| {
            let id = model.workers[at].reading.id;
            let seen = self.patience.get(&id).copied().unwrap_or(0);
            let has_one = self.best(model, movable, at, now).is_some();
            (id, if has_one { seen.saturating_add(1) } else { 0 })
        });
        self.patience = counted.collect();
    }

    fn choose(&mut self, model: &mut Model<'_>, mut movable: Vec<bool>, now: Duration) -> Vec<Move> {
        let mut moves = Vec::new();
        while moves.len() < MOST_MOVES {
            let mut patient: Vec<usize> = (0..model.workers.len())
                .filter(|&at| {
                    self.patience.get(&model.workers[at].reading.id).is_some_and(|&seen| seen >= PATIENCE)
                })
                .collect();
            patient.sort_by(|&a, &b| model.pressure(b).total_cmp(&model.pressure(a)));
            let best = patient.into_iter().find_map(|at| self.best(model, &movable, at, now));
            let Some(candidate) = best else { break };
            moves.push(self.make(model, &candidate, now));
            movable[candidate.queue] = false;
            model.apply(candidate.queue, candidate.to);
        }
        moves
    }

    /// Returns the move away from this worker that leaves the lowest pressure on both workers. Returns a move to a
    /// different last-level cache only if no move within the cache is worthwhile.
    fn best(&self, model: &Model<'_>, movable: &[bool], from: usize, now: Duration) -> Option<Candidate> {
        let before = model.pressure(from);
        if before < BUSY {
            return None;
        }
        let mut best: Option<Candidate> = None;
        for (at, queue) in
            model.queues.iter().enumerate().filter(|(at, queue)| movable[*at] && queue.worker == from)
        {
            for to in (0..model.workers.len()).filter(|&to| to != from && model.may_go(queue, to)) {
                let (left, found) = model.pressures_after(queue, to);
                let after = (left.max(found), found);
                let candidate = Candidate { queue: at, to, is_far: !model.shares_cache(from, to), after };
                let is_better = best.as_ref().is_none_or(|best| candidate.rank() < best.rank());
                if is_better
                    && found <= before - MARGIN * before.max(1.0)
                    && self.pays(queue, before - found, now)
                {
                    best = Some(candidate);
                }
            }
        }
        best
    }

    /// Whether the queue gains more during its stay than the move costs.
    fn pays(&self, queue: &Queue<'_>, less: f64, now: Duration) -> bool {
        let stay = self.stays.get(&queue.reading.name).map_or(FIRST_STAY, |stay| stay.next_length(now));
        let concerned = queue.load + queue.requests_per_s * CROWD_DELAY.as_secs_f64();
        stay.as_secs_f64() * less.min(1.0) * concerned > MOVE_COST.as_secs_f64()
    }

    fn make(&mut self, model: &Model<'_>, candidate: &Candidate, now: Duration) -> Move {
        let queue = &model.queues[candidate.queue];
        let (from, to) = (&model.workers[queue.worker], &model.workers[candidate.to]);
        let why = format!(
            "worker {} is under {:.0} % pressure ({}), worker {} under {:.0} % ({}): \
             queue {} of `{}` uses {:.0} % of a CPU; with it, worker {} will be under {:.0} %{}",
            from.reading.id,
            100.0 * model.pressure(queue.worker),
            circumstances(&from.estimate),
            to.reading.id,
            100.0 * model.pressure(candidate.to),
            circumstances(&to.estimate),
            queue.reading.name.queue,
            queue.reading.name.disk,
            100.0 * queue.load,
            to.reading.id,
            100.0 * candidate.after.1,
            if candidate.is_far { "; the workers share no last-level cache" } else { "" },
        );
        let (from, to) = (from.reading.id, to.reading.id);
        let stay = self.stays.entry(queue.reading.name.clone()).or_default();
        stay.length = stay.next_length(now);
        stay.since = now;
        Move { queue: queue.reading.name.clone(), from, to, why }
    }
}

fn circumstances(worker: &super::estimates::WorkerEstimate) -> String {
    let completions = format!("completions are {:.0} % of its work", 100.0 * worker.completion_share);
    if worker.capacity > 0.95 {
        return completions;
    }
    format!("it gets {:.0} % of a CPU, {completions}", 100.0 * worker.capacity)
}
