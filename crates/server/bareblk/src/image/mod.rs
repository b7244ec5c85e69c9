//! `bareblk image`: what qcow2 images contain, and whether their tables are sound.
//!
//! `path → open.rs → info.rs | check.rs → text or JSON, exit code`
//!
//! The command opens only the named file. The author of the image has chosen the names of other files in it.

mod check;
mod info;
mod open;

use std::process::ExitCode;

use anyhow::Result;

use crate::args::image_args::{ImageArgs, ImageCommand};

/// Runs the command. Returns its exit code.
pub fn run(args: &ImageArgs) -> Result<ExitCode> {
    match &args.command {
        ImageCommand::Info(image) => info::run(image),
        ImageCommand::Check(image) => check::run(image),
    }
}
