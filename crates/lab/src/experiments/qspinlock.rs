//! `qspinlock`: the parts of the experiment, each an experiment with tables, plots and verdicts of its own.
//!
//! `bareblk lab run qspinlock → every part, one after the other, into one report`
//!
//! Not here: the parts themselves (`qspinlock_*.rs`), how a name stands for several experiments (`mod.rs`).

use super::{qspinlock_aim7, qspinlock_alone, qspinlock_overcommit, qspinlock_timed, qspinlock_wakes};
use crate::experiment::Experiment;

/// In the order in which they run.
pub(super) fn parts() -> Vec<Experiment> {
    vec![
        qspinlock_alone::experiment(),
        qspinlock_overcommit::experiment(),
        qspinlock_wakes::experiment(),
        qspinlock_timed::experiment(),
        qspinlock_aim7::experiment(),
    ]
}
