//! Limits of IOPS and bandwidth: settings, buckets of virtual time, and the gate before a queue's ring.
//!
//! `LimitSettings → Limits → DiskThrottle (a lane for each limited quantity) ← QueueGate (one for each queue)`
//!
//! - A [`bucket::Bucket`] enforces one rate. Disks book turns in it; a turn is an amount that is granted at an instant.
//! - A [`lane::Lane`] belongs to one disk and one quantity. It passes the units of the disk's turns to the disk's
//!   queues, in the order in which the queues booked them.
//! - A [`gate::QueueGate`] belongs to one queue. It lets a request start if the queue has units left, and otherwise
//!   says when the queue may try again.
//!
//! All shared state is atomic: there is no lock, and no thread refills anything. A queue without work sets no timer.
//! This folder does not depend on rings, queues or workers; `queue/gating.rs` and `worker/gates.rs` use it. The
//! reasons: docs/decisions/0057-limits-in-virtual-time.md.

pub(crate) mod bucket;
pub(crate) mod disk_throttle;
pub(crate) mod gate;
pub(crate) mod lane;
pub(crate) mod limits;
pub(crate) mod usage;

#[cfg(test)]
mod simulation;
