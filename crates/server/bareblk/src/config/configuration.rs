//! All that a server is to serve, checked as a whole: what the command line and a configuration file become.
//!
//! Not here: reading a file (`config_file.rs`), following it (`serving.rs`).

use std::path::PathBuf;
use std::time::Duration;

use blk_server::{BUSY_POLL, Balance, DEFAULT_POLL, WorkerOptions};

use crate::args::serve_args::{PollChoice, ServerArgs, Switch};
use crate::args::values::{Folders, ServerUser};
use crate::config::disk_settings::DiskSettings;

/// What to serve.
#[derive(Clone, Debug)]
pub struct Configuration {
    /// At least one; names, sockets and images do not clash.
    pub disks: Vec<DiskSettings>,
    pub server: ServerSettings,
    /// Where it was read from, and can be read again.
    pub file: Option<PathBuf>,
}

/// What belongs to the process rather than to one disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerSettings {
    pub poll: Duration,
    pub stop_timeout: Duration,
    /// One worker for each.
    pub workers: Vec<WorkerOptions>,
    pub balance: Balance,
    /// `None`: no control socket.
    pub control: Option<PathBuf>,
    pub confinement: Confinement,
}

/// What the process gives up once everything is open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Confinement {
    /// Off: nothing.
    pub sandbox: bool,
    /// `None`: stays who it is.
    pub user: Option<ServerUser>,
    /// `None`: the user's.
    pub group: Option<u32>,
    /// Where control clients may find images and make sockets, besides beside those that were named.
    pub folders: Option<Folders>,
}

impl Default for Confinement {
    fn default() -> Self {
        Self { sandbox: true, user: None, group: None, folders: None }
    }
}

impl Default for ServerSettings {
    fn default() -> Self {
        Self {
            poll: DEFAULT_POLL,
            stop_timeout: Duration::from_secs(30),
            workers: vec![WorkerOptions::default()],
            balance: Balance::default(),
            control: None,
            confinement: Confinement::default(),
        }
    }
}

impl From<ServerArgs> for ServerSettings {
    fn from(args: ServerArgs) -> Self {
        Self {
            poll: match args.poll {
                PollChoice::Adaptive => Duration::from_micros(args.poll_us),
                PollChoice::Busy => BUSY_POLL,
            },
            stop_timeout: Duration::from_secs(args.stop_timeout),
            workers: args.workers.options(),
            balance: args.balance,
            control: args.control,
            confinement: Confinement {
                sandbox: args.sandbox == Switch::On,
                user: args.user,
                group: args.group,
                folders: args.allow_folders,
            },
        }
    }
}
