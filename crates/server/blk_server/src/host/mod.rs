//! Interfaces to the host: CPUs, caches, NUMA nodes, control groups, sockets, eventfds, a clock.

pub(crate) mod caches;
pub(crate) mod cgroup;
pub(crate) mod clock;
pub(crate) mod cpu_list;
pub(crate) mod error_line;
pub(crate) mod listener;
pub(crate) mod numa;
pub(crate) mod signal;
