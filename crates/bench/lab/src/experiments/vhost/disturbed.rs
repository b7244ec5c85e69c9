//! `vhost-disturbed`: loads on disk and RAM disk while another process keeps every core busy.
//!
//! - If client and server each share a core with one busy neighbour, their fair share is half of their performance
//!   without neighbours.

use super::bench::{Ask, Part, Vhost, Way};
use super::columns::{
    CPU, HOST, IOPS, PEER_POLLS, PEER_SLEEPS, columns, declaration, differences, of, published, target,
};
use crate::experiment::{Declaration, Experiment, Plot, Scale, Target, Variant, Workload, Yardstick};
use crate::load::disk::fio_jobs::Engine;
use crate::load::disk::test_files::Place;

const DISK_READ: &str = "disk-randread";
const DISK_WRITE: &str = "disk-randwrite";
const RAM: &str = "ram-randread";
const RAM_ALONE: &str = "ram-randread-alone";
const DISK_SLEEPS: &str = "io_uring-sleep";
const DISK_POLLS: &str = "io_uring-poll";
const SLEEPS: &str = "mmap-sleep";
const POLLS: &str = "mmap-poll";
/// The required fraction of the fair share.
const FAIR_SHARE: f64 = 0.8;

pub(crate) fn experiment() -> Experiment {
    Experiment { declaration: this(), make: |setup| Box::new(Vhost::new(setup, part())) }
}

fn part() -> Part {
    let disk = |writes| Ask::Requests { place: Place::Disk, writes, depth: 128, queues: 1, disturbed: true };
    let ram =
        |disturbed| Ask::Requests { place: Place::Tmpfs, writes: false, depth: 64, queues: 1, disturbed };
    let (on_disk, on_ram) = ([DISK_READ, DISK_WRITE], [RAM, RAM_ALONE]);
    Part {
        ways: vec![
            (Variant::new(HOST, "host, fio io_uring"), Way::Fio(Engine::IoUring)),
            (Variant::new(PEER_SLEEPS, "qemu-storage-daemon, asleep"), Way::peer(false)),
            (Variant::new(PEER_POLLS, "qemu-storage-daemon, polling"), Way::peer(true)),
            (
                Variant::new(DISK_SLEEPS, "bareblk io_uring, asleep").only(&on_disk),
                Way::own("io_uring", 1, false),
            ),
            (
                Variant::new(DISK_POLLS, "bareblk io_uring, polling").only(&on_disk),
                Way::own("io_uring", 1, true),
            ),
            (Variant::new(SLEEPS, "bareblk mmap, asleep").only(&on_ram), Way::own("mmap", 1, false)),
            (Variant::new(POLLS, "bareblk mmap, polling").only(&on_ram), Way::own("mmap", 1, true)),
        ],
        loads: vec![
            (Workload::new(DISK_READ, "4k random reads, disk, depth 128, cores busy"), disk(false)),
            (Workload::new(DISK_WRITE, "4k random writes, disk, depth 128, cores busy"), disk(true)),
            (Workload::new(RAM, "4k random reads, RAM disk, depth 64, cores busy"), ram(true)),
            (Workload::new(RAM_ALONE, "4k random reads, RAM disk, depth 64, without neighbours"), ram(false)),
        ],
        columns: columns(&[IOPS, CPU, "client-cpu", "latency", "p99", "switches"]),
    }
}

fn this() -> Declaration {
    let part = part();
    Declaration {
        published: published(
            "No published figures for busy neighbours; known figures of other servers, random reads from \
             memory",
            &[("IOPS, cores busy", RAM, IOPS), ("IOPS, alone", RAM_ALONE, IOPS)],
            &[
                ("qemu-storage-daemon 10.0, client sleeps", PEER_SLEEPS, &["68 k", "115 k"]),
                ("SPDK, server and client always poll", POLLS, &["279 k", "1.2–1.4 M"]),
                ("not published: the client sleeps", SLEEPS, &[]),
            ],
            "A server that needs a core of its own keeps 23 % of its IOPS if it has to share the core.",
        ),
        differences: differences(&[(
            "nothing was published",
            "one busy process pinned to each core, beside the host's fio and beside every server",
            "hosts are rarely idle, and users get the performance that a server keeps on a busy host",
        )]),
        plots: vec![Plot::new("iops", "IOPS", Some(IOPS), Scale::Linear)],
        targets: targets(),
        ..declaration(
            "vhost-disturbed",
            "How much performance remains when every core has other work?",
            &part,
            HOST,
        )
    }
}

fn targets() -> Vec<Target> {
    let ram: &[&str] = &[RAM];
    vec![
        target(
            "5 times qemu-storage-daemon's IOPS while the client sleeps",
            (&[SLEEPS], ram),
            (5.0, 0.5),
            of(PEER_SLEEPS),
        ),
        target(
            "5 times qemu-storage-daemon's IOPS while the client polls",
            (&[POLLS], ram),
            (5.0, 0.5),
            of(PEER_POLLS),
        ),
        target(
            "0.8 of the fair share, which is half of the IOPS without neighbours (the client polls)",
            (&[POLLS], ram),
            (FAIR_SHARE / 2.0, 0.05),
            Yardstick::Workload(RAM_ALONE.into()),
        ),
        target(
            "on the disk, 80 % of the IOPS of the equally disturbed host",
            (&[DISK_SLEEPS], &[DISK_READ, DISK_WRITE]),
            (0.8, 0.05),
            Yardstick::Baseline,
        ),
    ]
}
