//! The commands of the program `bareblk-monitor`, with their options.
//!
//! They are defined in this crate so that `bareblk`'s manual pages and completions include them. Only `bareblk-monitor`
//! runs them.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};

use super::ctl_args::{self, pause};

const TOP_EXAMPLES: &str = "\
Examples:
  bareblk top
  bareblk top --control /run/bareblk/*.sock         several servers
  bareblk top --interval 10 --count 6 > minute.txt  tables, because the output is not a terminal
  bareblk top --json --count 1 | jq '.disks[] | {name, iops}'

Press ? for a list of all keys. Columns and screens: docs/how-to/top.md.

Environment:
  BAREBLK_CONTROL  the server's control socket, instead of --control
  NO_COLOR         if set and not empty, no colours

Exit codes: 0 done, 1 an error (one line on standard error), 2 wrong usage, 128 + n ended by signal n";

const EXPORTER_EXAMPLES: &str = "\
Examples:
  bareblk exporter --monitor /run/bareblk/vm1.monitor
  bareblk exporter --monitor '/run/bareblk/*.monitor' --listen 127.0.0.1:9778
  curl http://127.0.0.1:9778/metrics

Pages:
  /metrics    all figures, as OpenMetrics or in Prometheus's text format
  /-/ready    200 if each server answers within a second, else 503 and why
  /-/healthy  200 as long as the exporter runs

Metrics, dashboard and alerts: docs/how-to/monitoring.md.

Exit codes: 1 an error (one line on standard error), 2 wrong usage, 128 + n ended by signal n";

/// A command of `bareblk-monitor`.
#[derive(Debug, Subcommand)]
pub enum MonitorCommand {
    /// Watch running servers: disks, queues, workers and limits, once per interval
    #[command(after_help = TOP_EXAMPLES)]
    Top(TopArgs),
    /// Serve the figures of running servers to Prometheus, over HTTP
    #[command(after_help = EXPORTER_EXAMPLES)]
    Exporter(ExporterArgs),
}

/// The options of `bareblk exporter`.
#[derive(Debug, Args)]
pub struct ExporterArgs {
    /// Monitor sockets of servers; `*` and `?` in a path stand for all servers that exist at the time of a scrape
    #[arg(long, value_name = "PATH", num_args = 1.., required = true)]
    pub monitor: Vec<String>,

    /// Address for HTTP, which has neither encryption nor a login; port 0: any free port
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:9778")]
    pub listen: SocketAddr,

    /// Leave out disks that would make an answer have more samples than this
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    pub max_series: usize,
}

/// The options of `bareblk top`.
#[derive(Debug, Args)]
pub struct TopArgs {
    /// Control sockets of one or more servers [default: $BAREBLK_CONTROL, or /run/bareblk/control.sock]
    #[arg(long, alias = "socket", value_name = "PATH", num_args = 1..)]
    control: Vec<PathBuf>,

    /// Time between two readings in seconds, such as 0.5
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = pause)]
    pub interval: Duration,

    /// End after N intervals
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,

    /// Print a line of JSON for each server and interval
    #[arg(long)]
    pub json: bool,
}

impl TopArgs {
    /// The paths from the option, else the one from the environment, else the default.
    #[must_use]
    pub fn control(&self) -> Vec<PathBuf> {
        if self.control.is_empty() { vec![ctl_args::socket(None)] } else { self.control.clone() }
    }
}
