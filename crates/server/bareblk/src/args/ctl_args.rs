//! `bareblk ctl`: its words and flags.
//!
//! Not here: what they do (`ctl.rs`).

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};
use serde_json::Value;

use crate::args::values::{image_bytes, number};
use crate::args::worker_args::WorkerArgs;
use crate::control::limits::MAX_TIMEOUT_MS;

/// Where a server listens if nobody says otherwise.
pub const DEFAULT_SOCKET: &str = "/run/bareblk/control.sock";
/// Names another place.
pub const SOCKET_VARIABLE: &str = "BAREBLK_CONTROL";

pub const EXAMPLES: &str = "\
Examples:
  bareblk serve disk.raw --socket /run/vm1.sock --control /run/bareblk/control.sock
      a server that can be looked at and changed
  bareblk ctl list
  bareblk ctl stats --watch 1
      IOPS, MB/s and processor time, every second
  bareblk ctl workers add --cpus 2,3
  bareblk ctl attach data 0 1
      the disk's queue 0 goes on at worker 1
  bareblk ctl placement data --completion-worker 1
      of a disk with --placement completion or shared
  bareblk ctl add name=data image=/images/data.raw socket=/run/vm1-data.sock queues=4
      one more disk; the settings of a [[disk]] table in bareblk.toml
  bareblk ctl resize data 40G
  bareblk ctl resume data
      there is room again on the image's file system
  bareblk ctl remove data
  bareblk ctl stats --json | jq .ok.workers

Permissions:
  Only root and the user who runs the server may. The protocol: docs/reference/control.md.

Environment:
  BAREBLK_CONTROL  the server's control socket, instead of --socket

Exit codes: 0 done, 1 an error (one line on standard error), 2 wrong usage";

#[derive(Debug, Args)]
pub struct CtlArgs {
    /// The server's control socket [default: $BAREBLK_CONTROL, or /run/bareblk/control.sock]
    #[arg(long, value_name = "PATH", global = true)]
    pub socket: Option<PathBuf>,

    /// Print the server's answer as it is, one line of JSON
    #[arg(long, global = true)]
    pub json: bool,

    #[command(subcommand)]
    pub command: CtlCommand,
}

impl CtlArgs {
    /// Flag, environment, default.
    pub fn socket(&self) -> PathBuf {
        let variable =
            || std::env::var_os(SOCKET_VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from);
        self.socket.clone().or_else(variable).unwrap_or_else(|| DEFAULT_SOCKET.into())
    }
}

#[derive(Debug, Subcommand)]
pub enum CtlCommand {
    /// Disks: images, sockets, sizes, who is connected
    List,
    /// Counters of disks, queues and workers
    Stats {
        /// Again and again, this many seconds apart, as rates
        #[arg(long, value_name = "SECONDS", value_parser = number("whole seconds, without a unit,", 1..=3600_u64))]
        watch: Option<u64>,
    },
    /// Workers: which there are; one more; one fewer
    Workers {
        #[command(subcommand)]
        command: Option<WorkersCommand>,
    },
    /// Hand a disk's queue to a worker, under load or not
    Attach {
        /// The disk's name: see `bareblk ctl list`
        disk: String,
        /// The queue's number, from 0
        queue: u16,
        /// The worker's number: see `bareblk ctl workers`
        worker: u32,
        #[command(flatten)]
        timeout: Timeout,
    },
    /// Where a disk's requests are carried out; another completion worker for it, under load or not
    Placement {
        /// The disk's name
        disk: String,
        /// The worker that is to handle its completions; none: the workers choose
        #[arg(long, value_name = "N|none", value_parser = choice)]
        completion_worker: Option<Choice>,
        #[command(flatten)]
        timeout: Timeout,
    },
    /// Serve one more disk
    Add {
        /// Keys of a disk's table in bareblk.toml: name=data image=data.raw socket=data.sock readonly=true
        #[arg(value_name = "KEY=VALUE", required = true, value_parser = setting)]
        settings: Vec<(String, Value)>,
    },
    /// Stop serving a disk; its image is flushed and its socket goes
    Remove {
        /// The disk's name
        disk: String,
        /// Even if a virtual machine is connected
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        timeout: Timeout,
    },
    /// Give a disk another size and tell its virtual machine
    Resize {
        /// The disk's name
        disk: String,
        /// The new size (K, M, G, T: powers of 1024)
        #[arg(value_parser = image_bytes)]
        size: u64,
        /// Even if it is smaller: what lies behind is lost
        #[arg(long)]
        force: bool,
    },
    /// Try the requests again that a disk holds (--on-error hold), now that its storage is well
    Resume {
        /// The disk's name
        disk: String,
        #[command(flatten)]
        timeout: Timeout,
    },
    /// Read the configuration file, and the images' sizes, again
    Reload,
    /// Stop the server in order; returns when it has
    Shutdown,
}

#[derive(Debug, Subcommand)]
pub enum WorkersCommand {
    /// Which there are
    List,
    /// Start one more; it gets no queue by itself
    Add(WorkerArgs),
    /// End one; its queues go to the others first
    Remove {
        /// Its number
        worker: u32,
        #[command(flatten)]
        timeout: Timeout,
    },
}

#[derive(Clone, Copy, Debug, Args)]
pub struct Timeout {
    /// How long requests in flight may take to complete, in seconds
    #[arg(long = "timeout", value_name = "S", default_value_t = 10, value_parser = number("whole seconds, without a unit,", 0..=MAX_TIMEOUT_MS / 1000))]
    pub seconds: u64,
}

/// A worker, or `None`: in a type of its own, as clap takes an `Option` for a value that may be left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice(pub Option<u32>);

fn choice(text: &str) -> Result<Choice> {
    if text == "none" {
        return Ok(Choice(None));
    }
    let worker = text.parse().context("give the number of a worker (see `bareblk ctl workers`), or none")?;
    Ok(Choice(Some(worker)))
}

/// `queues=4` is a number, `readonly=true` a truth, `image=disk.raw` a text, as the same would be in TOML; quotes make
/// a text of anything.
fn setting(text: &str) -> Result<(String, Value)> {
    let Some((key, value)) = text.split_once('=').filter(|(key, _)| !key.is_empty()) else {
        bail!("give KEY=VALUE");
    };
    let parsed = toml::from_str::<Line>(&format!("value = {value}")).ok();
    let value = parsed.map_or_else(|| Value::from(value), |line| line.value);
    Ok((key.to_owned(), value))
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    value: Value,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worker_is_a_number_or_none() {
        assert_eq!((choice("none").unwrap(), choice("7").unwrap()), (Choice(None), Choice(Some(7))));
        for text in ["", "None", "-1", "4294967296"] {
            assert!(choice(text).is_err(), "{text}");
        }
    }

    #[test]
    fn settings_have_the_types_that_toml_gives_them() {
        let value = |text| setting(text).unwrap().1;
        assert_eq!(value("queues=4"), Value::from(4));
        assert_eq!(value("readonly=true"), Value::from(true));
        assert_eq!(value("image=/a/b.raw"), Value::from("/a/b.raw"));
        assert_eq!(value("serial=\"42\""), Value::from("42"));
        assert_eq!(value("serial=a=b"), Value::from("a=b"));
        assert_eq!(value("serial=1\nimage = 2"), Value::from("1\nimage = 2"));
    }

    #[test]
    fn setting_without_key_or_value_is_refused() {
        assert!(setting("queues").is_err());
        assert!(setting("=4").is_err());
    }
}
