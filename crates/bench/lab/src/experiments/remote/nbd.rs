//! `remote-nbd`: an export of nbdkit, in memory and in a file.

use super::bench::{Ask, Remote, Way, loads, ways};
use super::columns::{DEPTHS, TWO_QUEUES, columns, compared};
use crate::experiment::{Declaration, Experiment};
use crate::experiments::vhost::bench::Part;
use crate::load::remote::Place;

pub(super) fn experiment() -> Experiment {
    Experiment { declaration: this(), make: |setup| Box::new(Remote::new(setup, part())) }
}

fn part() -> Part<Way, Ask> {
    let depths = &DEPTHS[..2];
    let mut loads_of_both = loads("memory-", "nbdkit memory", Place::NbdMemory, depths);
    loads_of_both.extend(loads("file-", "nbdkit file", Place::NbdFile, depths));
    let mut ways = ways("fio, engine nbd", &loads_of_both);
    ways.retain(|(variant, _)| !variant.id.starts_with(TWO_QUEUES));
    Part { ways, loads: loads_of_both, columns: columns() }
}

fn this() -> Declaration {
    compared(
        "remote-nbd",
        "What does serving an export of an NBD server cost?",
        &part(),
        "nbdkit on a Unix socket, plugins memory and file (page cache)",
    )
}
