//! A result as text, in fio's layout: rates, latencies, percentiles, CPU time.
//!
//! - Each line has its own unit, so that numbers have few digits, as in fio.
//! - Below fio's lines are figures that fio does not have: CPU time per request of the client and the server, kicks and
//!   sleeps.

use std::fmt::Write;
use std::time::Duration;

use super::json::{LATENCY_STEPS, PERCENTILES, Rates, latency_shares, micros, percent_of, ratio, share};
use crate::job::options::engine_word;
use crate::job::units::short;
use crate::measured::latency::{Latency, Spread};
use crate::measured::{DirectionMeasured, Measured, per_second};
use crate::run::outcome::Outcome;
use crate::target::Target;

/// Latency steps with a smaller share of the requests are omitted.
const SHOWN_PERCENT: f64 = 0.01;

/// In shorter runs, a server's CPU time, which the kernel reports in ticks of 10 ms, is mostly rounding error.
const SERVER_TIME_FROM: Duration = Duration::from_millis(200);

/// The whole result, ending with a line break.
#[must_use]
pub fn text(outcome: &Outcome) -> String {
    let mut out = head(outcome);
    if outcome.job.group_reporting || outcome.clones.len() == 1 {
        one(&mut out, outcome, &outcome.group());
    } else {
        for clone in &outcome.clones {
            one(&mut out, outcome, clone);
        }
        summary(&mut out, &outcome.group());
    }
    extra(&mut out, outcome);
    out
}

fn head(outcome: &Outcome) -> String {
    let job = &outcome.job;
    let how = match &outcome.target {
        Target::File(_, engine) => {
            let direct = u32::from(job.direct);
            format!("ioengine={}, direct={direct}, ", engine_word(engine.unwrap_or(job.engine)))
        }
        Target::Socket(_) => String::new(),
    };
    let (name, rw, bs) = (&job.name, job.pattern.word(), short(job.block_bytes.into()));
    let (depth, target) = (job.depth, &outcome.target);
    format!("{name}: rw={rw}, bs={bs}, {how}iodepth={depth}, on {target}\n")
}

fn one(out: &mut String, outcome: &Outcome, measured: &Measured) {
    let err = if outcome.failure.is_some() { 5 } else { 0 };
    let jobs = if outcome.job.group_reporting { outcome.clones.len() } else { 1 };
    let _ = writeln!(out, "{}: (jobs={jobs}): err={err:2}", outcome.job.name);
    for (name, of) in ["read", "write"].into_iter().zip(&measured.directions) {
        direction(out, name, of, measured);
    }
    latency_lines(out, measured);
    if measured.sync.latency.count > 0 {
        let _ = writeln!(out, "  fsync/fdatasync/sync_file_range:");
        latency(out, "sync", &measured.sync.latency);
        percentiles(out, "sync", &measured.sync);
    }
    let cpu = &measured.cpu;
    let (usr, sys) =
        (percent_of(cpu.user, measured.job_runtime), percent_of(cpu.system, measured.job_runtime));
    let _ = writeln!(
        out,
        "  cpu          : usr={usr:.2}%, sys={sys:.2}%, ctx={}, majf={}, minf={}",
        cpu.context_switches, cpu.major_faults, cpu.minor_faults
    );
    steps(out, "  IO depths    :", ["1", "2", "4", "8", "16", "32", ">=64"], &measured.depths);
    steps(out, "     submit    :", ["0", "4", "8", "16", "32", "64", ">=64"], &measured.submits);
    steps(out, "     complete  :", ["0", "4", "8", "16", "32", "64", ">=64"], &measured.completes);
    let [read, write] = [0, 1].map(|place: usize| measured.directions[place].ios);
    let _ = writeln!(out, "     issued rwts: total={read},{write},0,{}", measured.sync.latency.count);
}

fn direction(out: &mut String, name: &str, of: &DirectionMeasured, measured: &Measured) {
    if of.ios == 0 {
        return;
    }
    let (iops, bw) = (per_second(of.ios, measured.runtime), per_second(of.bytes, measured.runtime));
    #[allow(clippy::cast_precision_loss)] // shown to people
    let moved = of.bytes as f64;
    let _ = writeln!(
        out,
        "  {name:>5}: IOPS={}, BW={}/s ({}/s)({}/{}msec)",
        count(iops),
        binary(bw),
        decimal(bw),
        binary(moved),
        measured.runtime.as_millis()
    );
    if of.slat.count > 0 {
        latency(out, "slat", &of.slat);
    }
    latency(out, "clat", &of.clat.latency);
    latency(out, " lat", &of.lat);
    percentiles(out, "clat", &of.clat);
    let bw = Rates::of(of, |sample| sample.bytes, 1024.0);
    let iops = Rates::of(of, |sample| sample.ios, 1.0);
    for (name, rates) in
        [("bw (  KiB/s)", bw), ("iops       ", iops)].into_iter().filter(|(_, of)| of.samples > 0)
    {
        let Rates { min, max, mean, stddev, samples } = rates;
        let _ = writeln!(
            out,
            "   {name} : min={min:.0}, max={max:.0}, avg={mean:.2}, stdev={stddev:.2}, samples={samples}"
        );
    }
}

/// Chooses the unit as fio does, so that the numbers stay short.
fn unit(latency: &Latency) -> (&'static str, f64) {
    match latency.mean_ns() {
        mean if mean < 2_000.0 => ("nsec", 1.0),
        mean if mean < 2_000_000.0 => ("usec", 1e3),
        _ => ("msec", 1e6),
    }
}

#[allow(clippy::cast_precision_loss)] // shown to people
fn latency(out: &mut String, name: &str, latency: &Latency) {
    let (unit, ns) = unit(latency);
    let _ = writeln!(
        out,
        "    {name} ({unit}): min={:.0}, max={:.0}, avg={:.2}, stdev={:.2}",
        latency.min_ns as f64 / ns,
        latency.max_ns as f64 / ns,
        latency.mean_ns() / ns,
        latency.stddev_ns() / ns
    );
}

#[allow(clippy::cast_precision_loss)]
fn percentiles(out: &mut String, name: &str, spread: &Spread) {
    let (unit, ns) = unit(&spread.latency);
    let _ = writeln!(out, "    {name} percentiles ({unit}):");
    let cells: Vec<_> = PERCENTILES
        .iter()
        .map(|&percent| format!("{percent:5.2}th=[{:5.0}]", spread.percentile_ns(percent) as f64 / ns))
        .collect();
    for (place, row) in cells.chunks(4).enumerate() {
        let end = if (place + 1) * 4 < cells.len() { "," } else { "" };
        let _ = writeln!(out, "     | {}{end}", row.join(", "));
    }
}

fn latency_lines(out: &mut String, measured: &Measured) {
    let units = [("nsec", 1, 0), ("usec", 1000, 1000), ("msec", 1_000_000, 1_000_000)];
    for (unit, unit_ns, from_ns) in units {
        let shares = latency_shares(measured, unit_ns, from_ns);
        let shown = LATENCY_STEPS.iter().zip(shares).filter(|(_, share)| *share >= SHOWN_PERCENT);
        let shown: Vec<_> = shown.map(|(end, share)| format!("{end}={share:.2}%")).collect();
        for row in shown.chunks(6) {
            let _ = writeln!(out, "  lat ({unit})   : {}", row.join(", "));
        }
    }
}

fn steps(out: &mut String, name: &str, names: [&str; 7], counts: &[u64; 7]) {
    let total: u64 = counts.iter().sum();
    let shown = names.iter().zip(counts).map(|(name, &count)| format!("{name}={:.1}%", share(count, total)));
    let _ = writeln!(out, "{name} {}", shown.collect::<Vec<_>>().join(", "));
}

fn summary(out: &mut String, group: &Measured) {
    let _ = writeln!(out, "\nall jobs:");
    for (name, of) in ["READ", "WRITE"].into_iter().zip(&group.directions).filter(|(_, of)| of.ios > 0) {
        let (iops, bw) = (per_second(of.ios, group.runtime), per_second(of.bytes, group.runtime));
        let ms = group.runtime.as_millis();
        let _ = writeln!(
            out,
            "  {name:>5}: IOPS={}, BW={}/s ({}/s), run={ms}msec",
            count(iops),
            binary(bw),
            decimal(bw)
        );
    }
}

fn extra(out: &mut String, outcome: &Outcome) {
    let group = outcome.group();
    let ios = group.ios();
    let us_per_io = |time| ratio(micros(time), ios);
    let _ = write!(out, "  CPU per IO   : client={:.2}usec", us_per_io(group.cpu.user + group.cpu.system));
    if let Some(server) = outcome.server {
        let (usr, sys) = (percent_of(server.user, group.runtime), percent_of(server.system, group.runtime));
        let each = us_per_io(server.user + server.system);
        let _ = match group.runtime < SERVER_TIME_FROM {
            true => write!(
                out,
                ", server=- (measured only in runs of {} s or more)",
                SERVER_TIME_FROM.as_secs_f64()
            ),
            false => write!(out, ", server={each:.2}usec (usr={usr:.2}%, sys={sys:.2}%)"),
        };
    }
    out.push('\n');
    if matches!(outcome.target, Target::Socket(_)) {
        let (kicks, sleeps) = (ratio(outcome.queues.kicks, ios), ratio(outcome.queues.sleeps, ios));
        let _ = writeln!(out, "  per IO       : kicks={kicks:.4}, sleeps={sleeps:.4}");
    }
    if outcome.job.verify {
        let _ = writeln!(out, "  verify       : {} blocks read and correct", group.verified_blocks);
    }
    if outcome.interrupted {
        out.push_str("  interrupted: this is the result so far\n");
    }
}

/// Formats a count, as in "47.5k".
fn count(number: f64) -> String {
    let (number, letter) = match number {
        n if n >= 1e7 => (n / 1e6, "M"),
        n if n >= 1e4 => (n / 1e3, "k"),
        n => return format!("{n:.0}"),
    };
    format!("{}{letter}", three_digits(number))
}

fn binary(bytes: f64) -> String {
    scaled(bytes, 1024.0, ["B", "KiB", "MiB", "GiB", "TiB"])
}

fn decimal(bytes: f64) -> String {
    scaled(bytes, 1000.0, ["B", "kB", "MB", "GB", "TB"])
}

fn scaled(mut number: f64, base: f64, units: [&str; 5]) -> String {
    let mut place = 0;
    while number >= base && place + 1 < units.len() {
        number /= base;
        place += 1;
    }
    format!("{}{}", three_digits(number), units[place])
}

fn three_digits(number: f64) -> String {
    match number {
        n if n >= 99.95 => format!("{n:.0}"),
        n if n >= 9.995 => format!("{n:.1}"),
        n => format!("{n:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::Job;
    use crate::measured::QueueCounts;

    #[test]
    fn numbers_are_as_short_as_fios() {
        assert_eq!([47_481.5, 970.0, 12_345_678.0].map(count), ["47.5k", "970", "12.3M"]);
        assert_eq!((binary(185_597_952.0), decimal(185_597_952.0)), ("177MiB".into(), "186MB".into()));
        assert_eq!(binary(512.0), "512B");
    }

    #[test]
    fn lines_of_a_result_are_fios_and_ours_below() {
        let mut measured = Measured { runtime: std::time::Duration::from_secs(1), ..Measured::default() };
        measured.job_runtime = measured.runtime;
        let read = &mut measured.directions[0];
        for _ in 0..1000 {
            read.slat.add(1500);
            read.clat.add(80_000);
            read.lat.add(81_500);
            read.ios += 1;
            read.bytes += 4096;
        }
        let outcome = Outcome {
            job: Job::default(),
            target: Target::Socket("/s".into()),
            clones: vec![measured],
            queues: QueueCounts { kicks: 500, sleeps: 250, publications: 500 },
            server: None,
            interrupted: false,
            failure: None,
        };
        let text = text(&outcome);
        for part in [
            "bench: rw=read, bs=4k, iodepth=1, on socket:/s",
            "   read: IOPS=1000, BW=3.91MiB/s (4.10MB/s)(3.91MiB/1000msec)",
            "    slat (nsec): min=1500, max=1500, avg=1500.00, stdev=0.00",
            "    clat (usec): min=80, max=80, avg=80.00, stdev=0.00",
            "99.99th=[   80]",
            "  lat (usec)   : 100=100.00%",
            "  cpu          : usr=0.00%, sys=0.00%, ctx=0, majf=0, minf=0",
            "issued rwts: total=1000,0,0,0",
            "  per IO       : kicks=0.5000, sleeps=0.2500",
        ] {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
        assert!(!text.contains("write:"), "{text}");
    }
}
