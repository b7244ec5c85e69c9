//! `vhost`: the experiment's parts, each an experiment with its own tables, plots and verdicts.
//!
//! `bareblk lab run vhost → every part, one after another, into one report`
//!
//! See also: the parts themselves (`ssd.rs` and others), how they measure (`bench.rs`).

pub(crate) mod bench;

pub(crate) mod columns;

mod ssd;

mod ram;

mod depth1;

mod disturbed;

mod idle;

use crate::experiment::Experiment;

/// The parts, in the order in which they run.
pub(super) fn parts() -> Vec<Experiment> {
    vec![
        ssd::experiment(),
        ram::experiment(),
        depth1::experiment(),
        disturbed::experiment(),
        idle::experiment(),
    ]
}
