//! `cargo xtask bench --compare REV`: the device half of another revision beside that of the working tree.
//!
//! `git archive REV → build both → count instructions → time both in turns → table, JSON`
//!
//! Instruction counts are exact. Times are compared as the ratio of two successive runs. The interval is that of the
//! ratio's median over all rounds.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use xtask::{command, workspace};

use super::program::{self, FORMATS};
use super::samples;

/// Folder for the other revision's sources and build, and for the times, in the build folder.
const PLACE: &str = "compare";
const DEPTH: u32 = 64;
const ROUNDS: usize = 10;
/// Of ten ratios, the second smallest and the second largest enclose the median with a probability of 97.9 %.
const LEFT_OUT: usize = 1;
const SHORT: [&str; 6] = ["--warm-up-time", "0.2", "--measurement-time", "0.5", "--noplot", "--bench"];

#[derive(Debug, Serialize)]
struct Report {
    base: String,
    rounds: usize,
    formats: Vec<Row>,
}

/// The results of one ring format. Times are per request at depth 64.
#[derive(Debug, Serialize)]
struct Row {
    ring: &'static str,
    instructions: [u64; 2],
    ns: [f64; 2],
    /// The median, over all rounds, of the working tree's time divided by the base's time.
    ratio: f64,
    interval: [f64; 2],
}

pub(super) fn run(revision: &str) -> Result<()> {
    let place = workspace::build_dir()?.join(PLACE);
    let base = commit(revision)?;
    let source = unpacked(&base, &place)?;
    println!("building {base}");
    let theirs = program::build(&source, program::RELEASE, Some(&place.join("target")))?;
    println!("building the working tree");
    let ours = program::build(&workspace::root(), program::RELEASE, None)?;
    let programs = [theirs.as_path(), ours.as_path()];
    let formats = FORMATS.into_iter().map(|format| row(format, programs, &place)).collect::<Result<_>>()?;
    let report = Report { base, rounds: ROUNDS, formats };
    print!("{}", table(&report));
    let path = place.join("result.json");
    fs::write(&path, serde_json::to_string_pretty(&report)? + "\n")?;
    println!("kept in {}", path.display());
    Ok(())
}

fn commit(revision: &str) -> Result<String> {
    let name = format!("{revision}^{{commit}}");
    let mut git = Command::new("git");
    git.args(["rev-parse", "--verify", "--quiet", &name]).current_dir(workspace::root());
    let found =
        command::output(&mut git).ok().with_context(|| format!("git knows no commit `{revision}`"))?;
    Ok(found.trim().to_owned())
}

/// Unpacks the commit's files, so that git's state does not change.
fn unpacked(commit: &str, place: &Path) -> Result<PathBuf> {
    let source = place.join("source");
    if source.exists() {
        fs::remove_dir_all(&source)?;
    }
    fs::create_dir_all(&source).with_context(|| format!("cannot create {}", source.display()))?;
    let mut git = Command::new("git");
    git.args(["archive", commit]).current_dir(workspace::root()).stdout(Stdio::piped());
    let mut archive = git.spawn().context("cannot start git")?;
    let packed = archive.stdout.take().context("git without standard output")?;
    let unpack = Command::new("tar").arg("-x").current_dir(&source).stdin(packed).status();
    if !unpack.context("cannot start tar")?.success() || !archive.wait()?.success() {
        bail!("cannot unpack {commit} to {}", source.display());
    }
    Ok(source)
}

fn row(
    (ring, group, args): (&'static str, &str, &[&str]),
    programs: [&Path; 2],
    place: &Path,
) -> Result<Row> {
    let instructions = [program::instructions(programs[0], args)?, program::instructions(programs[1], args)?];
    let progress = ProgressBar::new(ROUNDS as u64);
    if let Ok(style) = ProgressStyle::with_template("{msg} {bar:30} round {pos}/{len}") {
        progress.set_style(style);
    }
    progress.set_message(ring);
    let mut rounds = Vec::new();
    for _ in 0..ROUNDS {
        rounds.push([
            time(programs[0], group, &place.join("base"))?,
            time(programs[1], group, &place.join("now"))?,
        ]);
        progress.inc(1);
    }
    progress.finish_and_clear();
    let ratios = sorted(rounds.iter().map(|[base, now]| now / base));
    let median_of = |which: usize| median(&sorted(rounds.iter().map(|round| round[which])));
    let interval = [ratios[LEFT_OUT], ratios[ratios.len() - 1 - LEFT_OUT]];
    Ok(Row { ring, instructions, ns: [median_of(0), median_of(1)], ratio: median(&ratios), interval })
}

fn time(program: &Path, group: &str, home: &Path) -> Result<f64> {
    let mut bench = Command::new(program);
    bench.args(SHORT).arg(format!("{group}/depth/{DEPTH}")).env("CRITERION_HOME", home);
    command::output(&mut bench)?;
    Ok(samples::read(home, group, DEPTH)?.median)
}

fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values
}

fn median(sorted: &[f64]) -> f64 {
    let upper = sorted.len() / 2;
    if sorted.len().is_multiple_of(2) {
        f64::midpoint(sorted[upper - 1], sorted[upper])
    } else {
        sorted[upper]
    }
}

fn table(report: &Report) -> String {
    let mut text = format!(
        "\none 4 KiB read in the device half at depth {DEPTH}, no I/O; base: {}\n\n{:>6} {:<20} {:>8} {:>8}  change\n",
        report.base, "ring", "", "base", "now"
    );
    for Row { ring, instructions: [base, now], ns, ratio, interval } in &report.formats {
        #[allow(clippy::cast_precision_loss)] // thousands
        let change = (*now as f64 / *base as f64 - 1.0) * 100.0;
        text.push_str(&format!("{ring:>6} {:<20} {base:>8} {now:>8}  {change:+.1} %\n", "instructions"));
        text.push_str(&format!(
            "{ring:>6} {:<20} {:>8.1} {:>8.1}  ratio {ratio:.3} ({:.3} to {:.3}, the 97.9 % interval)\n",
            "ns", ns[0], ns[1], interval[0], interval[1]
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_revision_is_refused_with_its_name() {
        let error = run("no-such-revision").unwrap_err().to_string();
        assert_eq!(error, "git knows no commit `no-such-revision`");
    }

    #[test]
    fn median_of_an_even_number_is_between_the_two_in_the_middle() {
        assert_eq!([median(&[1.0, 2.0, 9.0]), median(&[1.0, 2.0, 4.0, 9.0])], [2.0, 3.0]);
    }

    #[test]
    fn table_shows_both_revisions_and_the_change() {
        let row = Row {
            ring: "split",
            instructions: [1000, 750],
            ns: [74.9, 54.1],
            ratio: 0.722,
            interval: [0.71, 0.74],
        };
        let text = table(&Report { base: "abc".to_owned(), rounds: ROUNDS, formats: vec![row] });
        assert!(text.contains("1000      750  -25.0 %"), "{text}");
        assert!(text.contains("74.9     54.1  ratio 0.722 (0.710 to 0.740, the 97.9 % interval)"), "{text}");
    }
}
