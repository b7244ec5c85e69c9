//! Guests whose disks have limits of IOPS or bandwidth, and what they get in each window of time.

pub(crate) mod guest;

pub(crate) mod server;

pub(crate) mod windows;
