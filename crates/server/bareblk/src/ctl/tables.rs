//! Formats answers as tables for a terminal.
//!
//! Names come from files, so tables escape control characters.

use std::fmt::Write;

use blk_server::{CounterInfo, CounterUnit, QueueCounters, WorkerCounters, format_cpus};
use comfy_table::{CellAlignment, ContentArrangement, Table, presets};

use super::rates;
use crate::control::balance::{Balance, Decision};
use crate::control::placement::Placement;
use crate::control::protocol::WorkerSettings;
use crate::control::reports::{Disk, DiskStats, Queue, ReloadAnswer, StatsAnswer, Worker, WorkerStats};

/// A missing figure.
const NONE: &str = "–";
const PLACEMENT_HEADINGS: [&str; 8] =
    ["DISK", "PLACEMENT", "COMPLETION WORKER", "WANTED", "HAND-OVERS", "OPS", "PASSED ON", "MOVES"];
/// Number of the balancer's decisions in the table, the latest first.
const SHOWN_DECISIONS: usize = 8;

/// Left-aligns the columns before `first_figure`, right-aligns the others.
pub fn table(headings: &[&str], first_figure: usize, rows: impl Iterator<Item = Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(headings.iter().copied());
    rows.for_each(|row| _ = table.add_row(row));
    table
        .column_iter_mut()
        .skip(first_figure)
        .for_each(|column| column.set_cell_alignment(CellAlignment::Right));
    let lines = table.lines().map(|line| format!("{}\n", line.trim_end()));
    lines.collect()
}

pub fn disks(disks: &[Disk]) -> String {
    let row = |disk: &Disk| {
        vec![
            plain(&disk.name),
            plain(&disk.image),
            plain(&disk.socket),
            plain(&disk.engine),
            state(disk).into(),
            plain(&disk.on_error),
            size(disk.size_bytes),
            disk.sessions.to_string(),
            format!("{}/{}", disk.queues_running, disk.queues_offered),
        ]
    };
    let headings = ["DISK", "IMAGE", "SOCKET", "ENGINE", "STATE", "ON ERROR", "SIZE", "SESSIONS", "QUEUES"];
    table(&headings, 6, disks.iter().map(row))
}

fn state(disk: &Disk) -> &'static str {
    match (disk.failed, disk.held, disk.read_only) {
        (true, ..) => "failed",
        (false, 1.., _) => "holding",
        (false, 0, true) => "read-only",
        (false, 0, false) => "ok",
    }
}

pub fn workers(workers: &[Worker]) -> String {
    let row = |worker: &Worker| {
        let WorkerSettings { cpus, nice, class, cgroup } = &worker.settings;
        vec![
            worker.worker.to_string(),
            cpu_list(cpus),
            plain(class.as_deref().unwrap_or(NONE)),
            plain(cgroup.as_deref().unwrap_or(NONE)),
            nice.map_or_else(|| NONE.to_owned(), |nice| nice.to_string()),
            worker.queues.to_string(),
        ]
    };
    table(&["WORKER", "CPUS", "CLASS", "CGROUP", "NICE", "QUEUES"], 4, workers.iter().map(row))
}

/// One row, for a disk.
pub fn placement(disk: &str, placement: Option<&Placement>) -> String {
    let worker = |worker: Option<u32>| worker.map_or_else(|| NONE.to_owned(), |worker| worker.to_string());
    let row = match placement {
        None => {
            let figures = vec![NONE.to_owned(); PLACEMENT_HEADINGS.len() - 2];
            [vec![plain(disk), "queue".to_owned()], figures].concat()
        }
        Some(placement) => vec![
            plain(disk),
            plain(&placement.placement),
            worker(placement.completion_worker),
            worker(placement.wanted_completion_worker),
            placement.hand_overs.to_string(),
            placement.ops.to_string(),
            placement.passed.to_string(),
            placement.moves.to_string(),
        ],
    };
    table(&PLACEMENT_HEADINGS, 2, std::iter::once(row))
}

fn cpu_list(cpus: &[u32]) -> String {
    if cpus.is_empty() { NONE.into() } else { format_cpus(cpus) }
}

/// One row for each of the disk's queues that run.
fn queue_rows(disk: &DiskStats) -> Vec<Vec<String>> {
    let name = plain(&disk.disk.name);
    let row = |queue: &Queue| {
        let place = [name.clone(), queue.queue.to_string(), queue.worker.to_string()];
        place.into_iter().chain(cells(queue.counters.values())).collect()
    };
    disk.queues.iter().map(row).collect()
}

/// The headings `of`, then those of the counters that have a column.
fn headings(of: &[&'static str], counters: &'static [CounterInfo]) -> Vec<&'static str> {
    let shown = counters.iter().map(|counter| counter.heading).filter(|heading| !heading.is_empty());
    of.iter().copied().chain(shown).collect()
}

/// The figures below these headings.
fn cells(values: impl Iterator<Item = (&'static CounterInfo, u64)>) -> impl Iterator<Item = String> {
    let shown = values.filter(|(counter, _)| !counter.heading.is_empty());
    shown.map(|(counter, number)| match counter.unit {
        CounterUnit::Bytes => megabytes(number),
        CounterUnit::Nanoseconds => milliseconds(number),
        CounterUnit::Count | CounterUnit::Now => number.to_string(),
    })
}

/// All counters since the start.
pub fn stats(stats: &StatsAnswer) -> String {
    let worker = |worker: &WorkerStats| {
        let of = [worker.worker.worker.to_string(), worker.worker.queues.to_string()];
        of.into_iter().chain(cells(worker.counters.values())).collect()
    };
    let worker_headings = headings(&["WORKER", "QUEUES"], WorkerCounters::ALL);
    let queue_headings = headings(&["DISK", "QUEUE", "WORKER"], QueueCounters::ALL);
    let mut text = table(&worker_headings, 1, stats.workers.iter().map(worker));
    text.push('\n');
    text += &table(&queue_headings, 1, stats.disks.iter().flat_map(queue_rows));
    let idle = stats.disks.iter().filter(|disk| disk.queues.is_empty()).count();
    if idle > 0 {
        let _ = writeln!(text, "{idle} of {} disks have no running queue", stats.disks.len());
    }
    text + &balance(stats.balance.as_ref())
}

/// The latest decisions of the balancer.
fn balance(balance: Option<&Balance>) -> String {
    let Some(balance) = balance else { return String::new() };
    let Balance { readings, moves, failed, decisions } = balance;
    let head = format!("\nbalance: {moves} moves, {failed} failed, {readings} readings\n");
    let latest = decisions.iter().rev().take(SHOWN_DECISIONS).map(|decision| {
        let Decision { disk, queue, from, to, why, error, .. } = decision;
        let what = format!("  {} queue {queue}: {from} -> {to}: {}", plain(disk), plain(why));
        error.as_ref().map_or(what.clone() + "\n", |error| format!("{what}; failed: {}\n", plain(error)))
    });
    head + &latest.collect::<String>()
}

/// The rates between two readings.
pub fn rates(before: &StatsAnswer, now: &StatsAnswer) -> String {
    let seconds = rates::seconds(before, now);
    let mut requests_per_s = 0.0;
    let disks: Vec<_> = now
        .disks
        .iter()
        .map(|disk| {
            let old = before.disks.iter().find(|old| old.disk.name == disk.disk.name);
            let rates = rates::of_disk(old, disk, seconds);
            requests_per_s += rates.requests_per_s;
            vec![
                plain(&disk.disk.name),
                whole(rates.requests_per_s),
                whole(rates.reads_per_s),
                tenths(rates.read_mb_per_s),
                whole(rates.writes_per_s),
                tenths(rates.written_mb_per_s),
                whole(rates.flushes_per_s),
                whole(rates.errors_per_s),
                rates.worker_us_per_request.map_or_else(|| NONE.to_owned(), hundredths),
            ]
        })
        .collect();
    let worker = |worker: &WorkerStats| {
        let old = before.workers.iter().find(|old| old.worker.worker == worker.worker.worker);
        let rates = rates::of_worker(old, worker, seconds);
        vec![
            worker.worker.worker.to_string(),
            worker.worker.queues.to_string(),
            tenths(rates.cpu_percent),
            tenths(rates.submission_percent),
            tenths(rates.completion_percent),
            whole(rates.sleeps_per_s),
        ]
    };
    let cpu = rates::cpu_us_per_request(before, now, requests_per_s);
    let cpu = cpu.map_or_else(|| NONE.to_owned(), hundredths);
    let headings = ["WORKER", "QUEUES", "CPU %", "SUBMITTING %", "COMPLETING %", "SLEEPS/s"];
    let mut text = format!(
        "{} requests/s, {cpu} µs of processor time each (the whole process), over {} s\n\n",
        whole(requests_per_s),
        tenths(seconds)
    );
    text += &table(&headings, 1, now.workers.iter().map(worker));
    let headings =
        ["DISK", "IOPS", "READS/s", "MB/s", "WRITES/s", "MB/s", "FLUSHES/s", "ERRORS/s", "WORKER µs/IO"];
    text.push('\n');
    text + &table(&headings, 1, disks.into_iter())
}

/// One line for each disk and each setting that a reload changed or did not change.
pub fn changes(answer: &ReloadAnswer) -> String {
    let ReloadAnswer { added, removed, replaced, changed, refused, needs_restart } = answer;
    let done = [("added", added), ("removed", removed), ("replaced", replaced), ("changed", changed)];
    let done = done
        .iter()
        .flat_map(|(what, disks)| disks.iter().map(move |disk| format!("{what} {}\n", plain(disk))));
    let not = refused.iter().map(|not| format!("not changed: {}: {}\n", plain(&not.disk), plain(&not.why)));
    let later =
        needs_restart.iter().map(|key| format!("not changed before the next start: {}\n", plain(key)));
    let text: String = done.chain(not).chain(later).collect();
    if text.is_empty() { "nothing to change\n".into() } else { text }
}

/// The text in one line. Escapes characters that a terminal obeys, and those that hide or reorder others.
pub fn plain(text: &str) -> String {
    let is_harmful = |c: char| {
        let has_no_width = matches!(c, '\u{200b}'..='\u{200f}' | '\u{2060}'..='\u{2069}' | '\u{feff}');
        c.is_control() || has_no_width || matches!(c, '\u{2028}'..='\u{202e}')
    };
    let shown = |c: char| if is_harmful(c) { c.escape_default().to_string() } else { c.to_string() };
    text.chars().map(shown).collect()
}

/// Prints the size with units that are powers of 1024, as users give sizes.
fn size(bytes: u64) -> String {
    let unit = [(40, "T"), (30, "G"), (20, "M"), (10, "K")];
    let whole = |shift: &&(u32, &str)| bytes > 0 && bytes.trailing_zeros() >= shift.0;
    unit.iter()
        .find(whole)
        .map_or_else(|| bytes.to_string(), |(shift, name)| format!("{}{name}", bytes >> shift))
}

fn megabytes(bytes: u64) -> String {
    tenths(rates::float(bytes) / 1e6)
}

fn milliseconds(ns: u64) -> String {
    tenths(rates::float(ns) / 1e6)
}

fn whole(figure: f64) -> String {
    format!("{figure:.0}")
}

fn tenths(figure: f64) -> String {
    format!("{figure:.1}")
}

fn hundredths(figure: f64) -> String {
    format!("{figure:.2}")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn every_row_has_as_many_cells_as_there_are_headings() {
        let queues = cells(QueueCounters::default().values()).count();
        assert_eq!(headings(&[], QueueCounters::ALL).len(), queues);
        let workers = cells(WorkerCounters::default().values()).count();
        assert_eq!(headings(&[], WorkerCounters::ALL).len(), workers);
    }

    #[test]
    fn counters_are_shown_in_the_units_of_their_headings() {
        let counters = QueueCounters { reads: 7, read_bytes: 4_000_000, ..QueueCounters::default() };
        assert_eq!(cells(counters.values()).take(2).collect::<Vec<_>>(), ["7", "4.0"]);
    }

    #[test]
    fn sizes_are_shown_as_they_can_be_given() {
        let sizes = [0, 512, 1536, 4096, 20 << 30, (20 << 30) + 512, 3 << 40].map(size);
        assert_eq!(sizes, ["0", "512", "1536", "4K", "20G", "21474836992", "3T"]);
    }

    #[test]
    fn cpus_are_shown_as_they_can_be_given() {
        assert_eq!(cpu_list(&[0, 2, 3, 4, 8]), "0,2-4,8");
        assert_eq!(cpu_list(&[]), NONE);
    }

    #[test]
    fn control_characters_of_names_do_not_reach_the_terminal() {
        let disk = Disk { name: "a\x1b[2J\nb".into(), ..Disk::default() };
        let text = disks(&[disk]);
        assert_eq!(text.lines().count(), 2, "{text}");
        assert!(!text.contains('\x1b'), "{text}");
        assert_eq!(plain("a\u{202e}b\u{200b}é"), "a\\u{202e}b\\u{200b}é");
    }

    #[test]
    fn rates_of_two_readings_are_per_second_and_per_request() {
        let disk = |reads, worker_ns| DiskStats {
            disk: Disk { name: "a".into(), ..Disk::default() },
            placement: None,
            queues: vec![Queue {
                counters: QueueCounters {
                    reads,
                    read_bytes: reads * 4096,
                    worker_time: Duration::from_nanos(worker_ns),
                    ..QueueCounters::default()
                },
                ..Queue::default()
            }],
        };
        let before = StatsAnswer { disks: vec![disk(0, 0)], ..StatsAnswer::default() };
        let now = StatsAnswer {
            at_ns: 2_000_000_000,
            process_cpu_ns: 6_000_000,
            disks: vec![disk(2000, 4_000_000)],
            ..StatsAnswer::default()
        };
        let text = rates(&before, &now);
        assert!(text.starts_with("1000 requests/s, 3.00 µs of processor time each"), "{text}");
        let last: Vec<_> = text.lines().last().unwrap().split_whitespace().collect();
        assert_eq!(last, ["a", "1000", "1000", "4.1", "0", "0.0", "0", "0", "2.00"]);
    }
}
