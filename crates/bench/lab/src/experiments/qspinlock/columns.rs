//! The columns that all contests over one lock share.

use crate::experiment::{Column, Reading};
use crate::load::locks::contest::Found;

/// The columns, in the order of [`reading`]. A terminal shows the first column and those in `shown`.
pub(crate) fn columns(shown: &[&str]) -> Vec<Column> {
    let column = |id: &str, title, unit, decimals, measured| {
        let files_only = id != RATE && !shown.contains(&id);
        Column { files_only, ..Column::new(id, title, unit, decimals, measured) }
    };
    vec![
        column(RATE, "acquired", "k/s", 1, "Acquisitions of all threads per second of the counted time."),
        column(
            DICE,
            "Dice",
            "",
            3,
            "Share of the acquisitions made by the more successful half of the threads: 0.5 is fair, 1 is unfair.",
        ),
        column(WAIT, "wait p99.9", "µs", 1, WAITS),
        column(
            LONGEST,
            "longest wait",
            "ms",
            2,
            "Waiting time of the timed acquisitions, including waits that had not ended when the sample \
             ended.",
        ),
        column(BUSY, "cores busy", "", 2, "Processor time of the process per second."),
        column(
            VOLUNTARY,
            "slept",
            "/1000",
            1,
            "Voluntary context switches of the process (getrusage) per thousand acquisitions.",
        ),
        column(
            INVOLUNTARY,
            "preempted",
            "/1000",
            1,
            "Involuntary context switches per thousand acquisitions.",
        ),
        column(
            HALTS,
            "halts",
            "/1000",
            1,
            "Sleeps begun in the queued locks' slow path, per thousand acquisitions.",
        ),
        column(KICKS, "kicks", "/1000", 1, "Wakes sent per thousand acquisitions."),
        column(KICKS_PER_HALT, "kicks per halt", "", 3, "Wakes sent per sleep begun."),
        column(
            SPURIOUS,
            "spurious",
            "%",
            2,
            "Share of the sleeps begun from which the waiter was woken for no reason.",
        ),
    ]
}

pub(crate) const RATE: &str = "rate";
pub(crate) const DICE: &str = "dice";
pub(crate) const WAIT: &str = "wait";
pub(crate) const LONGEST: &str = "longest";
pub(crate) const BUSY: &str = "busy";
pub(crate) const VOLUNTARY: &str = "voluntary";
pub(crate) const INVOLUNTARY: &str = "involuntary";
pub(crate) const HALTS: &str = "halts";
pub(crate) const KICKS: &str = "kicks";
pub(crate) const KICKS_PER_HALT: &str = "kicks-per-halt";
pub(crate) const SPURIOUS: &str = "spurious";

const WAITS: &str = "Time from the attempt until the acquisition. A thread times one acquisition in n, where n is a \
                     250th of its acquisitions during the settling time, at most 64. Each timed wait counts n \
                     times. Its two clock readings cost about 50 ns, half of that with the lock held.";

/// Below this number of sleeps, ratios to the number of sleeps are meaningless.
const FEW_HALTS: u64 = 20;

/// The figures, in the order of the columns. `is_counted` is whether the lock's events are counted.
#[allow(clippy::cast_precision_loss)] // counts of one sample
pub(crate) fn reading(found: &Found, is_counted: bool) -> Reading {
    let events = is_counted.then_some(found.events);
    let per_halt = |count: u64| {
        let halts = events.map(|events| events.halts).filter(|&halts| halts >= FEW_HALTS)?;
        Some(count as f64 / halts as f64)
    };
    vec![
        Some(found.per_second() / 1e3),
        crate::load::locks::fairness::upper_half(&found.counts),
        found.wait_us(0.999),
        (found.longest_ns > 0).then(|| found.longest_ns as f64 / 1e6),
        found.busy_cores(),
        found.per_thousand(found.usage.voluntary_switches),
        found.per_thousand(found.usage.involuntary_switches),
        events.and_then(|events| found.per_thousand(events.halts)),
        events.and_then(|events| found.per_thousand(events.kicks)),
        events.and_then(|events| per_halt(events.kicks)),
        events.and_then(|events| per_halt(events.spurious)).map(|share| 100.0 * share),
    ]
}
