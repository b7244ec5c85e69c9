//! The rule that decides which queue should move to which worker: a function of measurements, without thread or clock.
//!
//! `readings (two subtracted) → Interval → Estimates (smoothed) → Model (pressures) → Decider (patience, stays) → moves`
//!
//! - A queue moves if its new worker, including the queue, has clearly less [pressure](model) than its old worker has
//!   now. Each such move makes the sorted list of pressures smaller, so the moves terminate.
//! - Moves have a price, and measurements have errors. Therefore a queue moves only if its worker is busy ([`BUSY`]),
//!   the difference is large ([`MARGIN`]) and was seen [`PATIENCE`] times in a row, and the gain exceeds the price
//!   ([`MOVE_COST`]). A moved queue then stays for a time, which grows if it moves again soon.
//! - A queue moves to another last-level cache only if no move within the cache relieves its worker.
//! - Queues that an operator attached by hand never move.
//! - The balancer never gathers queues on fewer workers: docs/how-to/balancing.md explains why.
//!
//! The thread that measures and moves is in `balancer.rs`.

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

/// Whether the server moves queues between workers automatically.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Balance {
    /// The server moves queues by measured load. With one worker there is no balancer thread.
    #[default]
    Auto,
    /// Queues stay on the workers where they were started or attached.
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
