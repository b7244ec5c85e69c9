//! The settings of `bareblk serve`: each is declared here once, with its help, its default and its limits.
//!
//! `command line, configuration file, or ctl add → clap → DiskArgs, ServerArgs → Configuration`
//!
//! - A field of [`DiskArgs`] is an option of the command line, a key of a `[[disk]]` table and a key of `ctl add`.
//! - A field of [`ServerArgs`] is an option of the command line and a key at the top of the file.

use std::path::PathBuf;
use std::time::Duration;

use blk_server::{BUSY_POLL, Balance, Coalescing, MAX_QUEUE_SIZE, ParkPolicy, ParkWhat, SocketConfig, Wce};
use clap::{Arg, Args, ValueEnum};
use disk_image::CacheMode;

use crate::args::engine_args::EngineArgs;
use crate::args::limit_args::LimitArgs;
use crate::args::placement_args::PlacementArgs;
use crate::args::values::{self, Folders, ServerUser};
use crate::args::worker_args::WorkersArgs;
use crate::logging::LogArgs;

/// Time between retries of parked requests: short, so that an operator who has made room does not wait long.
const DEFAULT_RETRY_AFTER_S: u64 = 10;

pub const EXAMPLES: &str = "\
Examples:
  bareblk serve disk.raw --socket /run/vm1.sock --create 20G
      creates a disk of 20 GiB and serves it
  bareblk serve /dev/nvme0n1p3 --socket /run/vm1.sock --socket-mode 660 --socket-group kvm
      serves a partition; members of the group kvm may connect
  bareblk serve base.raw --socket /run/vm2.sock --readonly --cache writeback
      several servers may share an image if none of them writes to it
  bareblk serve vm3.qcow2 --socket /run/vm3.sock --format qcow2 --backing-folders /srv/bases
      a qcow2 image, whose backing files may be in /srv/bases
  bareblk serve disk.raw --socket /run/vm1.sock --discard off
      keeps a preallocated image allocated
  bareblk serve disk.raw --socket /run/vm1.sock --cache directsync --wce fixed
      every write is durable when it completes; the guest cannot change that
  bareblk serve disk.raw --socket /run/vm1.sock --cpus 2-3
      two workers, each on its own CPU
  bareblk serve sparse.raw --socket /run/vm1.sock --on-error hold-on-enospc
      the guest waits while the host's file system is full
  bareblk serve scratch.raw --socket /run/vm1.sock --cache unsafe
      for data that can be recreated: fast, and lost if the host crashes
  bareblk serve disk.raw --socket /run/bareblk/vm1.sock --control /run/bareblk/control.sock
      lets bareblk ctl inspect and change the server while it runs
  bareblk serve disk.raw --socket /run/bareblk/vm1.sock --monitor /run/bareblk/vm1.monitor --monitor-group bareblk-monitor
      lets bareblk exporter read figures for Prometheus; members of the group may connect
  bareblk serve --config bareblk.toml --take-over /run/bareblk/control.sock
      a live upgrade: takes over the disks and the guests of the running server
  bareblk serve --config bareblk.toml --check
      lists all mistakes in the file, or shows what it would serve; exit code 0 or 1
  bareblk serve --config bareblk.toml
      serves many disks: the file has a table for each, with these options as keys

Cache modes, as in QEMU:
  none          O_DIRECT; the guest's flushes make its writes durable
  writeback     through the host's page cache; flushes as above
  writethrough  through the host's page cache; writes are durable when they complete
  directsync    O_DIRECT; writes are durable when they complete
  unsafe        through the host's page cache; flushes are ignored

When a request fails on the host (a failed flush is always reported):
  report          the guest gets an I/O error
  hold            the guest waits, as for a slow disk, until a retry succeeds
  hold-on-enospc  the guest waits if space or quota is used up; else it gets the error

Standard output:
  Once front-ends can connect: bareblk: serving IMAGE on SOCKET
  With --config one such line per disk, then: bareblk: serving N disks

Signals:
  SIGTERM, SIGINT  take no more requests, finish those in flight, flush, remove
                   the socket, exit with 0; a second signal, at least half a
                   second later, ends the server at once with 143 or 130
  SIGHUP           read the images' sizes again and tell guests whose disk grew.
                   With --config also read the file again and apply it: disks in
                   use keep their settings; a file with a mistake changes nothing

Environment:
  RUST_LOG         log filter, instead of -v: debug, or blk_server=trace,warn
  NO_COLOR         if set, the log has no colours; it has colours only in a terminal
  NOTIFY_SOCKET    the service manager's socket: start, reload and stop are reported to it
  WATCHDOG_USEC    the service manager expects a sign of life from workers and main
                   loop at least once in this many microseconds
  WATCHDOG_PID     the process to which WATCHDOG_USEC applies
  LISTEN_FDS       number of sockets that the service manager passes, from
                   descriptor 3 on
  LISTEN_PID       the process to which LISTEN_FDS applies
  LISTEN_FDNAMES   the names of the passed sockets, which can be disks' names

Exit codes:
  0         clean stop
  1         an error, or a stop that was not clean: one line on standard error
  2         wrong usage: one line on standard error
  130, 143  ended at once by a second SIGINT or SIGTERM
  134       ended by SIGABRT: a bug of this program; the log has the details
  159       ended by the sandbox: standard error names the refused system call,
            unless the kernel's SIGSYS ended the process";

/// Refuses options that the configuration file also has: it would be unclear which value applies.
fn not_beside_a_file(arg: Arg) -> Arg {
    match arg.get_id().as_str() {
        "config" | "check" | "take_over" | "take_over_cut" | "verbose" | "log_format" => arg,
        _ => arg.conflicts_with("config"),
    }
}

#[derive(Debug, Args)]
#[command(mut_args = not_beside_a_file)]
pub struct ServeArgs {
    /// The disk: an image file (raw, or qcow2 with --format qcow2), a block device, an export of an NBD server (nbd://HOST[:PORT]/EXPORT, or
    /// nbd+unix:///EXPORT?socket=PATH; with TLS nbds://… or nbds+unix://…), or an image in a Ceph cluster
    /// (rbd:POOL/IMAGE[@SNAPSHOT])
    #[arg(required_unless_present = "config")]
    pub image: Option<PathBuf>,

    /// Socket to which virtual machines connect; the server creates it, and replaces one that a dead server left behind
    #[arg(long, value_name = "PATH", required_unless_present = "config")]
    pub socket: Option<PathBuf>,

    /// Serve the disks in this TOML file, one table for each; all settings except those of the log must be in the file
    #[arg(long, value_name = "PATH")]
    pub config: Option<PathBuf>,

    /// Check the command line or the file, and the images; print what would be served, and exit without serving it
    #[arg(long, conflicts_with = "take_over")]
    pub check: bool,

    /// Live upgrade: take over the disks and guests of the server with this control socket, without a reconnect
    #[arg(long, value_name = "SOCKET")]
    pub take_over: Option<PathBuf>,

    /// Disconnect the front-ends of this disk instead of taking them over; they have to reconnect. May be repeated
    #[arg(long, value_name = "DISK", requires = "take_over")]
    pub take_over_cut: Vec<String>,

    #[command(flatten)]
    pub disk: DiskArgs,

    #[command(flatten)]
    pub server: ServerArgs,

    #[command(flatten)]
    pub log: LogArgs,
}

/// The settings of one disk, except for its image and its socket.
#[derive(Clone, Debug, Args)]
pub struct DiskArgs {
    /// The disk's name in logs and for `bareblk ctl` [default: the image's path]
    #[arg(long, value_name = "NAME", value_parser = values::disk_name)]
    pub name: Option<String>,

    /// Maximum number of queues for the guest; QEMU uses one per vCPU by default; unused queues cost nothing
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = values::queues)]
    pub queues: u16,

    /// Maximum size of a queue in descriptors, a power of two; a request has at most N - 2 segments
    #[arg(long, value_name = "N", default_value_t = MAX_QUEUE_SIZE, value_parser = values::queue_size)]
    pub queue_size: u16,

    /// Whether to use the host's page cache, and when writes become durable; see below
    #[arg(long, value_name = "MODE", default_value = "none", value_parser = values::cache_mode())]
    pub cache: CacheMode,

    /// Whether the guest may switch the disk's write cache on and off (guest), or --cache alone decides (fixed)
    #[arg(long, value_name = "guest|fixed", value_enum, default_value_t = WceChoice::Guest, hide_possible_values = true)]
    pub wce: WceChoice,

    /// Interrupt the guest once per N completions, or US microseconds after the first: less guest CPU, more latency
    /// [default: off]
    #[arg(long, value_name = "N,US")]
    pub coalesce: Option<Coalescing>,

    /// When a request fails on the host: report the error to the guest, or park and retry the request (hold); see below
    #[arg(long, value_name = "report|hold|hold-on-enospc", value_enum, default_value_t = OnError::Report, hide_possible_values = true)]
    on_error: OnError,

    /// Seconds between retries of parked requests; 0: retry only on `bareblk ctl resume`
    #[arg(long, value_name = "S", default_value_t = DEFAULT_RETRY_AFTER_S, value_parser = values::timeout_s)]
    retry_after: u64,

    /// Log requests that take at least this many milliseconds, and keep the latest for `bareblk ctl slow` [default: off]
    #[arg(long, value_name = "MS", value_parser = values::number("whole milliseconds, without a unit,", 1..=3_600_000_u64))]
    pub slow_ms: Option<u64>,

    /// Refuse writes; other readers may then share the image
    #[arg(long)]
    pub readonly: bool,

    /// The disk's serial number, up to 20 characters [default: 20 hex digits from the image's path]
    #[arg(long, value_name = "TEXT", value_parser = values::serial)]
    pub serial: Option<String>,

    /// Logical block size in bytes: 512 to 4096 [default: what direct I/O on the image needs]
    #[arg(long, value_name = "BYTES")]
    pub block_size: Option<u32>,

    /// raw: serve the image as raw even if its first bytes are those of another format [default: refuse it]; qcow2: with its
    /// backing files, which are only read
    #[arg(long, value_name = "raw|qcow2", value_enum, hide_possible_values = true)]
    pub format: Option<Format>,

    /// Folders in which a qcow2 image's backing files and data file may be [default: it may name none]
    #[arg(long, value_name = "DIR[:DIR]")]
    pub backing_folders: Option<Folders>,

    /// Let the guest free blocks; off keeps a preallocated image allocated
    #[arg(long, value_name = "on|off", value_enum, default_value_t = Switch::On, hide_possible_values = true)]
    pub discard: Switch,

    /// Create the image with this size (K, M, G, T: powers of 1024); it must not exist
    #[arg(long, value_name = "SIZE", value_parser = values::image_bytes)]
    pub create: Option<u64>,

    /// With --create and --format qcow2: the new image's backing file, in one of --backing-folders
    #[arg(long, value_name = "FILE")]
    pub backing: Option<PathBuf>,

    /// The format of --backing
    #[arg(long, value_name = "raw|qcow2", value_enum, hide_possible_values = true)]
    pub backing_format: Option<Format>,

    /// Permissions of the socket, in octal
    #[arg(long, value_name = "MODE", default_value = "600", value_parser = values::socket_mode)]
    pub socket_mode: u32,

    /// Owner of the socket, name or number [default: the user that starts bareblk]
    #[arg(long, value_name = "USER")]
    pub socket_owner: Option<String>,

    /// Group of the socket, name or number [default: the group of the user that starts bareblk]
    #[arg(long, value_name = "GROUP")]
    pub socket_group: Option<String>,

    /// How long to wait for an image that another process has locked, in seconds
    #[arg(long, value_name = "S", default_value_t = 30, value_parser = values::timeout_s)]
    pub lock_timeout: u64,

    /// How long a request to an NBD server may stay without a reply, in seconds; it then fails (see --on-error)
    #[arg(long, value_name = "S", default_value_t = 30, value_parser = values::timeout_s)]
    pub nbd_timeout: u64,

    /// RBD: the cluster's configuration file
    #[arg(long, value_name = "FILE", default_value = "/etc/ceph/ceph.conf")]
    pub rbd_conf: PathBuf,

    /// RBD: the cluster's user, without `client.`
    #[arg(long, value_name = "NAME", default_value = "admin")]
    pub rbd_id: String,

    /// RBD: take the image's exclusive lock; off: nothing keeps other clients from writing to the image
    #[arg(long, value_name = "ON-OFF", value_enum, default_value_t = Switch::On)]
    pub rbd_lock: Switch,

    /// RBD: share one connection to the cluster with the other disks that have this option; if one of them loses its lock,
    /// all of them fail
    #[arg(long)]
    pub rbd_share_connection: bool,

    #[command(flatten)]
    pub engine: EngineArgs,

    #[command(flatten)]
    pub placement: PlacementArgs,

    #[command(flatten)]
    pub limits: LimitArgs,
}

/// The settings of the whole process.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Server")]
pub struct ServerArgs {
    /// How long to wait for requests in flight when stopping, in seconds
    #[arg(long, value_name = "S", default_value_t = 30, value_parser = values::timeout_s)]
    pub stop_timeout: u64,

    /// Socket for `bareblk ctl`; root and the server's user may connect [default: none]
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,

    /// Socket that answers the queries of `bareblk ctl` but changes nothing: for `bareblk exporter` and `top`
    /// [default: none]
    #[arg(long, value_name = "PATH")]
    pub monitor: Option<PathBuf>,

    /// Group that may connect to the monitor socket, name or number [default: that of the user that starts bareblk]
    #[arg(long, value_name = "GROUP", value_parser = values::group_id, requires = "monitor")]
    pub monitor_group: Option<u32>,

    #[command(flatten)]
    pub workers: WorkersArgs,

    // clap shows it below the heading of the workers.
    /// busy: workers never sleep once a guest runs, and each needs its own CPU; adaptive: idle workers sleep
    #[arg(long, value_name = "adaptive|busy", value_enum, default_value_t = PollChoice::Adaptive, hide_possible_values = true)]
    poll: PollChoice,

    /// Maximum time that a worker polls before it sleeps, in microseconds; 0: no polling
    #[arg(long, value_name = "US", default_value_t = values::default_poll_us(),
        value_parser = values::number("whole microseconds, without a unit,", 0..=1_000_000_u64))]
    poll_us: u64,

    /// auto: move queues between workers by measured load, except queues that `bareblk ctl attach` placed
    #[arg(long, value_name = "auto|off", default_value = "auto", value_parser = values::balance(), hide_possible_values = true)]
    pub balance: Balance,

    #[command(flatten)]
    pub confinement: Confinement,
}

/// The rights that the process keeps.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Privileges")]
pub struct Confinement {
    /// Drop all privileges that serving does not need; turn this off only to find a fault
    #[arg(long, value_name = "on|off", value_enum, default_value_t = Switch::On, hide_possible_values = true)]
    pub sandbox: Switch,

    /// Serve as this user, name or number; images and sockets are opened with the rights of the user that starts bareblk
    #[arg(long, value_name = "USER", value_parser = values::user)]
    pub user: Option<ServerUser>,

    /// Serve as this group, name or number [default: the user's primary group]
    // A file with [[group]] tables cannot also have a key `group`, so the option has an alias.
    #[arg(long, alias = "server-group", value_name = "GROUP", value_parser = values::group_id)]
    pub group: Option<u32>,

    /// Folders in which `bareblk ctl add` may open images and create sockets, besides those of the disks given at the
    /// start
    #[arg(long, value_name = "DIR[:DIR]")]
    pub allow_folders: Option<Folders>,
}

impl ServerArgs {
    /// The maximum time that a worker polls before it sleeps.
    pub fn poll(&self) -> Duration {
        match self.poll {
            PollChoice::Adaptive => Duration::from_micros(self.poll_us),
            PollChoice::Busy => BUSY_POLL,
        }
    }

    pub fn stop_timeout(&self) -> Duration {
        Duration::from_secs(self.stop_timeout)
    }

    pub fn control_socket(&self) -> Option<SocketConfig> {
        let path = self.control.clone()?;
        Some(SocketConfig { path, mode: 0o600, uid: None, gid: None })
    }

    pub fn monitor_socket(&self) -> Option<SocketConfig> {
        let path = self.monitor.clone()?;
        Some(SocketConfig { path, mode: 0o660, uid: None, gid: self.monitor_group })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PollChoice {
    Adaptive,
    Busy,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    On,
    Off,
}

/// The format of an image's contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// The file's bytes are the disk's.
    Raw,
    /// The file has tables, and may name other files.
    Qcow2,
}

impl Format {
    /// The format's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        }
    }
}

impl DiskArgs {
    /// Requests that take at least this long are slow; `None`: no request is.
    pub fn slow_limit(&self) -> Option<Duration> {
        self.slow_ms.map(Duration::from_millis)
    }

    /// Whether the image is known to be raw: the operator gave `--format raw`, or this program creates the image.
    pub fn is_known_raw(&self) -> bool {
        self.format == Some(Format::Raw) || self.create.is_some()
    }

    /// Whether the image is mapped through tables.
    pub fn is_qcow2(&self) -> bool {
        self.format == Some(Format::Qcow2)
    }

    /// Which requests that fail on the host are parked; `None`: the guest gets every error.
    pub fn park(&self) -> Option<ParkPolicy> {
        self.on_error.park(self.retry_after)
    }
}

/// What happens to a request that fails on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OnError {
    Report,
    Hold,
    HoldOnEnospc,
}

impl OnError {
    /// `retry_after_s`: 0 means that only `ctl resume` retries.
    fn park(self, retry_after_s: u64) -> Option<ParkPolicy> {
        let what = match self {
            Self::Report => return None,
            Self::Hold => ParkWhat::Any,
            Self::HoldOnEnospc => ParkWhat::NoSpace,
        };
        let retry_after = (retry_after_s > 0).then(|| Duration::from_secs(retry_after_s));
        Some(ParkPolicy { what, retry_after })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum WceChoice {
    Guest,
    Fixed,
}

impl From<WceChoice> for Wce {
    fn from(choice: WceChoice) -> Self {
        match choice {
            WceChoice::Guest => Self::Guest,
            WceChoice::Fixed => Self::Fixed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words<T: ValueEnum>() -> Vec<String> {
        let values = T::value_variants().iter().filter_map(ValueEnum::to_possible_value);
        values.map(|value| value.get_name().to_owned()).collect()
    }

    /// Users write these words in their files: a variant may be renamed, but its word must stay.
    #[test]
    fn words_of_the_options_stay() {
        assert_eq!(words::<OnError>(), ["report", "hold", "hold-on-enospc"]);
        assert_eq!(words::<WceChoice>(), ["guest", "fixed"]);
        assert_eq!(words::<PollChoice>(), ["adaptive", "busy"]);
        assert_eq!(words::<Switch>(), ["on", "off"]);
        assert_eq!(words::<Format>(), ["raw", "qcow2"]);
    }
}
