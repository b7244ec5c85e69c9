//! The image's host clusters: which are in use, which are ready for use, and how their number grows.

pub(super) mod counts;
pub(super) mod grow;
pub(super) mod reclaim;
mod refill;
mod release;
pub(super) mod reserve;
