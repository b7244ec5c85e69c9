//! The figures of the balancer's rule.

use std::time::Duration;

/// Below this pressure requests do not wait long for a worker, and one more awake worker costs more in wake-ups than
/// it gives.
pub(super) const BUSY: f64 = 0.6;
/// How much lower the pressure of the new worker must be, with the queue; a part of the old worker's pressure if that
/// is above 1.
pub(super) const MARGIN: f64 = 0.15;
/// Readings in a row in which a worker must have had a queue to give away.
pub(super) const PATIENCE: u32 = 3;
/// Moves after one reading.
pub(super) const MOST_MOVES: usize = 8;
/// What a move costs a queue: it stops until its slowest request is done, and finds cold caches.
pub(super) const MOVE_COST: Duration = Duration::from_millis(2);
/// How long a request waits at least for the others' batches on a fully busy worker. Queues with few requests are worth
/// moving out of a crowd, and those with almost none are not.
pub(super) const CROWD_DELAY: Duration = Duration::from_micros(100);
/// How long a queue that was moved stays.
pub(super) const FIRST_STAY: Duration = Duration::from_secs(2);
/// The longest that it grows to.
pub(super) const LONGEST_STAY: Duration = Duration::from_secs(600);
/// A queue that moves again within this many of its stays goes to and fro.
pub(super) const RESTLESS_STAYS: u32 = 10;
/// After this time an estimate contains 63 % of a change of load.
pub(super) const SMOOTHING: Duration = Duration::from_millis(500);
/// How fast an idle worker's estimated capacity returns to a whole CPU.
pub(super) const FORGETTING: Duration = Duration::from_secs(60);
/// Estimates older than this describe another load.
pub(crate) const STALE: Duration = Duration::from_secs(1);
