//! Integration tests: one binary, one module per subject. Folders without tests hold code that modules share.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

mod contract;
mod device_thread;
mod hostile;
mod in_flight_log;
mod own_server;
mod peers;
mod pool;
mod qemu_storage_daemon;
mod queue_allocations;
mod queue_endings;
mod queue_hostile;
mod queue_requests;
mod queue_sizes;
mod queue_waiting;
mod reconnect;
mod rig;
mod shared_queue;
