//! `cargo xtask bench`: the cost of a request in the device half, in time and instructions.
//!
//! Measures time with the criterion benchmark, counts instructions with callgrind, prints a table and keeps
//! it in `bench_results/`. Instruction counts are exactly repeatable; times vary with the machine.

mod compare;
mod program;
mod ratchet;
mod samples;

use std::path::Path;
use std::process::Command;

use anyhow::Result;
use serde::Serialize;
use xtask::{command, workspace};

use crate::origin::{self, Origin};
use program::FORMATS;
use samples::Time;

const DEPTHS: [u32; 3] = [1, 8, 64];

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Also measure this revision, alternating with the working tree, and print what changed
    #[arg(long, value_name = "REV", conflicts_with = "ratchet")]
    compare: Option<String>,
    /// Only count instructions, and fail if there are more than `xtask/instructions.txt` allows
    #[arg(long)]
    ratchet: bool,
}

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
    /// Instructions per request at depth 64, between the kick and the call.
    instructions_per_request: u64,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    match &args.compare {
        Some(revision) => compare::run(revision),
        None if args.ratchet => ratchet::check(),
        None => measure(),
    }
}

fn measure() -> Result<()> {
    let bench = ["bench", "--package", "blk_server", "--bench", "device_half"];
    command::run(Command::new(workspace::cargo()).args(bench).current_dir(workspace::root()))?;
    let program = program::build(&workspace::root(), program::RELEASE, None)?;
    let report = Report {
        origin: Origin::now()?,
        what: "one 4 KiB read in the device half, kick and call included, no I/O",
        formats: FORMATS
            .map(|(ring, group, args)| format(&program, ring, group, args))
            .into_iter()
            .collect::<Result<_>>()?,
    };
    print!("{}", table(&report));
    println!("kept in {}", origin::keep(&report.origin, "device-half", "result.json", &report)?.display());
    Ok(())
}

fn format(program: &Path, ring: &'static str, group: &str, args: &[&str]) -> Result<Format> {
    let home = workspace::build_dir()?.join("criterion");
    let times = DEPTHS.iter().map(|&depth| samples::read(&home, group, depth)).collect::<Result<_>>()?;
    Ok(Format { ring, times, instructions_per_request: program::instructions(program, args)? })
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
