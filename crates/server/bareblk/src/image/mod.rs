//! `bareblk image`: what qcow2 images contain, and whether their tables are sound; repairs them.
//!
//! `path → open.rs → info.rs | check.rs | repair.rs → text or JSON (report.rs), exit code`
//!
//! The command opens only the named file. The author of the image has chosen the names of other files in it.

mod check;
mod info;
mod open;
mod repair;
mod report;

use std::process::ExitCode;

use anyhow::Result;

use crate::args::image_args::{CheckArgs, ImageArgs, ImageCommand};

/// Runs the command. Returns its exit code.
pub fn run(args: &ImageArgs) -> Result<ExitCode> {
    match &args.command {
        ImageCommand::Info(image) => info::run(image),
        ImageCommand::Check(CheckArgs { image, repair: None }) => check::run(image),
        ImageCommand::Check(CheckArgs { image, repair: Some(what) }) => repair::run(image, *what),
    }
}
