//! Which queue should go to which worker: the rule, as a function of measurements.
//!
//! `readings (two subtracted) → Interval → Estimates (smoothed) → Model (pressures) → Decider (patience, stays) → moves`
//!
//! - One rule: a queue moves if the worker it goes to, with it, is under clearly less [pressure](model) than the
//!   one it leaves. Each such move makes the sorted list of pressures smaller, so they come to an end.
//! - Moving has a price, and measurements have errors: so a worker must be busy ([`BUSY`]), the difference
//!   large ([`MARGIN`]) and seen [`PATIENCE`] times in a row, the gain larger than the price ([`MOVE_COST`]), and a
//!   queue that moved stays a while, longer each time that it moves again soon.
//! - What somebody attached by hand is left alone.
//! - Queues are never gathered on fewer workers: docs/how-to/balancing.md says why.
//!
//! No thread, no clock: time comes with the measurements. Not here: who measures and moves (`balancer.rs`).

mod decider;
mod estimates;
mod interval;
mod model;

#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;

use std::time::Duration;

pub(crate) use decider::{Decider, Move};
pub(crate) use interval::{QueueName, QueueReading, Reading};

/// Whether queues are moved between workers by themselves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Balance {
    /// From measured load. Nothing happens, and no thread is started for it, while there is one worker.
    #[default]
    Auto,
    /// Queues stay where they were started or attached.
    Off,
}

impl std::str::FromStr for Balance {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "off" => Ok(Self::Off),
            other => Err(format!("`{other}` is neither auto nor off")),
        }
    }
}

/// Below this pressure nobody has to wait long for a worker, and one more worker that is awake costs more in
/// wake-ups than it gives.
const BUSY: f64 = 0.6;
/// How much lower the pressure must be where a queue goes to, the queue included; of the pressure it leaves where
/// that is above 1.
const MARGIN: f64 = 0.15;
/// Readings in a row in which a worker must have had a queue to give away.
const PATIENCE: u32 = 3;
/// Moves after one reading.
const MOST_MOVES: usize = 8;
/// What a move costs a queue: it stands still until its slowest request is done, and meets cold caches.
const MOVE_COST: Duration = Duration::from_millis(2);
/// What a request waits for the others' batches on a worker that is fully busy; the least, so that queues with few
/// requests are worth moving out of a crowd, and those with next to none are not.
const CROWD_DELAY: Duration = Duration::from_micros(100);
/// How long a queue that was moved stays.
const FIRST_STAY: Duration = Duration::from_secs(2);
/// The longest that it grows to.
const LONGEST_STAY: Duration = Duration::from_secs(600);
/// A queue that moves again within this many of its stays is going to and fro.
const RESTLESS_STAYS: u32 = 10;
/// How fast loads are believed: after this time, 63 % of a change is.
const SMOOTHING: Duration = Duration::from_millis(500);
/// How fast a worker that shows nothing is believed to have its CPU to itself again.
const FORGETTING: Duration = Duration::from_secs(60);
/// Estimates older than this describe another load.
pub(crate) const STALE: Duration = Duration::from_secs(1);
