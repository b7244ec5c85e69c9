//! `vhost-ssd`: 4k requests at depth 128 on a disk file, with and without a server.

use super::bench::{Ask, Part, Vhost, Way};
use super::columns::{
    CPU, HOST, IMG_HOST, IMG_OWN, IOPS, PEER_POLLS, PEER_SLEEPS, columns, declaration, differences,
    independent, of, published, target,
};
use crate::experiment::{Beside, Declaration, Experiment, Plot, Scale, Target, Variant, Workload, Yardstick};
use crate::load::disk::fio_jobs::Engine;
use crate::load::disk::test_files::Place;

const READ: &str = "randread";
const WRITE: &str = "randwrite";
const SLEEPS: &str = "bareblk-sleep";
const POLLS: &str = "bareblk-poll";

pub(crate) fn experiment() -> Experiment {
    Experiment { declaration: this(), make: |setup| Box::new(Vhost::new(setup, part())) }
}

fn part() -> Part {
    let load = |writes| Ask::Requests { place: Place::Disk, writes, depth: 128, queues: 1, disturbed: false };
    Part {
        ways: vec![
            (Variant::new(HOST, "host, fio io_uring"), Way::Fio(Engine::IoUring)),
            (Variant::new(PEER_SLEEPS, "qemu-storage-daemon, asleep"), Way::peer(false)),
            (Variant::new(PEER_POLLS, "qemu-storage-daemon, polling"), Way::peer(true)),
            (Variant::new(SLEEPS, "bareblk, asleep"), Way::own("io_uring", 1, false)),
            (Variant::new(POLLS, "bareblk, polling"), Way::own("io_uring", 1, true)),
        ]
        .into_iter()
        .chain(independent("io_uring", IMG_HOST))
        .collect(),
        loads: vec![
            (Workload::new(READ, "4k random reads, depth 128"), load(false)),
            (Workload::new(WRITE, "4k random writes, depth 128"), load(true)),
        ],
        columns: columns(&[IOPS, CPU, "client-cpu", "latency", "p99", "switches", "kicks"]),
    }
}

fn this() -> Declaration {
    let part = part();
    Declaration {
        published: published(
            "SSD, 4k, depth 128",
            &[("randread IOPS", READ, IOPS), ("randwrite IOPS", WRITE, IOPS)],
            &[
                ("host, no guest", HOST, &["95.8 k", "85.3 k"]),
                ("QEMU virtio-blk", PEER_SLEEPS, &["61.5 k", "79.9 k"]),
                ("vhost-blk", SLEEPS, &["95.6 k", "84.3 k"]),
            ],
            "With a server outside the VMM, a guest has 99.8 % and 98.8 % of the host's IOPS (random reads \
             and writes); with QEMU, it has 64 % and 94 %.",
        ),
        differences: differences(&[(
            "fio with libaio on the host",
            "fio with io_uring",
            "a server is compared with the host's best figure",
        )]),
        plots: vec![
            Plot::new("ratio", "IOPS, share of the host's in the same round", None, Scale::Linear),
            Plot::new("cpu", "Server's CPU per I/O", Some(CPU), Scale::Linear),
        ],
        targets: targets(),
        ..declaration(
            "vhost-ssd",
            "Does a guest get the same performance from a served disk as the host gets from the disk?",
            &part,
            HOST,
        )
    }
}

fn targets() -> Vec<Target> {
    let both = &[READ, WRITE];
    vec![
        target("reads equal the host's", (&[SLEEPS], &[READ]), (1.0, 0.02), Yardstick::Baseline),
        target("writes equal the host's", (&[SLEEPS], &[WRITE]), (1.0, 0.05), Yardstick::Baseline),
        target(
            "an independent client has 0.95 of its IOPS on the file itself",
            (&[IMG_OWN], both),
            (0.95, 0.05),
            of(IMG_HOST),
        ),
        target(
            "the server's CPU per I/O is at most 2.5 µs",
            (&[SLEEPS], both),
            (0.0, 0.1),
            Yardstick::Figure { column: CPU.into(), at_most: 2.5 },
        ),
        target(
            "the server's CPU per I/O is below qemu-storage-daemon's",
            (&[SLEEPS], both),
            (0.0, 0.02),
            Yardstick::Beside {
                column: CPU.into(),
                variant: PEER_SLEEPS.into(),
                by: Beside::Ratio,
                at_most: 1.0,
            },
        ),
    ]
}
