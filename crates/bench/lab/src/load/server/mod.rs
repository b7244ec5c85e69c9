//! A server in another process: how it is run, what it counts, what it costs.

pub(crate) mod process;

pub(crate) mod placed;

pub(crate) mod stats;

pub(crate) mod cost;
