//! The options of `bareblk image`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

pub const EXAMPLES: &str = "\
Examples:
  bareblk image info disk.qcow2
  bareblk image check disk.qcow2 --json

Exit codes:
  0  no error
  1  the image cannot be read, or not checked as a whole
  2  check: corruptions, or wrong usage of this command
  3  check: leaks, but no corruptions";

#[derive(Debug, Args)]
pub struct ImageArgs {
    #[command(subcommand)]
    pub command: ImageCommand,
}

#[derive(Debug, Subcommand)]
pub enum ImageCommand {
    /// Print what a qcow2 image says about itself: sizes, features, backing file, snapshots
    Info(OneImage),
    /// Compare a qcow2 image's reference counts with its tables; changes nothing
    Check(OneImage),
}

#[derive(Debug, Args)]
pub struct OneImage {
    /// A qcow2 image that no program writes
    #[arg(value_name = "IMAGE")]
    pub path: PathBuf,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}
