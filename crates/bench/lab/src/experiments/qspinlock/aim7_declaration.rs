//! `qspinlock-aim7`: the question, the published figures, the variants, and how each figure is measured.

use crate::experiment::{
    Axis, Column, Courses, Declaration, Difference, Effort, Plot, Published, PublishedColumn, PublishedRow,
    RatioForm, Scale, Source, Stack, Target, Variant, Workload, Yardstick, owned,
};
use crate::load::users::Carried;

/// The family of locks that a run uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Ticket,
    Native,
    Fair,
    Hybrid,
    Std,
    ParkingLot,
}

/// The variants, indexed as in the declaration.
pub(crate) const VARIANTS: [(&str, &str, Kind); 6] = [
    ("ticket", "ticket", Kind::Ticket),
    ("native", "queued, native (only spins)", Kind::Native),
    ("fair", "queued, fair", Kind::Fair),
    ("hybrid", "queued, hybrid", Kind::Hybrid),
    ("std", "std", Kind::Std),
    ("parking_lot", "parking_lot", Kind::ParkingLot),
];

/// The number of users and the threads that run them, for each workload of the declaration.
pub(crate) const WORKLOADS: [(usize, Carried); 8] = [
    (500, Carried::ByCores),
    (1000, Carried::ByCores),
    (1500, Carried::ByCores),
    (2000, Carried::ByCores),
    (500, Carried::ByThreads),
    (1000, Carried::ByThreads),
    (1500, Carried::ByThreads),
    (2000, Carried::ByThreads),
];

/// Jobs of each user, as published: jobs per minute times minutes, divided by users.
pub(crate) const JOBS_PER_USER: u32 = 104;
/// Deadline of a full sample.
pub(crate) const FULL_S: f64 = 2.0;

/// Id and name of each caller, indexed like `meter::CALLERS`.
const CALLERS: [(&str, &str); 5] = [
    ("lru", "page list"),
    ("zone", "free list"),
    ("rq", "run queue"),
    ("rwsem", "semaphore's lock"),
    ("tasks", "process table"),
];

fn id((users, carried): (usize, Carried)) -> String {
    let prefix = if carried == Carried::ByCores { "cores" } else { "threads" };
    format!("{prefix}-{users}")
}

pub(crate) fn declaration() -> Declaration {
    Declaration {
        name: "qspinlock-aim7".into(),
        question:
            "How much do many users with short jobs gain if the locks that they share are queued locks?"
                .into(),
        source: Source {
            title: "qspinlock: a 4-byte queue spinlock with PV support (Linux)".into(),
            year: 2014,
            setup: "AIM7 high_systime (many fork and exit), 4 sockets, 60 cores, 120 threads, bare metal"
                .into(),
        },
        published: published(),
        differences: differences(),
        variants: variants(),
        workloads: WORKLOADS.map(workload).into(),
        columns: columns(),
        baseline: "ticket".into(),
        compared: "jobs".into(),
        ratio_title: "change from ticket".into(),
        ratio_form: RatioForm::Gain,
        plots: vec![Plot::new("jobs", "Jobs per minute", Some("jobs"), Scale::Linear)],
        curves: Vec::new(),
        courses: courses(),
        maps: Vec::new(),
        stacks: vec![Stack {
            id: "callers".into(),
            title: "Processor time spent acquiring locks, by caller".into(),
            axis: "% of the processor time".into(),
            columns: CALLERS.map(|(id, _)| format!("cpu-{id}")).into(),
        }],
        targets: targets(),
        full: Effort { rounds: 9, seconds: FULL_S, file_bytes: 0 },
        quick: Effort { rounds: 1, seconds: 0.2, file_bytes: 0 },
    }
}

fn workload((users, carried): (usize, Carried)) -> Workload {
    let words = match carried {
        Carried::ByCores => "run by one thread per core",
        Carried::ByThreads => "a thread each",
    };
    #[allow(clippy::cast_precision_loss)] // a number of users
    Workload::new(&id((users, carried)), &format!("{users} users, {words}")).at(axis(carried), users as f64)
}

/// Key of the axis for the number of users.
fn axis(carried: Carried) -> &'static str {
    if carried == Carried::ByCores { "users-on-cores" } else { "users-with-threads" }
}

fn courses() -> Vec<Courses> {
    let course = |id: &str, title: &str, carried| Courses {
        id: id.into(),
        title: title.into(),
        across: Axis { key: axis(carried).into(), title: "users".into() },
        column: "jobs".into(),
        scale: if carried == Carried::ByCores { Scale::Linear } else { Scale::Log },
        variants: VARIANTS.map(|(id, ..)| id.to_owned()).into(),
    };
    vec![
        course("jobs-on-cores", "Jobs per minute, one thread per core runs the users", Carried::ByCores),
        course("jobs-with-threads", "Jobs per minute, a thread for each user", Carried::ByThreads),
    ]
}

/// With hundreds of threads on few cores, a queue lock that only spins does not finish, so it is omitted there.
fn variants() -> Vec<Variant> {
    let carried = WORKLOADS.into_iter().filter(|&(_, carried)| carried == Carried::ByCores).map(id);
    let carried: Vec<_> = carried.collect();
    let carried: Vec<_> = carried.iter().map(String::as_str).collect();
    let variant = |(id, label, kind): (&str, &str, Kind)| {
        let variant = Variant::new(id, label);
        if kind == Kind::Native { variant.only(&carried) } else { variant }
    };
    VARIANTS.into_iter().map(variant).collect()
}

fn published() -> Published {
    let column = |users: usize, unit: &str, column: &str| {
        PublishedColumn::new(&format!("{users} users, {unit}"), &id((users, Carried::ByCores)), column)
    };
    let row = PublishedRow::new;
    let both = |users| [column(users, "jobs/min", "jobs"), column(users, "s", "time")];
    let ticket = ["118857", "26.25", "204255", "30.55", "177273", "52.80", "196690", "63.45"];
    let queued = ["134890", "23.13", "239631", "26.04", "326132", "28.70", "341731", "36.52"];
    Published {
        caption: "Jobs per minute and execution time".into(),
        columns: [500, 1000, 1500, 2000].into_iter().flat_map(both).collect(),
        rows: vec![
            row("ticket", "ticket", &ticket),
            row("queued", "native", &queued),
            row("not published: waiters sleep, fair", "fair", &[]),
            row("not published: waiters sleep, hybrid", "hybrid", &[]),
            row("not published: std", "std", &[]),
            row("not published: parking_lot", "parking_lot", &[]),
        ],
        conclusion: "+13.5, +17.3, +84.0 and +73.7 %; with a power-saving governor +17.7, +40.4, +148.6 and +94.1 %. \
                     Processor time in lock contention: 23 to 29 % with the ticket lock; 2.3 % and 4 to 5 % in the slow \
                     path with the queued one. The ticket lock's result swings from run to run, the queued one's does \
                     not."
            .into(),
    }
}

fn differences() -> Vec<Difference> {
    let difference = Difference::new;
    vec![
        difference(
            "a kernel's own locks, under users' system calls",
            "a model in user space: jobs imitate fork, page faults, process look-ups and exit, on a page \
             list, a free list, run queues, semaphores and a process table",
            "a library's locks cannot be put into a kernel; the callers are those of the published profile",
        ),
        difference(
            "a kernel does not preempt a thread that holds or waits for a spinlock, at any number of users",
            "twice: with one thread per core that runs all users, like a kernel, and compared with the \
             published figures; and with a thread for each user, which the scheduler may preempt at any \
             point",
            "the second load is that of a program with many threads",
        ),
        difference(
            "60 cores on 4 sockets",
            "the cores of this machine, one socket's",
            "if few threads contend for a lock, there is little to gain: the published gain grows with the \
             users",
        ),
        difference(
            "every user does 104 jobs, without a time limit",
            "the same jobs, with a deadline; if it stops them, the rate counts the completed steps of jobs, and the \
             execution time is what all jobs would take at that rate (see \"done\")",
            "a ticket lock with more waiters than cores changes hands only about once per time slice",
        ),
        difference(
            "one ticket lock",
            "with a thread per user, the `spin` crate's ticket lock, whose waiters spin until the deadline and then \
             yield their cores; with a thread per core, this crate's",
            "hundreds of threads that only spin would need minutes to notice the end",
        ),
        difference(
            "the process table is behind an unfair reader-writer spinlock, the same in both kernels",
            "with the ticket lock, a ticket lock for readers and writers; with queued locks, this crate's \
             reader-writer lock; std and parking_lot use their own",
            "each variant is to use one family of locks",
        ),
        difference(
            "share of lock contention by a sampling profiler",
            "processor time in acquisitions that did not find their lock free (one in 5 is timed); excludes the fast \
             path",
            "contention occurs on the slow path; callers are distinguished by where they take the lock",
        ),
    ]
}

fn columns() -> Vec<Column> {
    let column = Column::new;
    let in_files = Column::in_files;
    let jobs = "Completed steps of all users' jobs, converted to jobs, divided by the time from the common start until \
                the last user ends or the deadline passes.";
    let time =
        "The time for all jobs; if the deadline stopped them, the time that they would take at that rate.";
    let mut columns = vec![
        column("jobs", "jobs", "1/min", 0, jobs),
        column("time", "execution time", "s", 2, time),
        column("done", "done", "%", 1, "Share of all jobs completed by the deadline."),
        column("contention", "CPU in contention", "%", 2, CPU),
        column(
            "contended",
            "contended",
            "%",
            2,
            "Acquisitions that did not find their lock free: the slow path's share of all acquisitions.",
        ),
        column(
            "wait",
            "wait",
            "µs",
            1,
            "Mean of contended acquisitions, asleep or spinning (one in 5 is timed).",
        ),
        column(
            "switches",
            "context switches per job",
            "",
            2,
            "Voluntary and involuntary, of the users' threads.",
        ),
        column(
            "cpu",
            "CPU per job",
            "µs",
            1,
            "Of the process, from the users' start until their threads ended.",
        ),
    ];
    columns.extend(CALLERS.map(|(id, name)| {
        in_files(column(
            &format!("cpu-{id}"),
            name,
            "% CPU",
            2,
            "This caller's part of \"CPU in contention\".",
        ))
    }));
    columns.extend(CALLERS.map(|(id, name)| {
        let measured = "Share of this caller's acquisitions that did not find their lock free.";
        in_files(column(&format!("contended-{id}"), &format!("{name} contended"), "%", 2, measured))
    }));
    columns
}

const CPU: &str = "Processor time from the failed first attempt to the acquisition, in % of all processor \
                   time: spinning, queueing, falling asleep and waking; over all callers.";

fn targets() -> Vec<Target> {
    let target = |text: &str, variants: &[&str], carried, at_least, half_width_max| Target {
        text: text.into(),
        variants: owned(variants),
        workloads: WORKLOADS.into_iter().filter(|&(_, by)| by == carried).map(id).collect(),
        at_least,
        half_width_max,
        yardstick: Yardstick::Baseline,
    };
    vec![
        target(
            "with a thread per user, the locks that sleep gain at least the smallest of the published gains (13.5 %)",
            &["fair", "hybrid"],
            Carried::ByThreads,
            1.135,
            0.10,
        ),
        target(
            "with a thread per core, no loss of more than 2 % to the ticket lock exceeds the noise",
            &["native", "fair", "hybrid"],
            Carried::ByCores,
            0.98,
            0.10,
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::users::meter;

    #[test]
    fn lock_that_only_spins_in_a_queue_is_not_asked_for_more_threads_than_cores() {
        let declaration = declaration();
        let native = declaration.variants.iter().find(|variant| variant.id == "native").unwrap();
        assert_eq!(native.only, ["cores-500", "cores-1000", "cores-1500", "cores-2000"]);
    }

    #[test]
    fn every_caller_has_a_name() {
        assert_eq!(CALLERS.len(), meter::CALLERS.len());
        assert_eq!(meter::CALLERS[0], meter::Caller::PageList);
        assert_eq!(CALLERS[0].1, "page list");
    }

    #[test]
    fn published_figures_are_of_104_jobs_per_user() {
        for (users, jobs_per_minute, seconds) in [(500.0, 118_857.0, 26.25), (2000.0, 341_731.0, 36.52)] {
            let jobs: f64 = jobs_per_minute * seconds / 60.0 / users;
            assert!((jobs - f64::from(JOBS_PER_USER)).abs() < 0.1, "{jobs}");
        }
    }
}
