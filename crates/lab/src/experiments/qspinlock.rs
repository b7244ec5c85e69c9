//! `qspinlock`: the parts of the experiment, each an experiment with tables, plots and verdicts of its own.
//!
//! `bareblk lab run qspinlock → every part, one after the other, into one report`
//!
//! Not here: the parts themselves (`qspinlock_*.rs`), how a name stands for several experiments (`mod.rs`).

use super::qspinlock_aim7;
use crate::experiment::Experiment;

/// In the order in which they run.
pub(super) fn parts() -> Vec<Experiment> {
    vec![
        super::qspinlock_alone::experiment(),
        super::qspinlock_overcommit::experiment(),
        super::qspinlock_wakes::experiment(),
        super::qspinlock_timed::experiment(),
    ]
}
