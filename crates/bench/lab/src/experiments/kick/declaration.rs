//! `kick`: the question, the published figures, the variants, and how each figure is measured.

use blk_driver::KickPolicy;

use super::loads::{JOB_BYTES, JOBS, Load, NOTIFY_US, THREADS, Way, contending_threads, loads, process_id};
use crate::experiment::{
    Axis, Column, Curves, Declaration, Difference, Effort, Plot, Published, PublishedColumn, PublishedRow,
    RatioForm, Scale, Source, Target, Variant, Yardstick,
};

/// The lock around the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lock {
    Ticket,
    Native,
    Fair,
    Hybrid,
    Std,
    ParkingLot,
}

impl Lock {
    /// Whether waiters keep their core. Such a lock is not measured with more threads than cores.
    fn only_spins(self) -> bool {
        matches!(self, Self::Ticket | Self::Native)
    }
}

/// The variants, indexed as in the declaration. Each unlocked variant follows the locked one that it is compared with.
pub(crate) const VARIANTS: [(&str, &str, Lock, KickPolicy); 12] = [
    ("ticket-locked", "ticket, locked", Lock::Ticket, KickPolicy::Locked),
    ("ticket-unlocked", "ticket, unlocked", Lock::Ticket, KickPolicy::Unlocked),
    ("native-locked", "queued native, locked", Lock::Native, KickPolicy::Locked),
    ("native-unlocked", "queued native, unlocked", Lock::Native, KickPolicy::Unlocked),
    ("fair-locked", "queued fair, locked", Lock::Fair, KickPolicy::Locked),
    ("fair-unlocked", "queued fair, unlocked", Lock::Fair, KickPolicy::Unlocked),
    ("hybrid-locked", "queued hybrid, locked", Lock::Hybrid, KickPolicy::Locked),
    ("hybrid-unlocked", "queued hybrid, unlocked", Lock::Hybrid, KickPolicy::Unlocked),
    ("std-locked", "std, locked", Lock::Std, KickPolicy::Locked),
    ("std-unlocked", "std, unlocked", Lock::Std, KickPolicy::Unlocked),
    ("parking_lot-locked", "parking_lot, locked", Lock::ParkingLot, KickPolicy::Locked),
    ("parking_lot-unlocked", "parking_lot, unlocked", Lock::ParkingLot, KickPolicy::Unlocked),
];
/// The variants that should gain from the policy.
const UNLOCKED: [&str; 6] = [
    "ticket-unlocked",
    "native-unlocked",
    "fair-unlocked",
    "hybrid-unlocked",
    "std-unlocked",
    "parking_lot-unlocked",
];
/// Smaller differences are noise: the medians of two runs of the same program differ by this much.
const NOISE: f64 = 0.02;

/// Returns the declaration for a machine with `cores` cores.
pub(crate) fn declaration(cores: usize) -> Declaration {
    let loads = loads(cores);
    Declaration {
        name: "kick".into(),
        question: "How much is gained by notifying the device without holding the queue's lock?".into(),
        source: Source {
            title: "virtio_blk: unlock vblk->lock during kick (Linux)".into(),
            year: 2012,
            setup: "1: 40-core host, 20 virtual CPUs, 12 block devices, 8 KB random 50/50. 2: 4 virtual CPUs, 4 devices, \
                    1 KB reads, data in the host's cache. 3: fio with group_reporting norandommap ioscheduler=noop thread \
                    bs=512 size=4MB direct=1 numjobs=256 ioengine=aio iodepth=64 loops=3"
                .into(),
        },
        published: published(),
        differences: differences(),
        variants: variants(&loads, cores),
        workloads: loads.iter().map(|load| load.workload.clone()).collect(),
        columns: columns(),
        baseline: "ticket-locked".into(),
        compared: "iops".into(),
        ratio_title: "gain over locked".into(),
        ratio_form: RatioForm::Gain,
        plots: vec![Plot::new("iops", "IOPS", Some("iops"), Scale::Linear)],
        curves: curves(),
        stacks: Vec::new(),
        maps: Vec::new(),
        courses: Vec::new(),
        targets: targets(&loads, cores),
        full: Effort { rounds: 10, seconds: 0.2, file_bytes: JOB_BYTES },
        quick: Effort { rounds: 1, seconds: 0.02, file_bytes: JOB_BYTES },
    }
}

fn variants(loads: &[Load], cores: usize) -> Vec<Variant> {
    let calm = loads.iter().filter(|load| !load.is_crowded(cores));
    let calm: Vec<_> = calm.map(|load| load.workload.id.as_str()).collect();
    let variant = |place: usize| {
        let (id, label, lock, policy) = VARIANTS[place];
        let mut variant = Variant::new(id, label);
        if policy == KickPolicy::Unlocked {
            variant = variant.against(VARIANTS[place - 1].0);
        }
        if lock.only_spins() { variant.only(&calm) } else { variant }
    };
    (0..VARIANTS.len()).map(variant).collect()
}

fn published() -> Published {
    let column = PublishedColumn::new;
    let row = PublishedRow::new;
    Published {
        caption: "IOPS, with and without the lock held during the notification".into(),
        columns: vec![
            column("12 devices, plain QEMU", "disks-12", "iops"),
            column("12 devices, data-plane QEMU", "disks-12", "iops"),
            column("4 devices, 1 KB reads", "disks-4", "iops"),
            column("256 jobs, write", "vcpus-write", "iops"),
        ],
        rows: vec![
            row("locked kick", "ticket-locked", &["44529", "497943", "140533", "217187"]),
            row("unlocked kick", "ticket-unlocked", &["44869", "532446", "143415", "227560"]),
            row("not published: a queued lock, locked", "native-locked", &[]),
            row("not published: a queued lock, unlocked", "native-unlocked", &[]),
            row("not published: a queued lock that sleeps, fair, locked", "fair-locked", &[]),
            row("not published: a queued lock that sleeps, fair, unlocked", "fair-unlocked", &[]),
            row("not published: a queued lock that sleeps, hybrid, locked", "hybrid-locked", &[]),
            row("not published: a queued lock that sleeps, hybrid, unlocked", "hybrid-unlocked", &[]),
            row("not published: a lock that sleeps, locked", "std-locked", &[]),
            row("not published: a lock that sleeps, unlocked", "std-unlocked", &[]),
            row("not published: parking_lot, locked", "parking_lot-locked", &[]),
            row("not published: parking_lot, unlocked", "parking_lot-unlocked", &[]),
        ],
        conclusion: "Gains of 0.7 %, 6.9 %, 2.1 % and 4.8 %; read, random read and random write of the 256 \
                     jobs changed by less than 2 %. The gain grows with the IOPS and the number of virtual CPUs."
            .into(),
    }
}

fn differences() -> Vec<Difference> {
    let difference = Difference::new;
    vec![
        difference(
            "the guest's driver; a notification leaves the guest",
            "the driver library; a notification writes an eventfd (sockets), or spins for a given time and \
             does the device's work before it returns (in process)",
            "the gain depends on the cost of a notification, so the runs vary that cost; decision 0019 \
             explains the model",
        ),
        difference(
            "a ticket spinlock of a kernel, whose holder is never preempted",
            "a ticket lock, this project's queued locks, std's and parking_lot's mutexes, in threads that \
             can be preempted",
            "a library does not choose its user's lock; a lock that only spins is not measured with more \
             threads than cores, because its holder would be off the processor most of the time",
        ),
        difference(
            "256 jobs of depth 64 on one queue: most of the 16,384 requests wait outside the queue",
            "the same jobs, on one queue of 1024: once with a thread per job, and once with all jobs on one thread per \
             core, as a guest's kernel runs them on its virtual CPUs",
            "the first form is the job as written, the second has the contention that the job was meant to \
             show",
        ),
        difference(
            "each job reads or writes 4 MB three times, after dropping caches",
            "samples of a fraction of a second, all data in the page cache; the run time is the time that \
             the whole job would take at that rate",
            "the device must not be the bottleneck, because the question is about the driver",
        ),
        difference(
            "QEMU's loop, or its data plane",
            "this project's server with one worker that does not poll",
            "a server that polls (the default elsewhere) requests almost no notifications, so there would be \
             nothing to compare",
        ),
        difference(
            "12 devices of disks and 20 virtual CPUs",
            "12 files of 4 MiB behind one worker, a job of depth 32 per core and device",
            "every device has its own queue and lock, so few threads contend for each lock",
        ),
        difference(
            "the columns of fio",
            "the same columns, and kicks per I/O, the time that the lock was held, and the time that threads \
             waited for it",
            "these columns explain the gain, or its absence",
        ),
    ]
}

fn columns() -> Vec<Column> {
    let column = Column::new;
    let in_files = Column::in_files;
    vec![
        column("iops", "IOPS", "1/s", 0, "Requests completed in the counted time, all threads together."),
        in_files(column(
            "bandwidth",
            "bandwidth",
            "MB/s",
            1,
            "Bytes of the requests completed in the counted time, in units of 10^6.",
        )),
        in_files(column(
            "runtime",
            "run time",
            "s",
            2,
            &format!("The time that the whole published job ({JOBS} × 4 MB × 3) takes at this rate."),
        )),
        in_files(column("clat-max", "clat max", "µs", 0, CLAT)),
        column("clat-avg", "clat avg", "µs", 1, CLAT),
        in_files(column("clat-stdev", "clat stdev", "µs", 1, CLAT)),
        in_files(column("clat-min", "clat min", "µs", 1, CLAT)),
        column("cpu-sys", "cpu sys", "%", 0, CPU),
        column("cpu-usr", "cpu usr", "%", 0, CPU),
        in_files(column(
            "switches",
            "context switches",
            "",
            0,
            "Of the driver's threads in the counted time.",
        )),
        in_files(column("majf", "major faults", "", 0, "Of the driver's threads in the counted time.")),
        in_files(column("minf", "minor faults", "", 0, "Of the driver's threads in the counted time.")),
        column(
            "kicks",
            "kicks per I/O",
            "",
            3,
            "Notifications that the device requested, per submitted request.",
        ),
        column("held", "lock held", "ns/IO", 0, LOCK),
        column("waited", "waited for lock", "ns/IO", 0, LOCK),
    ]
}

const CLAT: &str = "Time from just before a request is submitted until a thread finds it completed (fio's clat begins \
                    after the submission, so it is shorter).";
const CPU: &str = "Of the driver's threads (getrusage), in % of their run time, as in fio; excludes a server's \
                   threads.";
const LOCK: &str = "Over all threads, per request completed: submissions and completions take the lock. One \
                    acquisition in 17 is timed, which adds about 5 ns per acquisition and 1.5 ns to the time that the \
                    lock is held. The measured wait for a free lock is one clock reading, about 25 ns.";

fn curves() -> Vec<Curves> {
    let axis = |key: &str, title: &str| Axis { key: key.into(), title: title.into() };
    let cost = || axis(NOTIFY_US, "cost of a notification, µs");
    let threads = || axis(THREADS, "threads");
    let panels: Vec<String> = UNLOCKED.map(str::to_owned).into();
    vec![
        Curves {
            id: "gain-by-cost".into(),
            title: "Gain of unlocked over locked kicks, by the cost of a notification (in process)".into(),
            across: cost(),
            lines: threads(),
            panels: panels.clone(),
        },
        Curves {
            id: "gain-by-threads".into(),
            title: "Gain of unlocked over locked kicks, by the number of threads (in process)".into(),
            across: threads(),
            lines: cost(),
            panels,
        },
    ]
}

fn targets(loads: &[Load], cores: usize) -> Vec<Target> {
    let threads = contending_threads(cores);
    let ids = |wanted: &dyn Fn(&&Load) -> bool| -> Vec<String> {
        loads.iter().filter(wanted).map(|load| load.workload.id.clone()).collect()
    };
    let in_process = |load: &&Load| matches!(load.way, Way::Process { .. }) && !load.is_crowded(cores);
    let target = |text: String, workloads, at_least, half_width_max| Target {
        text,
        variants: UNLOCKED.map(str::to_owned).into(),
        workloads,
        at_least,
        half_width_max,
        yardstick: Yardstick::Baseline,
    };
    vec![
        target(
            format!(
                "notifying unlocked gives 1.3 times the IOPS at 2 µs per notification and {threads} threads"
            ),
            vec![process_id(2, threads)],
            1.3,
            0.10,
        ),
        target(
            format!("in process, notifying unlocked costs at most {:.0} % of the IOPS", 100.0 * NOISE),
            ids(&in_process),
            1.0 - NOISE,
            0.25,
        ),
        target(
            format!("over sockets, notifying unlocked costs at most {:.0} % of the IOPS", 100.0 * NOISE),
            ids(&|load| matches!(load.way, Way::Socket { .. }) && !load.is_crowded(cores)),
            1.0 - NOISE,
            0.25,
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_unlocked_variant_is_compared_with_the_locked_one_of_the_same_lock() {
        let declaration = declaration(2);
        for (place, (id, _, lock, policy)) in VARIANTS.into_iter().enumerate() {
            let against = declaration.baseline_of(id);
            let expected = (policy == KickPolicy::Unlocked).then(|| VARIANTS[place - 1].0);
            assert_eq!(against, expected, "{id}");
            assert!(against.is_none() || VARIANTS[place - 1].2 == lock);
        }
    }

    #[test]
    fn lock_that_only_spins_has_no_load_with_more_threads_than_cores() {
        let declaration = declaration(2);
        let native = declaration.variants.iter().find(|variant| variant.id == "native-locked").unwrap();
        assert_eq!(native.only, declaration.variants[0].only);
        let ticket = &declaration.variants[0];
        assert!(ticket.only.contains(&"process-2us-2t".to_owned()), "{ticket:?}");
        let crowded = |id: &String| id == "process-2us-4t" || id.starts_with("jobs-");
        assert!(!ticket.only.iter().any(crowded), "{ticket:?}");
    }

    #[test]
    fn target_is_at_two_microseconds_and_all_cores_of_a_small_machine() {
        assert_eq!(declaration(2).targets[0].workloads, ["process-2us-2t"]);
        assert_eq!(declaration(40).targets[0].workloads, ["process-2us-8t"]);
    }
}
