//! A server in another process: its start, its counters, its cost.

pub(crate) mod process;

pub(crate) mod placed;

pub(crate) mod control;

pub(crate) mod configured;

pub(crate) mod stats;

pub(crate) mod cost;

pub(crate) mod scraper;
