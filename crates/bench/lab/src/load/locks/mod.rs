//! Threads that compete for one lock, and the lock's fairness.

pub(crate) mod exclusive;

pub(crate) mod events;

pub(crate) mod fairness;

pub(crate) mod turn;

pub(crate) mod contest;
