//! Integration tests: one program, one module per subject.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss
)]

mod cli;
mod config;
mod ctl;
mod engines;
mod guest;
mod guest_clients;
mod guest_debian;
mod guest_device;
mod guest_engines;
mod guest_errors;
mod guest_files;
mod guest_io;
mod guest_migration;
mod guest_remote;
mod guest_restart;
mod image;
mod killed;
mod limits;
mod live_upgrade;
mod nbd;
mod nbd_tls;
mod on_error;
mod package;
mod qcow2;
mod rbd;
mod rbd_faults;
mod rig;
mod sandbox;
mod service;
mod serving;
mod verbs;
mod workers;
