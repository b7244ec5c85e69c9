//! `bareblk image check` without a repair: the findings, then their sums.

use std::process::ExitCode;

use anyhow::{Context, Result};
use qcow2::check::check;

use crate::args::image_args::OneImage;
use crate::command_line;
use crate::image::open::open_unwritten;
use crate::image::report::{Findings, Report, exit_code};

/// Checks the image while no other program writes it.
pub fn run(args: &OneImage) -> Result<ExitCode> {
    let image = open_unwritten(&args.path)?;
    let mut findings = Findings::default();
    let result = check(&image, &mut |finding| findings.note(finding))
        .with_context(|| format!("image {}", args.path.display()))?;
    let report = Report::new(&args.path, result, findings);
    if args.json {
        let json = serde_json::to_string_pretty(&report).context("cannot write JSON")?;
        command_line::print(&(json + "\n"))?;
    } else {
        command_line::print(&report.text())?;
    }
    Ok(exit_code(&result))
}
