//! Which queue should go to which worker: the rule, as a function of measurements.
//!
//! `readings (two subtracted) → Interval → Estimates (smoothed) → Model (pressures) → Decider (patience, stays) → moves`
//!
//! - One rule: a queue moves if the worker it goes to, with it, is under clearly less [pressure](model) than the
//!   one it leaves. Each such move makes the sorted list of pressures smaller, so they come to an end.
//! - Moving has a price, and measurements have errors: so a worker must be busy ([`BUSY`](tuning::BUSY)), the difference
//!   large ([`MARGIN`](tuning::MARGIN)) and seen [`PATIENCE`](tuning::PATIENCE) times in a row, the gain larger than the price ([`MOVE_COST`](tuning::MOVE_COST)), and a
//!   queue that moved stays a while, longer each time that it moves again soon.
//! - What somebody attached by hand is left alone.
//! - Queues are never gathered on fewer workers: docs/how-to/balancing.md says why.
//!
//! No thread, no clock: time comes with the measurements. Not here: who measures and moves (`balancer.rs`).

mod decider;
mod estimates;
mod interval;
mod model;
pub(crate) mod tuning;

#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;

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
