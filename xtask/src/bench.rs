//! `cargo xtask bench`: the cost of a request in the device half, in time and instructions.
//!
//! Measures time with the criterion benchmark, counts instructions with callgrind, prints a table and keeps
//! it in `bench_results/`. Instruction counts are exactly repeatable; times vary with the machine.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::Value;
use xtask::{command, workspace};

use crate::origin::{self, Origin};

/// Ring format, criterion's group, and extra arguments of the benchmark when it counts.
const FORMATS: [(&str, &str, &[&str]); 2] =
    [("split", "device_half_4k_read", &[]), ("packed", "device_half_4k_read_packed", &["--packed"])];
const DEPTHS: [u32; 3] = [1, 8, 64];
/// With `--callgrind` the benchmark runs 1000 batches of 64 requests.
const COUNTED_REQUESTS: u64 = 64_000;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

#[derive(Debug, Serialize)]
struct Report {
    #[serde(flatten)]
    origin: Origin,
    what: &'static str,
    formats: Vec<Format>,
}

#[derive(Debug, Serialize)]
struct Format {
    ring: &'static str,
    times: Vec<Time>,
    /// At depth 64: everything between the kick and the call.
    instructions_per_request: u64,
}

/// The time of one request, over criterion's samples.
#[derive(Debug, Serialize, PartialEq)]
struct Time {
    depth: u32,
    unit: &'static str,
    runs: usize,
    min: f64,
    median: f64,
    max: f64,
}

pub(crate) fn run(_: &Args) -> Result<()> {
    let bench = ["bench", "--package", "blk_server", "--bench", "device_half"];
    command::run(Command::new(workspace::cargo()).args(bench).current_dir(workspace::root()))?;
    let report = Report {
        origin: Origin::now()?,
        what: "one 4 KiB read in the device half, kick and call included, no I/O",
        formats: FORMATS
            .map(|(ring, group, args)| format(ring, group, args))
            .into_iter()
            .collect::<Result<_>>()?,
    };
    print!("{}", table(&report));
    println!("kept in {}", origin::keep(&report.origin, "device-half", "result.json", &report)?.display());
    Ok(())
}

fn format(ring: &'static str, group: &str, args: &[&str]) -> Result<Format> {
    let samples = workspace::build_dir()?.join("criterion").join(group).join("depth");
    let times = DEPTHS.iter().map(|&depth| read_time(&samples, depth)).collect::<Result<_>>()?;
    Ok(Format { ring, times, instructions_per_request: count_instructions(args)? / COUNTED_REQUESTS })
}

fn read_time(samples: &Path, depth: u32) -> Result<Time> {
    let path = samples.join(depth.to_string()).join("new").join("sample.json");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    time(depth, &serde_json::from_str(&text)?)
}

/// For each sample, criterion keeps the number of batches and their time in nanoseconds.
fn time(depth: u32, sample: &Value) -> Result<Time> {
    let numbers = |name: &str| {
        let array = sample[name].as_array().with_context(|| format!("criterion's sample has no {name}"))?;
        Ok::<_, anyhow::Error>(array.iter().filter_map(Value::as_f64).collect::<Vec<_>>())
    };
    let (batches, times) = (numbers("iters")?, numbers("times")?);
    let per_request = |(time, batches): (&f64, &f64)| time / batches / f64::from(depth);
    let mut each: Vec<f64> = times.iter().zip(&batches).map(per_request).collect();
    each.sort_by(f64::total_cmp);
    let at = |index: usize| each.get(index).map(|ns| (ns * 10.0).round() / 10.0).context("no samples");
    let (min, median) = (at(0)?, at(each.len() / 2)?);
    Ok(Time { depth, unit: "ns per request", runs: each.len(), min, median, max: at(each.len() - 1)? })
}

fn count_instructions(args: &[&str]) -> Result<u64> {
    let program = bench_program()?;
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]);
    valgrind.args(["--toggle-collect=*InlineWorker*serve*"]).arg(program).arg("--callgrind").args(args);
    let output = valgrind.output().context("cannot start valgrind: run `cargo xtask setup`")?;
    let said = String::from_utf8_lossy(&output.stderr);
    collected(&said).with_context(|| format!("callgrind counted nothing:\n{said}"))
}

fn collected(said: &str) -> Option<u64> {
    let line = said.lines().find(|line| line.contains("Collected :"))?;
    line.split_whitespace().next_back()?.parse().ok().filter(|&count| count > 0)
}

fn bench_program() -> Result<PathBuf> {
    let words = ["bench", "--package", "blk_server", "--bench", "device_half", "--no-run"];
    let mut cargo = Command::new(workspace::cargo());
    cargo.args(words).arg("--message-format=json").current_dir(workspace::root());
    let messages = command::output(&mut cargo)?;
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let mut programs = messages.filter_map(|message| {
        let is_it = message["target"]["name"] == "device_half";
        message["executable"].as_str().filter(|_| is_it).map(PathBuf::from)
    });
    programs.next().context("cargo did not say where the benchmark is")
}

fn table(report: &Report) -> String {
    let mut text = format!(
        "\n{}\n\n{:>6} {:>6} {:>10} {:>10} {:>10}  ns\n",
        report.what, "ring", "depth", "min", "median", "max"
    );
    for Format { ring, times, .. } in &report.formats {
        for Time { depth, min, median, max, .. } in times {
            text.push_str(&format!("{ring:>6} {depth:>6} {min:>10.1} {median:>10.1} {max:>10.1}\n"));
        }
    }
    for Format { ring, instructions_per_request, .. } in &report.formats {
        text.push_str(&format!("\n{ring}: {instructions_per_request} instructions per request at depth 64"));
    }
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_of_a_request_is_the_batchs_shared_out() {
        let sample = serde_json::json!({ "iters": [1.0, 2.0, 1.0], "times": [640.0, 1408.0, 6400.0] });
        let time = time(64, &sample).unwrap();
        assert_eq!((time.runs, time.min, time.median, time.max), (3, 10.0, 11.0, 100.0));
    }

    #[test]
    fn sample_without_numbers_is_an_error() {
        assert!(time(1, &serde_json::json!({})).is_err());
        assert!(time(1, &serde_json::json!({ "iters": [], "times": [] })).is_err());
    }

    #[test]
    fn callgrinds_count_is_found_and_nothing_is_none() {
        assert_eq!(collected("==1== Events    : Ir\n==1== Collected : 67077209\n"), Some(67_077_209));
        assert_eq!(collected("==1== Collected : 0\n"), None);
    }
}
