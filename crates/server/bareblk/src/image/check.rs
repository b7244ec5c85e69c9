//! `bareblk image check`: the findings, then their sums, in the words of `qemu-img check`.

use std::fmt::Write;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use qcow2::check::{CheckReport, Finding, Severity, check};
use serde::Serialize;

use crate::args::image_args::OneImage;
use crate::command_line;
use crate::ctl::tables::plain;
use crate::image::open::open_unwritten;

/// A damaged image may have millions of findings.
const SHOWN_FINDINGS: usize = 1000;

#[derive(Debug, Serialize)]
struct Report {
    image: String,
    corruptions: u64,
    leaks: u64,
    check_errors: u64,
    image_end_bytes: u64,
    total_clusters: u64,
    allocated_clusters: u64,
    fragmented_clusters: u64,
    compressed_clusters: u64,
    /// The first of them.
    findings: Vec<FindingLine>,
}

#[derive(Debug, Serialize)]
struct FindingLine {
    severity: &'static str,
    text: String,
}

/// Checks the image while no other program writes it.
pub fn run(args: &OneImage) -> Result<ExitCode> {
    let image = open_unwritten(&args.path)?;
    let mut findings = Vec::new();
    let mut note = |finding: &Finding| {
        if findings.len() < SHOWN_FINDINGS {
            findings.push(FindingLine { severity: severity(finding), text: plain(&finding.to_string()) });
        }
    };
    let result = check(&image, &mut note).with_context(|| format!("image {}", args.path.display()))?;
    let report = report(&args.path, result, findings);
    if args.json {
        let json = serde_json::to_string_pretty(&report).context("cannot write JSON")?;
        command_line::print(&(json + "\n"))?;
    } else {
        command_line::print(&text(&report))?;
    }
    Ok(exit_code(&result))
}

fn severity(finding: &Finding) -> &'static str {
    match finding.severity() {
        Severity::Corruption => "corruption",
        Severity::Leak => "leak",
        Severity::CheckError => "check-error",
    }
}

fn report(path: &Path, result: CheckReport, findings: Vec<FindingLine>) -> Report {
    Report {
        image: path.display().to_string(),
        corruptions: result.corruptions,
        leaks: result.leaks,
        check_errors: result.check_errors,
        image_end_bytes: result.image_end_bytes,
        total_clusters: result.total_clusters,
        allocated_clusters: result.allocated_clusters,
        fragmented_clusters: result.fragmented_clusters,
        compressed_clusters: result.compressed_clusters,
        findings,
    }
}

/// Those of `qemu-img check`.
fn exit_code(report: &CheckReport) -> ExitCode {
    ExitCode::from(match report {
        CheckReport { check_errors: 1.., .. } => 1,
        CheckReport { corruptions: 1.., .. } => 2,
        CheckReport { leaks: 1.., .. } => 3,
        _ => 0,
    })
}

fn text(report: &Report) -> String {
    let mut text = String::new();
    for FindingLine { severity, text: line } in &report.findings {
        let _ = writeln!(text, "{severity}: {line}");
    }
    let Report { corruptions, leaks, check_errors, .. } = report;
    let left_out = (corruptions + leaks + check_errors).saturating_sub(report.findings.len() as u64);
    if left_out > 0 {
        let _ = writeln!(text, "and {left_out} more");
    }
    let verdict = match (corruptions, leaks, check_errors) {
        (0, 0, 0) => "no errors".to_owned(),
        _ => format!("{corruptions} corruptions, {leaks} leaked clusters, {check_errors} check errors"),
    };
    let Report { image, total_clusters, allocated_clusters, .. } = report;
    let _ = writeln!(text, "{}: {verdict}", plain(image));
    let Report { fragmented_clusters, compressed_clusters, image_end_bytes, .. } = report;
    let _ = writeln!(
        text,
        "{allocated_clusters} of {total_clusters} clusters allocated, {fragmented_clusters} fragmented, \
         {compressed_clusters} compressed; the image ends at {image_end_bytes}"
    );
    text
}
