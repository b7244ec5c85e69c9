//! `qspinlock`: the experiment's parts, each an experiment with its own tables, plots and verdicts.
//!
//! `bareblk lab run qspinlock → every part, one after another, into one report`
//!
//! Not here: the parts themselves (`qspinlock_*.rs`), how one name means several experiments (`mod.rs`).

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
