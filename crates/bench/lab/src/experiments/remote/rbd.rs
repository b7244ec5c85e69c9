//! `remote-memstore`, `remote-bluestore`: an RBD image in a Ceph cluster of one node, in memory and on a disk.

use super::bench::{Remote, loads, ways};
use super::columns::{DEPTHS, OWN, TWO_WORKERS, columns, compared};
use crate::experiment::{Declaration, Experiment};
use crate::experiments::vhost::bench::Part;
use crate::experiments::vhost::columns::{of, target};
use crate::load::remote::{Place, Store};

pub(super) fn experiments() -> [Experiment; 2] {
    [
        Experiment {
            declaration: this(Store::Memstore),
            make: |setup| Box::new(Remote::new(setup, part(Store::Memstore))),
        },
        Experiment {
            declaration: this(Store::Bluestore),
            make: |setup| Box::new(Remote::new(setup, part(Store::Bluestore))),
        },
    ]
}

fn part(store: Store) -> Part<super::bench::Way, super::bench::Ask> {
    let loads = loads("rand", "RBD image", Place::Ceph(store), &DEPTHS);
    Part { ways: ways("fio, engine rbd", &loads), loads, columns: columns() }
}

fn this(store: Store) -> Declaration {
    let part = part(store);
    let (name, question, setup) = match store {
        Store::Memstore => (
            "remote-memstore",
            "What does serving an RBD image cost, if the cluster stores data in memory?",
            "an RBD image in a Ceph cluster of one monitor and one OSD with memstore",
        ),
        Store::Bluestore => (
            "remote-bluestore",
            "What does serving an RBD image cost, if the cluster stores data on a disk?",
            "an RBD image in a Ceph cluster of one monitor and one OSD with bluestore",
        ),
    };
    let mut this = compared(name, question, &part, setup);
    let deep: Vec<_> = part.loads.iter().filter(|(_, ask)| ask.depth > DEPTHS[0]).collect();
    let deep: Vec<_> = deep.iter().map(|(workload, _)| workload.id.as_str()).collect();
    this.targets.push(target(
        "two queues on two workers have the IOPS of one queue on one worker",
        (&[TWO_WORKERS], &deep),
        (1.0, 0.1),
        of(OWN),
    ));
    this
}
