//! Merges all threads' tables into one profile, which a program reads and prints.
//!
//! - Counts are read while threads count: each count is whole, but two counts of one line may be a moment apart.
//! - A reader writes nothing in the threads' tables. A reset only stores the counts so far.
//!
//! See also: the counting (`table.rs`).

use core::fmt;
use core::time::Duration;
use std::collections::BTreeMap;
use std::string::String;
use std::sync::{Mutex, PoisonError};
use std::vec::Vec;
use std::{format, vec};

use super::mode::{Mode, mode};
use super::table::{self, KINDS, Row};
use crate::{Event, LockTimes};

/// How often each event happened in slow paths.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EventCounts {
    /// Acquired after spinning on the lock itself, without joining the queue ("pending").
    pub spun: u64,
    /// Joined the queue ("slow path").
    pub queued: u64,
    /// Took the lock ahead of a queue ("steal").
    pub stole: u64,
    /// Went to sleep ("halt").
    pub halted: u64,
    /// As heir, slept briefly so that newcomers could pass ("nap": woken by a timer, not by a thread).
    pub napped: u64,
    /// Woke a sleeping waiter ("kick").
    pub kicked: u64,
    /// Was woken for no reason, and went back to sleep.
    pub woken_for_nothing: u64,
    /// Timed out.
    pub timed_out: u64,
    /// Had no node of its own to wait on.
    pub no_node: u64,
}

impl EventCounts {
    fn of(row: &Row) -> Self {
        let count = |event| row.events.get(event as usize).map_or(0, |counter| counter.get());
        Self {
            spun: count(Event::Spun),
            queued: count(Event::Queued),
            stole: count(Event::Stole),
            halted: count(Event::Halted),
            napped: count(Event::Napped),
            kicked: count(Event::Kicked),
            woken_for_nothing: count(Event::WokenForNothing),
            timed_out: count(Event::TimedOut),
            no_node: count(Event::NoNode),
        }
    }

    fn fields(&mut self) -> [&mut u64; KINDS] {
        [
            &mut self.spun,
            &mut self.queued,
            &mut self.stole,
            &mut self.halted,
            &mut self.napped,
            &mut self.kicked,
            &mut self.woken_for_nothing,
            &mut self.timed_out,
            &mut self.no_node,
        ]
    }

    fn combined(mut self, mut other: Self, with: impl Fn(u64, u64) -> u64) -> Self {
        for (ours, theirs) in self.fields().into_iter().zip(other.fields()) {
            *ours = with(*ours, *theirs);
        }
        self
    }

    /// The sum of both.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        self.combined(other, u64::saturating_add)
    }

    /// The difference from `earlier`.
    #[must_use]
    pub fn since(self, earlier: Self) -> Self {
        self.combined(earlier, u64::saturating_sub)
    }
}

/// The counts of one line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SiteCounts {
    /// The source file; empty for the sum of all lines that had no row.
    pub file: &'static str,
    /// 0 for the sum of all lines that had no row.
    pub line: u32,
    /// Acquisitions, and the times of those that were timed.
    pub times: LockTimes,
    /// Attempts that did not get the lock on the first try and waited: acquisitions and timeouts.
    pub contended: u64,
    /// Calls of `try_lock` that failed.
    pub refused: u64,
    /// Events in slow paths of these acquisitions and their releases.
    pub events: EventCounts,
}

impl SiteCounts {
    fn of(row: &Row) -> Self {
        let (file, line) = row.site().map_or(("", 0), |site| (site.file(), site.line()));
        let times = LockTimes {
            acquired: row.acquired.get(),
            timed: row.timed.get(),
            waited: Duration::from_nanos(row.waited_ns.get()),
            held: Duration::from_nanos(row.held_ns.get()),
        };
        let (contended, refused) = (row.contended.get(), row.refused.get());
        Self { file, line, times, contended, refused, events: EventCounts::of(row) }
    }

    fn add(&mut self, other: &Self) {
        self.times = self.times.and(other.times);
        self.contended += other.contended;
        self.refused += other.refused;
        self.events = self.events.and(other.events);
    }

    fn since(mut self, earlier: &Self) -> Self {
        self.times = self.times.since(earlier.times);
        self.contended = self.contended.saturating_sub(earlier.contended);
        self.refused = self.refused.saturating_sub(earlier.refused);
        self.events = self.events.since(earlier.events);
        self
    }

    fn is_empty(&self) -> bool {
        let Self { file, line, .. } = *self;
        *self == Self { file, line, ..Self::default() }
    }

    /// Contended attempts among all that ended, in percent.
    #[must_use]
    pub fn contended_percent(&self) -> f64 {
        percent(self.contended, self.times.acquired + self.events.timed_out)
    }
}

/// Everything counted by all threads, including ended ones, since the last [`reset`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Profile {
    /// The mode at the time of reading.
    pub mode: Mode,
    /// One entry per line, greatest share of the contention first.
    pub sites: Vec<SiteCounts>,
    /// The sum of all lines beyond the [`SITES`](super::SITES) of a thread.
    pub other: SiteCounts,
    /// Events outside of any [`Profiled`](super::Profiled) operation.
    pub unattributed: EventCounts,
    /// How many threads so far had to share one table: if any did, some counts are too low.
    pub crowded_threads: usize,
}

impl Profile {
    /// `site`'s share of all waiting for locks, in percent: of the time if times were recorded, otherwise of
    /// the contended attempts.
    #[must_use]
    pub fn share_percent(&self, site: &SiteCounts) -> f64 {
        match self.all().map(|site| site.times.waited_ns()).sum::<f64>() {
            all if all > 0.0 => 100.0 * site.times.waited_ns() / all,
            _ => percent(site.contended, self.all().map(|site| site.contended).sum()),
        }
    }

    fn all(&self) -> impl Iterator<Item = &SiteCounts> {
        self.sites.iter().chain(core::iter::once(&self.other))
    }
}

#[allow(clippy::cast_precision_loss)] // counts for people to read
fn percent(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { 100.0 * part as f64 / whole as f64 }
}

/// Keyed by file and line: one line has several locations if it is generic, inlined, or takes several locks.
#[derive(Debug)]
struct Merged {
    sites: BTreeMap<(&'static str, u32), SiteCounts>,
    unattributed: EventCounts,
}

impl Merged {
    const NOTHING: Self = Self {
        sites: BTreeMap::new(),
        unattributed: EventCounts {
            spun: 0,
            queued: 0,
            stole: 0,
            halted: 0,
            napped: 0,
            kicked: 0,
            woken_for_nothing: 0,
            timed_out: 0,
            no_node: 0,
        },
    };

    fn read() -> Self {
        let mut merged = Self::NOTHING;
        for table in table::used() {
            let rows = table.rows.iter().filter(|row| row.site().is_some());
            rows.chain([&table.other]).map(SiteCounts::of).for_each(|counts| merged.add(&counts));
            merged.unattributed = merged.unattributed.and(EventCounts::of(&table.unattributed));
        }
        merged
    }

    fn add(&mut self, counts: &SiteCounts) {
        let SiteCounts { file, line, .. } = *counts;
        let empty = SiteCounts { file, line, ..SiteCounts::default() };
        self.sites.entry((file, line)).or_insert(empty).add(counts);
    }

    fn since(mut self, earlier: &Self) -> Self {
        for (site, counts) in &mut self.sites {
            if let Some(earlier) = earlier.sites.get(site) {
                *counts = counts.since(earlier);
            }
        }
        self.sites.retain(|_, counts| !counts.is_empty());
        self.unattributed = self.unattributed.since(earlier.unattributed);
        self
    }
}

/// The counts at the last reset.
static BASELINE: Mutex<Merged> = Mutex::new(Merged::NOTHING);

fn read_since_reset() -> Merged {
    Merged::read().since(&BASELINE.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Everything counted since the last [`reset`]. Allocates; not for signal handlers.
#[must_use]
pub fn snapshot() -> Profile {
    let Merged { mut sites, unattributed } = read_since_reset();
    let other = sites.remove(&("", 0)).unwrap_or_default();
    let sites: Vec<_> = sites.into_values().collect();
    let mut profile = Profile { mode: mode(), sites, other, unattributed, crowded_threads: table::crowded() };
    let mut ranked = core::mem::take(&mut profile.sites);
    let key = |site: &SiteCounts| (site.times.waited_ns(), site.contended, site.times.acquired);
    ranked.sort_by(|a, b| key(b).partial_cmp(&key(a)).unwrap_or(core::cmp::Ordering::Equal));
    profile.sites = ranked;
    profile
}

/// Events of all threads since the last [`reset`], with or without a line.
#[must_use]
pub fn totals() -> EventCounts {
    let merged = read_since_reset();
    merged.sites.values().fold(merged.unattributed, |sum, site| sum.and(site.events))
}

/// Restarts all counts from zero, without disturbing threads.
pub fn reset() {
    *BASELINE.lock().unwrap_or_else(PoisonError::into_inner) = Merged::read();
}

const HEAD: [&str; 15] = [
    "share %",
    "acquisitions",
    "contended %",
    "spun",
    "queued",
    "steals",
    "halts",
    "naps",
    "kicks",
    "spurious",
    "timeouts",
    "waited µs",
    "total ms",
    "held µs",
    "site",
];

/// A table: one line per site, the greatest share of the waiting first.
impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rows = vec![HEAD.map(String::from)];
        rows.extend(self.all().filter(|site| !site.is_empty()).map(|site| self.cells(site)));
        if self.unattributed != EventCounts::default() {
            let nowhere = SiteCounts { events: self.unattributed, ..SiteCounts::default() };
            let mut cells = self.cells(&nowhere);
            cells[HEAD.len() - 1] = String::from("(locks without a profile)");
            rows.push(cells);
        }
        write_table(f, &rows)?;
        match self.crowded_threads {
            0 => Ok(()),
            n => writeln!(f, "{n} threads shared one table, so some counts are too low"),
        }
    }
}

impl Profile {
    fn cells(&self, site: &SiteCounts) -> [String; HEAD.len()] {
        let SiteCounts { times, events, .. } = site;
        let name = if site.line == 0 {
            String::from("(other sites)")
        } else {
            format!("{}:{}", site.file, site.line)
        };
        let timed = |text: String| if times.timed == 0 { String::from("-") } else { text };
        [
            format!("{:.1}", self.share_percent(site)),
            format!("{}", times.acquired),
            format!("{:.2}", site.contended_percent()),
            format!("{}", events.spun),
            format!("{}", events.queued),
            format!("{}", events.stole),
            format!("{}", events.halted),
            format!("{}", events.napped),
            format!("{}", events.kicked),
            format!("{}", events.woken_for_nothing),
            format!("{}", events.timed_out),
            timed(format!("{:.2}", mean_us(times.waited, times.timed))),
            timed(format!("{:.1}", times.waited_ns() / 1e6)),
            timed(format!("{:.2}", mean_us(times.held, times.timed))),
            name,
        ]
    }
}

#[allow(clippy::cast_precision_loss)] // a figure for people to read
fn mean_us(sum: Duration, of: u64) -> f64 {
    sum.as_secs_f64() * 1e6 / of.max(1) as f64
}

/// Aligns numbers to the right, and the last column to the left.
fn write_table(f: &mut fmt::Formatter<'_>, rows: &[[String; HEAD.len()]]) -> fmt::Result {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; HEAD.len()] = core::array::from_fn(width);
    for row in rows {
        let (site, numbers) = row.split_last().unwrap_or((&row[0], &[]));
        for (cell, width) in numbers.iter().zip(widths) {
            write!(f, "{cell:>width$}  ")?;
        }
        writeln!(f, "{site}")?;
    }
    Ok(())
}
