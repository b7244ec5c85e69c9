//! Threads that want one lock, and how evenly they get it.

pub(crate) mod exclusive;

pub(crate) mod events;

pub(crate) mod fairness;

pub(crate) mod contest;
