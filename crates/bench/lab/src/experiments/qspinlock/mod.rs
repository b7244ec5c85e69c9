//! `qspinlock`: the experiment's parts, each an experiment with its own tables, plots and verdicts.
//!
//! `bareblk lab run qspinlock → every part, one after another, into one report`
//!
//! See also: the parts themselves (`alone.rs` and others), how one name selects several experiments
//! (`experiments/mod.rs`).

mod locks;

mod columns;

mod alone;

mod overcommit;

mod overcommit_declaration;

mod plane;

mod plane_declaration;

mod wakes;

mod timed;

mod aim7;

mod aim7_declaration;

use crate::experiment::Experiment;

/// The parts, in the order in which they run.
pub(super) fn parts() -> Vec<Experiment> {
    vec![
        alone::experiment(),
        overcommit::experiment(),
        plane::experiment(),
        wakes::experiment(),
        timed::experiment(),
        aim7::experiment(),
    ]
}
