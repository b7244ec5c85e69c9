//! A result in fio's JSON layout, so that programs that read fio's results can read it.
//!
//! - Keys, nesting, units and types are those of `fio --output-format=json` 3.33. One extra object per job, "bareblk",
//!   has figures that fio lacks. Keys that have no meaning for this program are omitted; `docs/how-to/bench.md` lists
//!   them.
//! - With `group_reporting` the clones are one entry, as in fio.
//!
//! Facts: output of fio 3.33.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};

use crate::date;
use crate::job::Job;
use crate::measured::latency::{Latency, Spread};
use crate::measured::{DEPTH_STEPS, DirectionMeasured, Measured, per_second};
use crate::run::outcome::Outcome;

/// fio's list of percentiles.
pub(crate) const PERCENTILES: [f64; 17] =
    [1.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 95.0, 99.0, 99.5, 99.9, 99.95, 99.99];
const DEPTHS: [&str; DEPTH_STEPS] = ["1", "2", "4", "8", "16", "32", ">=64"];
const BATCHES: [&str; DEPTH_STEPS] = ["0", "4", "8", "16", "32", "64", ">=64"];
/// Upper ends of fio's latency steps, in their units.
pub(crate) const LATENCY_STEPS: [u64; 10] = [2, 4, 10, 20, 50, 100, 250, 500, 750, 1000];

/// The report on all jobs, one after another. `version` replaces fio's version; `at` is the end time.
#[must_use]
pub fn report(version: &str, at: SystemTime, outcomes: &[Outcome]) -> Value {
    let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    let mut whole = Map::new();
    let mut put = |key: &str, value: Value| _ = whole.insert(key.to_owned(), value);
    put("fio version", json!(version));
    put("timestamp", json!(since.as_secs()));
    put("timestamp_ms", json!(millis(since)));
    put("time", json!(date::of(at)));
    let global = outcomes.first().map(|outcome| options(&outcome.job.global_options));
    if let Some(global) = global.filter(|global| !global.is_empty()) {
        put("global options", Value::Object(global));
    }
    put("jobs", outcomes.iter().enumerate().flat_map(|(group, outcome)| jobs(group, outcome)).collect());
    put("disk_util", json!([]));
    Value::Object(whole)
}

fn options(options: &[(String, String)]) -> Map<String, Value> {
    options.iter().map(|(option, value)| (option.clone(), json!(value))).collect()
}

/// Makes one entry for the group, or one per clone.
fn jobs(group: usize, outcome: &Outcome) -> Vec<Value> {
    if outcome.job.group_reporting || outcome.clones.len() == 1 {
        return vec![job(group, outcome, &outcome.group(), Some(extra(outcome)))];
    }
    // Figures of the whole group are reported with the first clone.
    let of_clone = outcome.clones.iter().enumerate();
    of_clone.map(|(place, clone)| job(group, outcome, clone, (place == 0).then(|| extra(outcome)))).collect()
}

fn job(group: usize, outcome: &Outcome, measured: &Measured, extra: Option<Value>) -> Value {
    let Job { name, options: given, depth, .. } = &outcome.job;
    let mut entry = Map::new();
    let mut put = |key: &str, value: Value| _ = entry.insert(key.to_owned(), value);
    put("jobname", json!(name));
    put("groupid", json!(group));
    // Always EIO, because fio reports an errno here.
    put("error", json!(if outcome.failure.is_some() { 5 } else { 0 }));
    put("eta", json!(0));
    put("elapsed", json!(measured.runtime.as_secs() + 1));
    put("job options", Value::Object(options(given)));
    put("read", direction(&measured.directions[0], measured));
    put("write", direction(&measured.directions[1], measured));
    put("trim", direction(&DirectionMeasured::default(), measured));
    put("sync", json!({"total_ios": measured.sync.latency.count, "lat_ns": spread(&measured.sync)}));
    put("job_runtime", json!(millis(measured.job_runtime)));
    put("usr_cpu", json!(percent_of(measured.cpu.user, measured.job_runtime)));
    put("sys_cpu", json!(percent_of(measured.cpu.system, measured.job_runtime)));
    put("ctx", json!(measured.cpu.context_switches));
    put("majf", json!(measured.cpu.major_faults));
    put("minf", json!(measured.cpu.minor_faults));
    put("iodepth_level", steps(&DEPTHS, &measured.depths));
    put("iodepth_submit", steps(&BATCHES, &measured.submits));
    put("iodepth_complete", steps(&BATCHES, &measured.completes));
    put("latency_ns", latency_steps(measured, 1, 0));
    put("latency_us", latency_steps(measured, 1000, 1000));
    put("latency_ms", latency_ms(measured));
    put("latency_depth", json!(depth));
    put("latency_target", json!(0));
    put("latency_percentile", json!(100.0));
    put("latency_window", json!(0));
    if let Some(extra) = extra {
        put("bareblk", extra);
    }
    Value::Object(entry)
}

fn direction(of: &DirectionMeasured, measured: &Measured) -> Value {
    let runtime = if of.ios == 0 { Duration::ZERO } else { measured.runtime };
    let bw_bytes = per_second(of.bytes, runtime);
    let (bw, iops) = (Rates::of(of, |sample| sample.bytes, 1024.0), Rates::of(of, |sample| sample.ios, 1.0));
    let mut entry = Map::new();
    let mut put = |key: &str, value: Value| _ = entry.insert(key.to_owned(), value);
    put("io_bytes", json!(of.bytes));
    put("io_kbytes", json!(of.bytes / 1024));
    put("bw_bytes", whole(bw_bytes));
    put("bw", whole(bw_bytes / 1024.0));
    put("iops", json!(per_second(of.ios, runtime)));
    put("runtime", json!(millis(runtime)));
    put("total_ios", json!(of.ios));
    put("short_ios", json!(0));
    put("drop_ios", json!(0));
    put("slat_ns", Value::Object(latency(&of.slat)));
    put("clat_ns", spread(&of.clat));
    put("lat_ns", Value::Object(latency(&of.lat)));
    put("bw_min", whole(bw.min));
    put("bw_max", whole(bw.max));
    put("bw_agg", json!(if of.ios == 0 { 0.0 } else { 100.0 }));
    put("bw_mean", json!(bw.mean));
    put("bw_dev", json!(bw.stddev));
    put("bw_samples", json!(bw.samples));
    put("iops_min", whole(iops.min));
    put("iops_max", whole(iops.max));
    put("iops_mean", json!(iops.mean));
    put("iops_stddev", json!(iops.stddev));
    put("iops_samples", json!(iops.samples));
    Value::Object(entry)
}

/// Rates per second, computed from the half-second samples.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Rates {
    pub min: f64,
    pub max: f64,
    pub mean: f64,
    pub stddev: f64,
    pub samples: usize,
}

impl Rates {
    #[allow(clippy::cast_precision_loss)] // shown to people
    pub fn of(of: &DirectionMeasured, what: fn(&crate::measured::Sample) -> u64, unit: f64) -> Self {
        let rate = |sample: &crate::measured::Sample| what(sample) as f64 / sample.seconds / unit;
        let rates: Vec<f64> = of.samples.iter().map(rate).collect();
        if rates.is_empty() {
            return Self::default();
        }
        let mean = rates.iter().sum::<f64>() / rates.len() as f64;
        let squares: f64 = rates.iter().map(|rate| (rate - mean).powi(2)).sum();
        Self {
            min: rates.iter().copied().fold(f64::INFINITY, f64::min),
            max: rates.iter().copied().fold(0.0, f64::max),
            mean,
            stddev: if rates.len() < 2 { 0.0 } else { (squares / (rates.len() - 1) as f64).sqrt() },
            samples: rates.len(),
        }
    }
}

fn latency(latency: &Latency) -> Map<String, Value> {
    let mut entry = Map::new();
    let mut put = |key: &str, value: Value| _ = entry.insert(key.to_owned(), value);
    put("min", json!(latency.min_ns));
    put("max", json!(latency.max_ns));
    put("mean", json!(latency.mean_ns()));
    put("stddev", json!(latency.stddev_ns()));
    put("N", json!(latency.count));
    entry
}

fn spread(spread: &Spread) -> Value {
    let mut entry = latency(&spread.latency);
    if spread.latency.count > 0 {
        let of = |percent: &f64| (format!("{percent:.6}"), json!(spread.percentile_ns(*percent)));
        let percentiles: Map<String, Value> = PERCENTILES.iter().map(of).collect();
        entry.insert("percentile".to_owned(), Value::Object(percentiles));
    }
    Value::Object(entry)
}

fn steps(names: &[&str; DEPTH_STEPS], counts: &[u64; DEPTH_STEPS]) -> Value {
    let total: u64 = counts.iter().sum();
    names.iter().zip(counts).map(|(name, count)| ((*name).to_owned(), json!(share(*count, total)))).collect()
}

/// The share of requests per step of `unit_ns`, counting those above `from_ns`.
pub(crate) fn latency_shares(measured: &Measured, unit_ns: u64, from_ns: u64) -> [f64; LATENCY_STEPS.len()] {
    let mut below = from_ns;
    LATENCY_STEPS.map(|end| {
        let end = end * unit_ns;
        let count: u64 = measured.directions.iter().map(|of| of.clat.between(below, end)).sum();
        below = end;
        share(count, measured.ios())
    })
}

fn latency_steps(measured: &Measured, unit_ns: u64, from_ns: u64) -> Value {
    let shares = latency_shares(measured, unit_ns, from_ns);
    LATENCY_STEPS.iter().zip(shares).map(|(end, share)| (end.to_string(), json!(share))).collect()
}

fn latency_ms(measured: &Measured) -> Value {
    let mut steps = latency_steps(measured, 1_000_000, 1_000_000);
    let between = |from, to| -> u64 { measured.directions.iter().map(|of| of.clat.between(from, to)).sum() };
    let last =
        [("2000", between(1_000_000_000, 2_000_000_000)), (">=2000", between(2_000_000_000, u64::MAX))];
    for (name, count) in last {
        steps[name] = json!(share(count, measured.ios()));
    }
    steps
}

/// Figures of the whole group that fio does not have.
fn extra(outcome: &Outcome) -> Value {
    let group = outcome.group();
    let ios = group.ios();
    let client_us = micros(group.cpu.user + group.cpu.system);
    let mut entry = json!({
        "target": outcome.target.to_string(),
        "interrupted": outcome.interrupted,
        "client_cpu_us_per_io": ratio(client_us, ios),
        "kicks": outcome.queues.kicks,
        "kicks_per_io": ratio(outcome.queues.kicks, ios),
        "sleeps": outcome.queues.sleeps,
        "sleeps_per_io": ratio(outcome.queues.sleeps, ios),
        "verified_blocks": group.verified_blocks,
    });
    if let Some(server) = outcome.server {
        let of_runtime = |time| percent_of(time, group.runtime);
        entry["server"] = json!({
            "usr_cpu": of_runtime(server.user),
            "sys_cpu": of_runtime(server.system),
            "cpu_us_per_io": ratio(micros(server.user + server.system), ios),
        });
    }
    if let Some(failure) = &outcome.failure {
        entry["failure"] = json!(failure.to_string());
    }
    entry
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

pub(crate) fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // a rate, never negative
fn whole(number: f64) -> Value {
    json!(number as u64)
}

#[allow(clippy::cast_precision_loss)]
pub(crate) fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

pub(crate) fn share(part: u64, whole: u64) -> f64 {
    100.0 * ratio(part, whole)
}

pub(crate) fn percent_of(part: Duration, whole: Duration) -> f64 {
    if whole.is_zero() { 0.0 } else { 100.0 * part.as_secs_f64() / whole.as_secs_f64() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measured::{QueueCounts, Sample};
    use crate::target::Target;

    fn measured() -> Measured {
        let mut measured = Measured {
            runtime: Duration::from_secs(2),
            job_runtime: Duration::from_secs(2),
            ..Measured::default()
        };
        measured.cpu.user = Duration::from_millis(500);
        let read = &mut measured.directions[0];
        for us in [3, 30, 300, 3_000_000] {
            read.clat.add(us * 1000);
            read.lat.add(us * 1000 + 500);
            read.slat.add(500);
            read.ios += 1;
            read.bytes += 4096;
        }
        read.samples = vec![Sample { seconds: 0.5, bytes: 8192, ios: 2 }; 2];
        measured
    }

    fn outcome(clones: usize, group_reporting: bool) -> Outcome {
        Outcome {
            job: Job { group_reporting, jobs: 2, ..Job::default() },
            target: Target::File("/d".into(), None),
            clones: vec![measured(); clones],
            queues: QueueCounts::default(),
            server: None,
            interrupted: false,
            failure: None,
        }
    }

    fn whole_report(outcome: Outcome) -> Value {
        report("x", UNIX_EPOCH + Duration::from_secs(7), &[outcome])
    }

    #[test]
    fn figures_stand_under_fios_keys_in_fios_units() {
        let json = whole_report(outcome(1, true));
        let job = &json["jobs"][0];
        let read = &job["read"];
        assert_eq!((json["timestamp"].as_u64(), job["job_runtime"].as_u64()), (Some(7), Some(2000)));
        assert_eq!((read["io_bytes"].as_u64(), read["bw_bytes"].as_u64()), (Some(16384), Some(8192)));
        assert_eq!((read["iops"].as_f64(), read["runtime"].as_u64()), (Some(2.0), Some(2000)));
        assert_eq!((read["bw_mean"].as_f64(), read["iops_mean"].as_f64()), (Some(16.0), Some(4.0)));
        assert_eq!((read["clat_ns"]["N"].as_u64(), read["slat_ns"]["mean"].as_f64()), (Some(4), Some(500.0)));
        assert_eq!(job["usr_cpu"].as_f64(), Some(25.0));
        assert_eq!(job["bareblk"]["client_cpu_us_per_io"].as_f64(), Some(125_000.0));
    }

    #[test]
    fn latencies_fall_into_fios_steps() {
        let json = whole_report(outcome(1, true));
        let job = &json["jobs"][0];
        let shares = ["4", "50", "500"].map(|step| job["latency_us"][step].as_f64());
        assert_eq!(shares, [Some(25.0); 3]);
        assert_eq!(job["latency_ms"][">=2000"].as_f64(), Some(25.0));
        assert_eq!(job["latency_ns"]["1000"].as_f64(), Some(0.0));
    }

    #[test]
    fn direction_without_requests_has_no_percentiles() {
        let json = whole_report(outcome(1, true));
        assert!(json["jobs"][0]["write"]["clat_ns"].get("percentile").is_none());
        assert_eq!(json["jobs"][0]["write"]["runtime"].as_u64(), Some(0));
    }

    #[test]
    fn clones_are_one_entry_only_with_group_reporting() {
        let entries = |group| whole_report(outcome(2, group))["jobs"].as_array().map_or(0, Vec::len);
        assert_eq!((entries(true), entries(false)), (1, 2));
        let json = whole_report(outcome(2, true));
        assert_eq!(json["jobs"][0]["read"]["total_ios"].as_u64(), Some(8));
        assert_eq!(json["jobs"][0]["job_runtime"].as_u64(), Some(4000));
    }
}
