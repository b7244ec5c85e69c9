//! From a kick to a call: workers, their queues and the disks of these.

pub(crate) mod assignment;
pub(crate) mod counters;
pub(crate) mod disk;
pub(crate) mod queue;
pub(crate) mod report;
pub(crate) mod worker;
