//! The result of a check, as text in the words of `qemu-img check`, as JSON, and as an exit code.

use std::fmt::Write;
use std::path::Path;
use std::process::ExitCode;

use qcow2::check::{CheckReport, Finding, Severity};
use serde::Serialize;

use crate::ctl::tables::plain;

/// A damaged image may have millions of findings.
pub const SHOWN_FINDINGS: usize = 1000;

/// The first findings of a check.
#[derive(Debug, Default)]
pub struct Findings(Vec<FindingLine>);

#[derive(Debug, Serialize)]
struct FindingLine {
    severity: &'static str,
    text: String,
}

impl Findings {
    pub fn note(&mut self, finding: &Finding) {
        if self.0.len() < SHOWN_FINDINGS {
            self.0.push(FindingLine { severity: severity(finding), text: plain(&finding.to_string()) });
        }
    }
}

fn severity(finding: &Finding) -> &'static str {
    match finding.severity() {
        Severity::Corruption => "corruption",
        Severity::Leak => "leak",
        Severity::CheckError => "check-error",
    }
}

#[derive(Debug, Serialize)]
pub struct Report {
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

impl Report {
    pub fn new(path: &Path, result: CheckReport, findings: Findings) -> Self {
        Self {
            image: path.display().to_string(),
            corruptions: result.corruptions,
            leaks: result.leaks,
            check_errors: result.check_errors,
            image_end_bytes: result.image_end_bytes,
            total_clusters: result.total_clusters,
            allocated_clusters: result.allocated_clusters,
            fragmented_clusters: result.fragmented_clusters,
            compressed_clusters: result.compressed_clusters,
            findings: findings.0,
        }
    }

    pub fn text(&self) -> String {
        let mut text = String::new();
        for FindingLine { severity, text: line } in &self.findings {
            let _ = writeln!(text, "{severity}: {line}");
        }
        let Self { corruptions, leaks, check_errors, .. } = self;
        let left_out = (corruptions + leaks + check_errors).saturating_sub(self.findings.len() as u64);
        if left_out > 0 {
            let _ = writeln!(text, "and {left_out} more");
        }
        let verdict = match (corruptions, leaks, check_errors) {
            (0, 0, 0) => "no errors".to_owned(),
            _ => {
                format!("corruptions: {corruptions}, leaked clusters: {leaks}, check errors: {check_errors}")
            }
        };
        let Self { image, total_clusters, allocated_clusters, .. } = self;
        let _ = writeln!(text, "{}: {verdict}", plain(image));
        let Self { fragmented_clusters, compressed_clusters, image_end_bytes, .. } = self;
        let _ = writeln!(
            text,
            "{allocated_clusters} of {total_clusters} clusters allocated, {fragmented_clusters} fragmented, \
             {compressed_clusters} compressed; the image ends at {image_end_bytes}"
        );
        text
    }
}

/// Those of `qemu-img check`.
pub fn exit_code(report: &CheckReport) -> ExitCode {
    ExitCode::from(match report {
        CheckReport { check_errors: 1.., .. } => 1,
        CheckReport { corruptions: 1.., .. } => 2,
        CheckReport { leaks: 1.., .. } => 3,
        _ => 0,
    })
}
