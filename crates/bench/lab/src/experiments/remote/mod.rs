//! `remote`: disks elsewhere, served, beside fio's own engine for them.
//!
//! `bareblk lab run remote → every part, one after another, into one report`
//!
//! See also: the parts themselves (`nbd.rs`, `rbd.rs`, `disks.rs`, `neighbour.rs`), how the first two measure (`bench.rs`).

mod bench;

mod columns;

mod nbd;

mod rbd;

mod disks;

mod neighbour;

use crate::experiment::Experiment;

/// The parts, in the order in which they run.
pub(super) fn parts() -> Vec<Experiment> {
    let [memstore, bluestore] = rbd::experiments();
    // First the part that needs no cluster: a part that cannot run ends the run.
    vec![nbd::experiment(), memstore, bluestore, disks::experiment(), neighbour::experiment()]
}
