//! Jobs that share queues, the distribution of their completions, and a device that completes at once.

pub(crate) mod null_device;

pub(crate) mod mailboxes;

pub(crate) mod moments;

pub(crate) mod crowd;
