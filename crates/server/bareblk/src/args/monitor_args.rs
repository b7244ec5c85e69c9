//! The commands of the program `bareblk-monitor`, with their options.
//!
//! They are defined here, so that pages and completions of `bareblk` have them. Only `bareblk-monitor` runs them.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};

use super::ctl_args::{self, pause};

const TOP_EXAMPLES: &str = "\
Examples:
  bareblk top
  bareblk top --control /run/bareblk/a.sock
  bareblk top --interval 10 --count 6 > minute.txt";

/// A command of `bareblk-monitor`.
#[derive(Debug, Subcommand)]
pub enum MonitorCommand {
    /// Show the rates of a running server, once per interval
    #[command(after_help = TOP_EXAMPLES)]
    Top(TopArgs),
}

/// The options of `bareblk top`.
#[derive(Debug, Args)]
pub struct TopArgs {
    /// The server's control socket [default: $BAREBLK_CONTROL, or /run/bareblk/control.sock]
    #[arg(long, alias = "socket", value_name = "PATH")]
    control: Option<PathBuf>,

    /// Time between two readings, such as 0.5
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = pause)]
    pub interval: Duration,

    /// End after N intervals
    #[arg(long, value_name = "N")]
    pub count: Option<u64>,
}

impl TopArgs {
    /// The path from the option, else from the environment, else the default.
    #[must_use]
    pub fn control(&self) -> PathBuf {
        ctl_args::socket(self.control.as_deref())
    }
}
