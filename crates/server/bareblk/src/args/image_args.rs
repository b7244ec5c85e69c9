//! The options of `bareblk image`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

pub const EXAMPLES: &str = "\
Examples:
  bareblk image info disk.qcow2
  bareblk image check disk.qcow2 --json
  bareblk image check disk.qcow2 --repair leaks

Exit codes:
  0  no error, or none after the repair
  1  the image cannot be read, not checked as a whole, or not repaired
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
    /// Compare a qcow2 image's reference counts with its tables; changes nothing without --repair
    Check(CheckArgs),
}

#[derive(Debug, Args)]
pub struct CheckArgs {
    #[command(flatten)]
    pub image: OneImage,

    /// Repair the image, which no program may use, and check it again
    #[arg(long, value_name = "WHAT")]
    pub repair: Option<Repair>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Repair {
    /// Free leaked clusters; leave corruptions as they are
    Leaks,
    /// Also correct reference counts and entries of tables
    All,
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
