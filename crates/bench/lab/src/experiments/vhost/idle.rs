//! `vhost-idle`: the cost of an unused disk.

use super::bench::{Ask, Part, Vhost, Way};
use super::columns::{PEER_SLEEPS, WAKES, columns, declaration, differences, published, target};
use crate::experiment::{Declaration, Effort, Experiment, Variant, Workload, Yardstick};

const SILENT: &str = "silent";
const ONE: &str = "bareblk-1";
const TWO: &str = "bareblk-2";

pub(crate) fn experiment() -> Experiment {
    Experiment { declaration: this(), make: |setup| Box::new(Vhost::new(setup, part())) }
}

fn part() -> Part {
    Part {
        ways: vec![
            (Variant::new(PEER_SLEEPS, "qemu-storage-daemon"), Way::peer(false)),
            (Variant::new(ONE, "bareblk, 1 worker, 1 queue"), Way::own("io_uring", 1, false)),
            (Variant::new(TWO, "bareblk, 2 workers, 2 queues"), Way::own("io_uring", 2, false)),
        ],
        loads: vec![(
            Workload::new(SILENT, "a client is connected and has started its queues, but sends nothing"),
            Ask::Silence,
        )],
        columns: columns(&[WAKES, "idle-cpu", "threads", "resident"]),
    }
}

fn this() -> Declaration {
    let part = part();
    Declaration {
        published: published(
            "No published figures for idle disks; known figures of other servers",
            &[("CPU, µs per second", SILENT, "idle-cpu")],
            &[
                ("QEMU", PEER_SLEEPS, &["–"]),
                ("SPDK: 100 % of a core", ONE, &["1000000"]),
                ("not published: two workers", TWO, &[]),
            ],
            "A server that always polls always uses CPU time.",
        ),
        differences: differences(&[]),
        compared: WAKES.into(),
        ratio_title: "of peer".into(),
        targets: vec![target(
            "no wake-ups: none of the server's threads runs while the disk is idle",
            (&[ONE, TWO], &[SILENT]),
            (0.0, 0.0),
            Yardstick::Figure { column: WAKES.into(), at_most: 0.0 },
        )],
        full: Effort { rounds: 6, seconds: 10.0, file_bytes: 16 << 20 },
        quick: Effort { rounds: 1, seconds: 0.2, file_bytes: 16 << 20 },
        ..declaration("vhost-idle", "What does an unused disk cost?", &part, PEER_SLEEPS)
    }
}
