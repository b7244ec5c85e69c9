//! The answers of the control socket: structures that become JSON, and that `ctl` parses.
//!
//! `ServerReport (blk_server) → answer → JSON`. `reports.golden.json` lists the fields on which clients may rely.

pub mod balance;
pub mod jobs;
pub mod latency;
pub mod placement;
pub mod reports;
pub mod slow;
pub mod throttling;
