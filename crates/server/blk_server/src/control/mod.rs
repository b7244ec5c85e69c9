//! The parts that an operator controls: the server, its disks and workers, live upgrades, the balancer.

pub(crate) mod acceptor;
pub(crate) mod balance;
pub(crate) mod balancer;
pub(crate) mod capacity;
mod completion_worker;
pub(crate) mod exports;
pub(crate) mod live_upgrade;
pub(crate) mod overlay;
pub(crate) mod pause;
pub(crate) mod removal;
pub(crate) mod server;
pub(crate) mod session_list;
pub(crate) mod throttling;
