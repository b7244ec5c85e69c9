//! The request path from kick to call: workers, their queues and disks.

pub(crate) mod assignment;
pub(crate) mod counters;
pub(crate) mod disk;
pub(crate) mod latency;
pub(crate) mod queue;
pub(crate) mod report;
pub(crate) mod throttle;
pub(crate) mod worker;
