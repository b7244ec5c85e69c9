//! Formats answers as tables for a terminal.
//!
//! Names come from files, so tables escape control characters. A figure that `bareblk top` shows too has the same heading
//! there.

use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use blk_server::{CounterInfo, CounterUnit, LatencyHistogram, QueueCounters, WorkerCounters, format_cpus};
use comfy_table::{CellAlignment, ContentArrangement, Table, presets};

use super::rates;
use crate::config::difference::when_applied;
use crate::control::answers::balance::{Balance, Decision};
use crate::control::answers::latency::Latencies;
use crate::control::answers::placement::Placement;
use crate::control::answers::reports::{
    Disk, DiskStats, Queue, ReloadAnswer, StatsAnswer, Waiting, Worker, WorkerStats,
};
use crate::control::answers::slow::{Slow, SlowAnswer, milliseconds as milliseconds_of};
use crate::control::protocol::verbs::WorkerSettings;

/// Shown in place of a missing figure.
const NONE: &str = "–";
const PLACEMENT_HEADINGS: [&str; 8] =
    ["DISK", "PLACEMENT", "COMPLETION WORKER", "WANTED", "HAND-OVERS", "OPS", "PASSED ON", "MOVES"];
const PERCENTILES: [&str; 3] = ["p50", "p99", "max"];
/// Maximum number of the balancer's decisions in the table, the latest first.
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
            format_of(disk),
            plain(&disk.socket),
            plain(&disk.engine),
            state(disk).into(),
            plain(&disk.on_error),
            size(disk.size_bytes),
            disk.sessions.to_string(),
            format!("{}/{}", disk.queues_running, disk.queues_offered),
        ]
    };
    let headings =
        ["DISK", "IMAGE", "FORMAT", "SOCKET", "ENGINE", "STATE", "ON ERROR", "SIZE", "SESSIONS", "QUEUES"];
    table(&headings, 7, disks.iter().map(row))
}

/// `raw`, or `qcow2/3` for a chain of three images. Older servers send no format.
fn format_of(disk: &Disk) -> String {
    match (disk.format.as_str(), disk.layers) {
        ("", _) => NONE.to_owned(),
        (format, 0 | 1) => plain(format),
        (format, layers) => format!("{}/{layers}", plain(format)),
    }
}

/// A line for each disk that is not served yet.
pub fn waiting(disks: &[Waiting]) -> String {
    let line = |disk: &Waiting| {
        let (name, seconds) = (plain(&disk.name), disk.waited_ns / 1_000_000_000);
        format!("disk {name} is not served yet, for {seconds} s: {}\n", plain(&disk.error))
    };
    disks.iter().map(line).collect()
}

pub fn state(disk: &Disk) -> &'static str {
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

/// A table with one row: the disk's placement.
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

/// The cells for the columns of these counters.
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
    let mut text = table(&worker_headings, 1, stats.workers.iter().map(worker));
    text.push('\n');
    text += &totals(stats);
    text += &latencies(stats);
    text += &queues(&stats.disks);
    let idle = stats.disks.iter().filter(|disk| disk.queues.is_empty()).count();
    if idle > 0 {
        let _ = writeln!(text, "{idle} of {} disks have no running queue", stats.disks.len());
    }
    stats.disks.iter().for_each(|disk| text += &throttled(disk));
    text + &balance(stats.balance.as_ref())
}

/// One row per disk. Empty if the server has no totals.
fn totals(stats: &StatsAnswer) -> String {
    let row = |disk: &DiskStats| {
        let totals = disk.totals?;
        let counters = [
            totals.reads.to_string(),
            megabytes(totals.read_bytes),
            totals.writes.to_string(),
            megabytes(totals.written_bytes),
            totals.flushes.to_string(),
            totals.other.to_string(),
            totals.errors.to_string(),
        ];
        let name = std::iter::once(plain(&disk.disk.name));
        Some(name.chain(counters).chain(percentiles(&disk.latency.all())).collect())
    };
    let rows: Vec<_> = stats.disks.iter().filter_map(row).collect();
    if rows.is_empty() {
        return String::new();
    }
    let counters = ["DISK", "READS", "MB", "WRITES", "MB", "FLUSHES", "OTHER", "ERRORS"];
    table(&[&counters[..], &PERCENTILES].concat(), 1, rows.into_iter()) + "\n"
}

/// One row per disk and kind of request that it has answered.
fn latencies(stats: &StatsAnswer) -> String {
    let rows = stats.disks.iter().flat_map(|disk| {
        let kinds = disk.latency.kinds().into_iter().filter(|(_, latencies)| latencies.count > 0);
        kinds.map(|(kind, latencies)| {
            let Latencies { count, p50_ns, p90_ns, p99_ns, p999_ns, max_ns, .. } = latencies;
            let times = [*p50_ns, *p90_ns, *p99_ns, *p999_ns, *max_ns].map(time);
            let of = [plain(&disk.disk.name), kind.to_owned(), count.to_string()];
            of.into_iter().chain(times).collect::<Vec<_>>()
        })
    });
    let rows: Vec<_> = rows.collect();
    if rows.is_empty() {
        return String::new();
    }
    let headings = ["DISK", "LATENCY", "REQUESTS", "p50", "p90", "p99", "p99.9", "max"];
    table(&headings, 2, rows.into_iter()) + "\n"
}

/// The figures below [`PERCENTILES`].
fn percentiles(histogram: &LatencyHistogram) -> [String; 3] {
    if histogram.count() == 0 {
        return [NONE; 3].map(str::to_owned);
    }
    [histogram.quantile_ns(0.5), histogram.quantile_ns(0.99), histogram.max_ns].map(time)
}

/// A disk's latest slow requests, oldest first.
pub fn slow(disk: &str, answer: &SlowAnswer, now: SystemTime) -> String {
    let limit = match (answer.slow_ms, answer.requests.is_empty()) {
        (None, true) => return format!("disk {} records no slow requests: set its slow-ms\n", plain(disk)),
        (Some(ms), true) => {
            return format!("no request of disk {} has taken {ms} ms or longer\n", plain(disk));
        }
        (None, false) => "slow-ms is now off".to_owned(),
        (Some(ms), false) => format!("{ms} ms or longer"),
    };
    let now_ms = now.duration_since(UNIX_EPOCH).map_or(0, milliseconds_of);
    let row = |slow: &Slow| {
        vec![
            time(now_ms.saturating_sub(slow.at_ms).saturating_mul(1_000_000)),
            slow.queue.to_string(),
            plain(&slow.request),
            slow.sector.to_string(),
            slow.bytes.to_string(),
            time(slow.took_ns),
            slow.tries.to_string(),
            if slow.failed { "error" } else { "ok" }.to_owned(),
        ]
    };
    let headings = ["AGO", "QUEUE", "REQUEST", "SECTOR", "BYTES", "TOOK", "TRIES", "ANSWER"];
    let head = format!("latest slow requests of disk {} ({limit}):\n", plain(disk));
    head + &table(&headings, 0, answer.requests.iter().map(row))
}

/// One line, if requests of the disk have waited for its limits.
fn throttled(disk: &DiskStats) -> String {
    let throttling = &disk.throttling;
    if throttling.throttled_requests == 0 {
        return String::new();
    }
    let credits = throttling.limits.iter().map(|rate| format!(", {} credit {}", rate.limit, rate.credit));
    format!(
        "{}: {} requests waited for limits, and its queues waited {} s in all{}\n",
        plain(&disk.disk.name),
        throttling.throttled_requests,
        tenths(rates::float(throttling.throttled_ns) / 1e9),
        credits.collect::<String>()
    )
}

/// One row for each running queue of these disks.
pub fn queues(disks: &[DiskStats]) -> String {
    let headings = headings(&["DISK", "QUEUE", "WORKER"], QueueCounters::ALL);
    table(&headings, 1, disks.iter().flat_map(queue_rows))
}

/// The latest decisions of the balancer.
fn balance(balance: Option<&Balance>) -> String {
    let Some(balance) = balance else { return String::new() };
    let Balance { readings, moves, failed, decisions } = balance;
    let head = format!("\nbalancer: {moves} queues moved, {failed} moves failed, {readings} readings\n");
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
            let [p50, p99, max] = percentiles(&rates::latency(old, disk));
            vec![
                plain(&disk.disk.name),
                whole(rates.requests_per_s),
                whole(rates.reads_per_s),
                tenths(rates.read_mb_per_s),
                whole(rates.writes_per_s),
                tenths(rates.written_mb_per_s),
                whole(rates.flushes_per_s),
                whole(rates.errors_per_s),
                p50,
                p99,
                max,
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
    let headings = ["WORKER", "QUEUES", "CPU%", "SUBMIT%", "COMPL%", "SLEEP/s"];
    let mut text = format!(
        "{} requests/s, {cpu} µs of processor time per request (the whole process), over {} s\n\n",
        whole(requests_per_s),
        tenths(seconds)
    );
    text += &table(&headings, 1, now.workers.iter().map(worker));
    let headings = ["DISK", "IOPS", "READ/s", "MB/s", "WRITE/s", "MB/s", "FLUSH/s", "ERR/s"];
    let headings = [&headings[..], &PERCENTILES, &["µs/IO"]].concat();
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
    let when = when_applied(needs_restart);
    let later = needs_restart.iter().map(|key| format!("{when}: {}\n", plain(key)));
    let text: String = done.chain(not).chain(later).collect();
    if text.is_empty() { "nothing to change\n".into() } else { text }
}

/// The text in one line. Escapes characters that a terminal interprets, and those that hide or reorder others.
pub fn plain(text: &str) -> String {
    let is_harmful = |c: char| {
        let has_no_width = matches!(c, '\u{200b}'..='\u{200f}' | '\u{2060}'..='\u{2069}' | '\u{feff}');
        c.is_control() || has_no_width || matches!(c, '\u{2028}'..='\u{202e}')
    };
    let shown = |c: char| if is_harmful(c) { c.escape_default().to_string() } else { c.to_string() };
    text.chars().map(shown).collect()
}

/// The size with a unit (powers of 1024), as users write sizes.
pub fn size(bytes: u64) -> String {
    let unit = [(40, "T"), (30, "G"), (20, "M"), (10, "K")];
    let whole = |shift: &&(u32, &str)| bytes > 0 && bytes.trailing_zeros() >= shift.0;
    unit.iter()
        .find(whole)
        .map_or_else(|| bytes.to_string(), |(shift, name)| format!("{}{name}", bytes >> shift))
}

/// A time with two or three digits and its unit.
fn time(ns: u64) -> String {
    let units = [(1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "µs")];
    let Some((unit, name)) = units.into_iter().find(|(unit, _)| ns >= *unit) else {
        return format!("{ns}ns");
    };
    let figure = rates::float(ns) / rates::float(unit);
    if figure < 9.95 { format!("{figure:.1}{name}") } else { format!("{figure:.0}{name}") }
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

    use blk_server::Latency;

    use super::*;
    use crate::control::answers::latency::DiskLatency;

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
    fn times_are_shown_with_two_or_three_digits() {
        let times = [0, 999, 1000, 9_949, 9_950, 82_400, 1_100_000, 310_000_000, 69_000_000_000].map(time);
        assert_eq!(times, ["0ns", "999ns", "1.0µs", "9.9µs", "10µs", "82µs", "1.1ms", "310ms", "69s"]);
    }

    /// A disk with this many reads, of which one in ten was slow.
    fn disk_with_reads(reads: u64) -> DiskStats {
        let mut latency = Latency::default();
        (0..reads).for_each(|read| latency.read.note(if read % 10 == 9 { 5_000_000 } else { 50_000 }));
        DiskStats {
            disk: Disk { name: "a".into(), ..Disk::default() },
            totals: Some(QueueCounters { reads, ..QueueCounters::default() }),
            latency: DiskLatency::new(&latency, true),
            ..DiskStats::default()
        }
    }

    #[test]
    fn disk_without_running_queues_shows_its_totals_and_latencies() {
        let text = stats(&StatsAnswer { disks: vec![disk_with_reads(100)], ..StatsAnswer::default() });
        let rows: Vec<Vec<_>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert!(
            rows.contains(&vec!["a", "100", "0.0", "0", "0.0", "0", "0", "0", "53µs", "5.0ms", "5.0ms"]),
            "{text}"
        );
        assert!(
            rows.contains(&vec!["a", "read", "100", "53µs", "53µs", "5.0ms", "5.0ms", "5.0ms"]),
            "{text}"
        );
    }

    #[test]
    fn latencies_of_an_interval_leave_out_what_was_before() {
        let mut now = disk_with_reads(100);
        let before = StatsAnswer { disks: vec![disk_with_reads(90)], ..StatsAnswer::default() };
        now.latency.write = now.latency.read.clone();
        let now = StatsAnswer { at_ns: 1_000_000_000, disks: vec![now], ..StatsAnswer::default() };
        let text = rates(&before, &now);
        let last: Vec<_> = text.lines().last().unwrap().split_whitespace().collect();
        // 10 reads and 100 writes; of each, one in ten was slow.
        assert_eq!(last[8..11], ["53µs", "5.0ms", "5.0ms"], "{text}");
    }

    #[test]
    fn slow_requests_are_shown_with_their_age_and_how_long_they_took() {
        let request = Slow {
            at_ms: 1_000,
            queue: 3,
            request: "write".into(),
            sector: 8,
            bytes: 4096,
            took_ns: 1_234_567_890,
            tries: 1,
            failed: true,
        };
        let answer = SlowAnswer { slow_ms: Some(500), requests: vec![request] };
        let text = slow("a", &answer, UNIX_EPOCH + std::time::Duration::from_secs(13));
        assert!(text.starts_with("latest slow requests of disk a (500 ms or longer):"), "{text}");
        let last: Vec<_> = text.lines().last().unwrap().split_whitespace().collect();
        assert_eq!(last, ["12s", "3", "write", "8", "4096", "1.2s", "1", "error"]);
        let none = slow("a", &SlowAnswer::default(), UNIX_EPOCH);
        assert_eq!(none, "disk a records no slow requests: set its slow-ms\n");
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
            queues: vec![Queue {
                counters: QueueCounters {
                    reads,
                    read_bytes: reads * 4096,
                    worker_time: Duration::from_nanos(worker_ns),
                    ..QueueCounters::default()
                },
                ..Queue::default()
            }],
            ..DiskStats::default()
        };
        let before = StatsAnswer { disks: vec![disk(0, 0)], ..StatsAnswer::default() };
        let now = StatsAnswer {
            at_ns: 2_000_000_000,
            process_cpu_ns: 6_000_000,
            disks: vec![disk(2000, 4_000_000)],
            ..StatsAnswer::default()
        };
        let text = rates(&before, &now);
        assert!(text.starts_with("1000 requests/s, 3.00 µs of processor time per request"), "{text}");
        let last: Vec<_> = text.lines().last().unwrap().split_whitespace().collect();
        assert_eq!(last, ["a", "1000", "1000", "4.1", "0", "0.0", "0", "0", "–", "–", "–", "2.00"]);
    }
}
