//! `vhost-depth1`: one request at a time, compared with the cost of waking a thread.
//!
//! - The client may sleep until it is called, and the server until it is kicked. By default, our server polls for some
//!   time before it sleeps, so it is measured with and without polling.

use super::bench::{Ask, Part, Vhost, Way};
use super::columns::{
    CPU, IMG_OWN, IMG_PEER, IOPS, LATENCY, PEER_POLLS, PEER_SLEEPS, columns, declaration, differences,
    independent, of, published, target,
};
use crate::experiment::{Beside, Declaration, Experiment, Plot, Scale, Target, Variant, Workload, Yardstick};
use crate::load::disk::test_files::Place;

const READ: &str = "randread";
const WAKE: &str = "wake-up";
const WAKE_PINNED: &str = "wake-up-pinned";
const POLLS: &str = "bareblk-poll";
const SLEEPS: &str = "bareblk-sleep";
const ALL_SLEEP: &str = "bareblk-all-sleep";

pub(crate) fn experiment() -> Experiment {
    Experiment { declaration: this(), make: |setup| Box::new(Vhost::new(setup, part())) }
}

fn part() -> Part {
    let ask = Ask::Requests { place: Place::Tmpfs, writes: false, depth: 1, queues: 1, disturbed: false };
    Part {
        ways: vec![
            (Variant::new(WAKE, "a wake-up by eventfd"), Way::WakeUp { pinned: false }),
            (
                Variant::new(WAKE_PINNED, "a wake-up by eventfd, on another core"),
                Way::WakeUp { pinned: true },
            ),
            (Variant::new(PEER_SLEEPS, "qemu-storage-daemon, asleep"), Way::peer(false)),
            (Variant::new(PEER_POLLS, "qemu-storage-daemon, polling"), Way::peer(true)),
            (Variant::new(ALL_SLEEP, "bareblk mmap, server asleep too"), Way::own_asleep("mmap")),
            (Variant::new(SLEEPS, "bareblk mmap, asleep"), Way::own("mmap", 1, false)),
            (Variant::new(POLLS, "bareblk mmap, polling"), Way::own("mmap", 1, true)),
        ]
        .into_iter()
        .chain(independent("mmap", IMG_PEER))
        .collect(),
        loads: vec![(Workload::new(READ, "4k random reads, RAM disk, depth 1"), ask)],
        columns: columns(&[IOPS, LATENCY, CPU, "client-cpu", "switches"]),
    }
}

fn this() -> Declaration {
    let part = part();
    Declaration {
        published: published(
            "No published figures for depth 1; known figures of other servers",
            &[("mean latency, µs", READ, LATENCY)],
            &[
                ("qemu-storage-daemon 10.0, client sleeps", PEER_SLEEPS, &["43"]),
                ("SPDK on its own core, its client polls", POLLS, &["1.2–2.1"]),
                ("not published: both sleep", ALL_SLEEP, &[]),
                ("not published: the client sleeps", SLEEPS, &[]),
            ],
            "A server that polls answers in a microsecond or two; a server that sleeps pays for each wake-up.",
        ),
        differences: differences(&[(
            "measured on other machines",
            "compared with the cost of one wake-up in the same round",
            "on a virtual machine a wake-up may need an exit to the host, which no server can avoid",
        )]),
        plots: vec![Plot::new("latency", "Mean latency", Some(LATENCY), Scale::Linear)],
        ratio_title: "of peer".into(),
        targets: targets(),
        ..declaration(
            "vhost-depth1",
            "How long does one request take, from the client's ring to the server and back?",
            &part,
            PEER_SLEEPS,
        )
    }
}

fn targets() -> Vec<Target> {
    let reads: &[&str] = &[READ];
    let above_a_wake = Yardstick::Beside {
        column: LATENCY.into(),
        variant: WAKE.into(),
        by: Beside::Difference,
        at_most: 5.0,
    };
    vec![
        target(
            "client and server poll: at most 2.0 µs",
            (&[POLLS], reads),
            (0.0, 0.1),
            Yardstick::Figure { column: LATENCY.into(), at_most: 2.0 },
        ),
        target(
            "the client sleeps, or both do: at most 5 µs more than one wake-up by an eventfd",
            (&[ALL_SLEEP, SLEEPS], reads),
            (0.0, 1.0),
            above_a_wake,
        ),
        target(
            "the client sleeps, or both do: 2.5 times qemu-storage-daemon's IOPS",
            (&[ALL_SLEEP, SLEEPS], reads),
            (2.5, 0.25),
            of(PEER_SLEEPS),
        ),
        target(
            "an independent client, which sleeps: 2.5 times its IOPS on qemu-storage-daemon",
            (&[IMG_OWN], reads),
            (2.5, 0.25),
            of(IMG_PEER),
        ),
    ]
}
