//! `vhost-ram`: 4k requests on a RAM disk, as many queues as jobs, with one and several workers.
//!
//! - The numbers of queues and workers are those published, and larger ones up to the number of cores. Polling clients
//!   are measured only if each has a core that the server does not use; otherwise the figures would show the scheduler.

use super::bench::{Ask, Part, Vhost, Way};
use super::columns::{
    CPU, HOST, IMG_OWN, IMG_PEER, IOPS, PEER_POLLS, PEER_SLEEPS, columns, declaration, differences,
    independent, of, published, target,
};
use crate::experiment::{
    Axis, Beside, Courses, Declaration, Experiment, Plot, Published, Scale, Target, Variant, Workload,
    Yardstick,
};
use crate::load::cores;
use crate::load::disk::fio_jobs::Engine;
use crate::load::disk::test_files::Place;

/// The paper gives no depth for the RAM disk. This depth keeps a worker busy.
const DEPTH: u32 = 64;
/// Numbers of queues of the published measurements.
const QUEUES: [u16; 4] = [1, 2, 4, 8];
const MOST_QUEUES: u16 = 16;
const MOST_WORKERS: u16 = 8;
const ENGINES: [&str; 3] = ["mmap", "sync", "io_uring"];
const LOOP: &str = "copy-loop";
const PSYNC: &str = "host-psync";

pub(crate) fn experiment() -> Experiment {
    let make = |setup: &_| Box::new(Vhost::new(setup, part(cores::all().len()))) as Box<_>;
    Experiment { declaration: this(cores::all().len()), make }
}

/// Powers of two from 1 to `most`, limited to the number of cores, but at least up to `least`.
fn steps(least: u16, most: u16, cores: usize) -> Vec<u16> {
    let cores = u16::try_from(cores).unwrap_or(u16::MAX);
    let last = most.min(cores).max(least);
    std::iter::successors(Some(1), |step| Some(step * 2)).take_while(|&step| step <= last).collect()
}

fn queues(cores: usize) -> Vec<u16> {
    steps(QUEUES[3], MOST_QUEUES, cores)
}

fn workers(cores: usize) -> Vec<u16> {
    steps(2, MOST_WORKERS, cores / 2)
}

fn workload(writes: bool, queues: u16) -> String {
    format!("{}-{queues}", if writes { "randwrite" } else { "randread" })
}

fn own(engine: &str, workers: u16, polls: bool) -> String {
    format!("{engine}-{workers}{}", if polls { "-poll" } else { "" })
}

fn part(cores: usize) -> Part {
    Part {
        ways: ways(cores),
        loads: loads(cores),
        columns: columns(&[IOPS, CPU, "client-cpu", "latency", "p99", "switches", "kicks"]),
    }
}

fn loads(cores: usize) -> Vec<(Workload, Ask)> {
    let load = |writes, queues: u16| {
        let (word, key) = if writes { ("writes", "writes-queues") } else { ("reads", "reads-queues") };
        let label = format!(
            "4k random {word}, RAM disk, {queues} queue{} of depth {DEPTH}",
            if queues == 1 { "" } else { "s" }
        );
        let place = Workload::new(&workload(writes, queues), &label).at(key, queues.into());
        (place, Ask::Requests { place: Place::Tmpfs, writes, depth: DEPTH, queues, disturbed: false })
    };
    let both = |queues| [load(false, queues), load(true, queues)];
    queues(cores).into_iter().flat_map(both).collect()
}

fn ways(cores: usize) -> Vec<(Variant, Way)> {
    // Restricts a variant to the workloads whose number of queues passes `wanted`.
    let with = |variant: Variant, wanted: &dyn Fn(u16) -> bool| {
        let queues: Vec<_> = queues(cores).into_iter().filter(|&queues| wanted(queues)).collect();
        let both = queues.iter().flat_map(|&queues| [workload(false, queues), workload(true, queues)]);
        Variant { only: both.collect(), ..variant }
    };
    let has_room = |queues: u16, workers: u16| usize::from(queues + workers) <= cores.max(2);
    let one = |queues| queues == 1;
    let mut ways = vec![
        (with(Variant::new(HOST, "host, fio io_uring"), &|_| true), Way::Fio(Engine::IoUring)),
        (with(Variant::new(PSYNC, "host, fio psync"), &|_| true), Way::Fio(Engine::Psync)),
        (with(Variant::new(LOOP, "a bare loop that copies blocks"), &one), Way::CopyLoop),
        (Variant::new(PEER_SLEEPS, "qemu-storage-daemon, asleep"), Way::peer(false)),
        (
            with(Variant::new(PEER_POLLS, "qemu-storage-daemon, polling"), &|queues| has_room(queues, 1)),
            Way::peer(true),
        ),
    ];
    for engine in ENGINES {
        for workers in workers(cores) {
            let name = format!("bareblk {engine} ×{workers}");
            let sleeps = Variant::new(&own(engine, workers, false), &format!("{name}, asleep"));
            ways.push((with(sleeps, &|queues| queues >= workers), Way::own(engine, workers, false)));
            let fits = |queues| queues >= workers && has_room(queues, workers);
            if engine != "io_uring" && queues(cores).into_iter().any(fits) {
                let polls = Variant::new(&own(engine, workers, true), &format!("{name}, polling"));
                ways.push((with(polls, &fits), Way::own(engine, workers, true)));
            }
        }
    }
    let clients = independent("mmap", IMG_PEER);
    ways.extend(clients.map(|(variant, way)| (with(variant, &one), way)));
    ways
}

fn this(cores: usize) -> Declaration {
    let part = part(cores);
    Declaration {
        published: published_table(),
        differences: differences(&[
            (
                "a RAM disk as a block device, depth not stated",
                "a file of 1 GiB on tmpfs, depth 64 per queue",
                "tmpfs exists on every machine, and the depth ensures that no worker waits for clients",
            ),
            (
                "virtqueues = vCPUs = jobs, in a guest with this number of vCPUs",
                "a queue and a thread for each job, in the published numbers even on machines with fewer cores",
                "a guest may have more vCPUs than the host has cores",
            ),
        ]),
        ratio_title: "of peer".into(),
        plots: vec![
            Plot::new("iops", "IOPS", Some(IOPS), Scale::Linear),
            Plot::new("cpu", "Server's CPU per I/O", Some(CPU), Scale::Linear),
        ],
        courses: ["reads", "writes"].map(|word| course(word, &part)).into(),
        targets: targets(cores),
        ..declaration(
            "vhost-ram",
            "Does a RAM disk scale with its queues, and the server with its workers?",
            &part,
            PEER_SLEEPS,
        )
    }
}

fn course(word: &str, part: &Part) -> Courses {
    let sleeps = part.ways.iter().filter(|(variant, way)| match way {
        Way::Server { client_polls, .. } => !client_polls,
        _ => variant.id == PSYNC,
    });
    Courses {
        id: format!("{word}-by-queues"),
        title: format!("4k random {word} versus the number of queues, clients asleep"),
        across: Axis { key: format!("{word}-queues"), title: "queues = jobs".into() },
        column: IOPS.into(),
        scale: Scale::Log,
        variants: sleeps.map(|(variant, _)| variant.id.clone()).collect(),
    }
}

fn published_table() -> Published {
    let titles = QUEUES.map(|queues| {
        [false, true].map(|writes| {
            (format!("{} {queues}", if writes { "write" } else { "read" }), workload(writes, queues))
        })
    });
    let columns: Vec<_> =
        titles.iter().flatten().map(|(title, id)| (title.as_str(), id.as_str(), IOPS)).collect();
    let two_workers = own("mmap", 2, false);
    let one_worker = own("mmap", 1, false);
    published(
        "RAM disk, random IOPS versus the number of queues",
        &columns,
        &[
            (
                "QEMU virtio-blk",
                PEER_SLEEPS,
                &["133k", "133k", "305k", "306k", "310k", "298k", "271k", "252k"],
            ),
            (
                "vhost-blk, one worker",
                &one_worker,
                &["110k", "113k", "247k", "252k", "558k", "556k", "576k", "575k"],
            ),
            ("vhost-blk, two workers", &two_workers, &["–", "–", "–", "–", "–", "–", "803k", "779k"]),
        ],
        "QEMU does not scale beyond two queues; the server scales to four queues with one worker, and a \
         second worker adds a factor of 1.4.",
    )
}

fn targets(cores: usize) -> Vec<Target> {
    let read = workload(false, 1);
    let reads: &[&str] = &[&read];
    let (mmap, sync, asleep) = (own("mmap", 1, true), own("sync", 1, true), own("mmap", 1, false));
    vec![
        target(
            "mmap serves 10 times as many reads as qemu-storage-daemon while the client polls",
            (&[&mmap], reads),
            (10.0, 1.0),
            of(PEER_POLLS),
        ),
        target(
            "mmap serves 15 times as many reads as qemu-storage-daemon while the client sleeps",
            (&[&asleep], reads),
            (15.0, 1.5),
            of(PEER_SLEEPS),
        ),
        target(
            "mmap reaches 0.9 of the IOPS of a bare loop that copies the same blocks",
            (&[&mmap], reads),
            (0.9, 0.05),
            of(LOOP),
        ),
        target("sync reaches 0.95 of the IOPS of fio psync", (&[&sync], reads), (0.95, 0.05), of(PSYNC)),
        target(
            "an independent client has 10 times its IOPS on qemu-storage-daemon",
            (&[IMG_OWN], reads),
            (10.0, 1.0),
            of(IMG_PEER),
        ),
        two_workers(cores),
    ]
}

/// With separate cores, two workers must do nearly twice the work of one. Otherwise, a request must cost hardly more
/// CPU with two workers.
fn two_workers(cores: usize) -> Target {
    let read = workload(false, 2);
    if cores >= 4 {
        let (one, two) = (own("mmap", 1, true), own("mmap", 2, true));
        let text = "two workers serve 1.9 times as many reads as one (mmap, clients poll)";
        return target(text, (&[&two], &[&read]), (1.9, 0.1), of(&one));
    }
    let (one, two) = (own("mmap", 1, false), own("mmap", 2, false));
    target(
        "two workers need at most 5 % more CPU per read than one (mmap; the workers have no cores of their \
         own)",
        (&[&two], &[&read]),
        (0.0, 0.05),
        Yardstick::Beside { column: CPU.into(), variant: one, by: Beside::Ratio, at_most: 1.05 },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn only<'w>(ways: &'w [(Variant, Way)], id: &str) -> &'w [String] {
        &ways.iter().find(|(variant, _)| variant.id == id).unwrap().0.only
    }

    #[test]
    fn small_machine_has_the_published_queues_and_two_workers() {
        assert_eq!((queues(2), workers(2)), (vec![1, 2, 4, 8], vec![1, 2]));
        let ways = ways(2);
        assert_eq!(only(&ways, "mmap-1-poll"), ["randread-1", "randwrite-1"]);
        assert!(!only(&ways, "mmap-2").contains(&"randread-1".to_owned()), "a worker would have no queue");
        assert!(!ways.iter().any(|(variant, _)| variant.id == "mmap-2-poll"));
    }

    #[test]
    fn large_machine_has_up_to_16_queues_and_8_workers() {
        assert_eq!((queues(16), workers(16)), (vec![1, 2, 4, 8, 16], vec![1, 2, 4, 8]));
        let ways = ways(16);
        assert_eq!(only(&ways, "mmap-8-poll"), ["randread-8", "randwrite-8"]);
    }

    #[test]
    fn targets_name_what_there_is_on_every_machine() {
        for cores in [1, 2, 4, 16, 200] {
            let declaration = this(cores);
            let names: Vec<_> = declaration.variants.iter().map(|variant| &variant.id).collect();
            assert!(
                declaration.targets.iter().flat_map(|target| &target.variants).all(|id| names.contains(&id))
            );
        }
    }
}
