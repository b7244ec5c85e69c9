//! Integration tests: one program, one module per subject. Tests that count resources of the whole process are in
//! `tests/process`.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss
)]

mod balancing;
mod cache_choice;
mod cache_modes;
mod confined;
mod dirty_log;
mod discard;
mod disks;
mod durability;
mod durability_model;
mod failed_sync;
mod failing_storage;
mod faults;
mod flush_on_request;
mod hanging_descriptors;
mod hostile_chains;
mod hostile_front_end;
mod hostile_limits;
mod hostile_logs;
mod hostile_races;
mod hung_storage;
mod in_flight_log;
mod layouts;
mod lifecycle;
mod limits;
mod live_upgrade;
mod memory;
mod messages;
mod migration;
mod moving;
mod moving_restarts;
mod other_kernel;
mod parked;
mod patience;
mod pause;
mod placement;
mod power_loss;
mod requests;
mod rig;
mod ring_faults;
mod sessions;
mod submissions;
mod totals;
mod virtio_driver;
