//! The parameters of the balancer's rule.

use std::time::Duration;

/// Below this pressure, requests do not wait long for a worker, and another awake worker costs more in wake-ups than it
/// gains.
pub(super) const BUSY: f64 = 0.6;
/// Required decrease: old worker's pressure minus new worker's pressure, with the queue already counted on the new one.
/// A fraction of the old worker's pressure if that is above 1.
pub(super) const MARGIN: f64 = 0.15;
/// Consecutive readings in which a worker must have had a queue worth moving.
pub(super) const PATIENCE: u32 = 3;
/// Maximum number of moves after one reading.
pub(super) const MOST_MOVES: usize = 8;
/// What a move costs the queue: it stops until its slowest request has completed, and then runs with cold caches.
pub(super) const MOVE_COST: Duration = Duration::from_millis(2);
/// Minimum delay that the batches of other queues cause to a request on a fully busy worker. This delay makes moving a
/// queue with few requests worthwhile, but not a queue with almost none.
pub(super) const CROWD_DELAY: Duration = Duration::from_micros(100);
/// How long a queue stays on its worker after its first move.
pub(super) const FIRST_STAY: Duration = Duration::from_secs(2);
/// Upper limit of a stay.
pub(super) const LONGEST_STAY: Duration = Duration::from_secs(600);
/// A queue that moves again within this many of its stays is considered restless.
pub(super) const RESTLESS_STAYS: u32 = 10;
/// After this time, an estimate reflects 63% of a change of load.
pub(super) const SMOOTHING: Duration = Duration::from_millis(500);
/// Time constant with which an idle worker's estimated capacity returns to a whole CPU.
pub(super) const FORGETTING: Duration = Duration::from_secs(60);
/// Estimates older than this are discarded.
pub(crate) const STALE: Duration = Duration::from_secs(1);
