//! The service manager: readiness, sockets that it passes, its watchdog.

pub(crate) mod passed_sockets;
pub(crate) mod service_manager;
pub(crate) mod watchdog;
