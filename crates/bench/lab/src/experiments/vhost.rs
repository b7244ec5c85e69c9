//! `vhost`: the experiment's parts, each an experiment with its own tables, plots and verdicts.
//!
//! `bareblk lab run vhost → every part, one after another, into one report`
//!
//! Not here: the parts themselves (`vhost_*.rs`), how they measure (`vhost_bench.rs`).

use super::{vhost_depth1, vhost_disturbed, vhost_idle, vhost_ram, vhost_ssd};
use crate::experiment::Experiment;

/// In the order in which they run.
pub(super) fn parts() -> Vec<Experiment> {
    vec![
        vhost_ssd::experiment(),
        vhost_ram::experiment(),
        vhost_depth1::experiment(),
        vhost_disturbed::experiment(),
        vhost_idle::experiment(),
    ]
}
