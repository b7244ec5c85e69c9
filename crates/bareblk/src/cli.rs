//! The command line: subcommands and typed flags.
//!
//! `arguments → clap → the arguments of one subcommand`; what `serve` takes is in `serve_args.rs`.
//!
//! - Values that cannot be served are refused where they are read, with the server's own errors: before anything
//!   is opened, made or waited for.
//!
//! Not here: acting on any of it (`serve.rs`, `vmm_args.rs`), single values (`values.rs`).

use std::path::PathBuf;

use blk_server::MAX_QUEUE_SIZE;
use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};

use crate::bench_args::{self, BenchArgs};
use crate::ctl_args::{self, CtlArgs};
use crate::lab::LabCommand;

use crate::engine_args::EngineArgs;
use crate::engines::EnginesArgs;
use crate::lab::LabCommand;
use crate::serve_args::{self, ServeArgs};
use crate::values::{queue_size, queues, size_bytes};

const EXAMPLES: &str = "\
Examples:
  bareblk serve disk.raw --socket /run/vm1.sock
  bareblk vmm-args --socket /run/vm1.sock          what to add to the VM's command line
  bareblk bench --socket /run/vm1.sock --rw randread --iodepth 32 --runtime 10
  bareblk lab run aio --out results --quick        a published experiment, repeated here

`bareblk COMMAND --help` has more.";

const SERVE_EXAMPLES: &str = "\
Examples:
  bareblk serve disk.raw --socket /run/vm1.sock --create 20G
      makes a new disk of 20 GiB and serves it
  bareblk serve /dev/nvme0n1p3 --socket /run/vm1.sock --socket-mode 660 --socket-group kvm
      serves a partition; members of the group kvm may connect
  bareblk serve base.raw --socket /run/vm2.sock --readonly --cache writeback
      several servers may share an image that none of them writes to
  bareblk serve disk.raw --socket /run/vm1.sock --discard off
      keeps a preallocated image allocated
  bareblk serve disk.raw --socket /run/vm1.sock --cache directsync --wce fixed
      every write is durable when it completes, whatever the guest wants
  bareblk serve scratch.raw --socket /run/vm1.sock --cache unsafe
      for data that can be made again: fast, and lost with the host
  bareblk serve disk.raw --socket /run/vm1.sock --control /run/bareblk/control.sock
      can be looked at and changed while it runs: see bareblk ctl --help

Cache modes, as in QEMU:
  none          O_DIRECT; the guest's flushes make its writes durable
  writeback     through the host's page cache; flushes as above
  writethrough  through the host's page cache; writes are durable when they complete
  directsync    O_DIRECT; writes are durable when they complete
  unsafe        through the host's page cache; flushes are ignored

Once front-ends can connect, standard output says: bareblk: serving IMAGE on SOCKET

Signals:
  SIGTERM, SIGINT  take no more requests, finish those in flight, flush, remove
                   the socket, exit with 0; a second one, half a second later
                   or more, ends at once with 143 or 130
  SIGHUP           look at the image's size again; a guest whose disk grew is told

Environment:
  RUST_LOG         what to log, instead of -v: debug, or blk_server=trace,warn

Exit codes: 0 stopped in order, 1 an error (one line on standard error), 2 wrong usage";

const VMM_ARGS_EXAMPLES: &str = "\
Examples:
  bareblk vmm-args --socket /run/vm1.sock --memory 8G
  bareblk vmm-args --socket /run/vm1.sock --vmm libvirt --queues 4
  bareblk vmm-args --socket /run/vm1.sock --vmm cloud-hypervisor --queues 4";

const ENGINES_EXAMPLES: &str = "\
Examples:
  bareblk engines                                  what this host offers
  bareblk engines disk.raw --cache writeback       and what `--engine auto` takes for this image";

const COMPLETIONS_EXAMPLES: &str = "\
Examples:
  bareblk completions bash > ~/.local/share/bash-completion/completions/bareblk
  bareblk completions zsh > ~/.zfunc/_bareblk
      with `fpath+=~/.zfunc` before `compinit` in ~/.zshrc
  bareblk completions fish > ~/.config/fish/completions/bareblk.fish";

/// Disks for virtual machines, served over vhost-user.
#[derive(Debug, Parser)]
#[command(name = "bareblk", version, after_help = EXAMPLES, max_term_width = 110)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve a raw disk image, or a block device, on a vhost-user socket
    #[command(after_help = SERVE_EXAMPLES)]
    Serve(ServeArgs),
    /// Look at a running server, and change it
    #[command(after_help = ctl_args::EXAMPLES)]
    Ctl(CtlArgs),
    /// Print what a virtual machine needs to use a served disk
    #[command(after_help = VMM_ARGS_EXAMPLES)]
    VmmArgs(VmmArgs),
    /// Print which I/O engines work on this host, what is off and why, and what suits an image
    #[command(after_help = ENGINES_EXAMPLES)]
    Engines(EnginesArgs),
    /// Put a load on a socket or file, in fio's words, and measure it
    #[command(after_help = bench_args::EXAMPLES)]
    Bench(Box<BenchArgs>),
    /// Repeat published experiments on this program's own parts
    #[command(subcommand)]
    Lab(LabCommand),
    /// Print a completion script for a shell
    #[command(after_help = COMPLETIONS_EXAMPLES)]
    Completions {
        /// Which shell
        shell: Shell,
    },
}

#[derive(Debug, Args)]
pub struct ServeArgs {
    /// The disk: a raw image file, or a block device
    pub image: PathBuf,

    /// Where virtual machines connect; the socket is made, and a dead server's is replaced
    #[arg(long, value_name = "PATH")]
    pub socket: PathBuf,

    /// Most queues a guest may use; QEMU wants one per vCPU, unused ones cost nothing
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = queues)]
    pub queues: u16,

    /// Longest queue accepted, in descriptors; a power of two. Also limits a request to N - 2 segments
    #[arg(long, value_name = "N", default_value_t = MAX_QUEUE_SIZE, value_parser = queue_size)]
    pub queue_size: u16,

    /// The host's page cache, and when writes are durable; see below
    #[arg(long, value_name = "MODE", default_value = "none", value_parser = cache_mode())]
    pub cache: CacheMode,

    /// Who switches the disk's write cache on and off: the guest, or nobody once --cache has (fixed)
    #[arg(long, value_name = "guest|fixed", value_enum, default_value_t = WceChoice::Guest, hide_possible_values = true)]
    pub wce: WceChoice,

    /// Refuse writes; other readers may then share the image
    #[arg(long)]
    pub readonly: bool,

    /// The disk's serial number, up to 20 characters [default: 20 hex digits from the image's path]
    #[arg(long, value_name = "TEXT", value_parser = serial)]
    pub serial: Option<String>,

    /// Logical block size in bytes: 512 to 4096 [default: what direct I/O on the image needs]
    #[arg(long, value_name = "BYTES")]
    pub block_size: Option<u32>,

    /// Let the guest free blocks; off keeps a preallocated image allocated
    #[arg(long, value_name = "on|off", value_enum, default_value_t = Switch::On, hide_possible_values = true)]
    pub discard: Switch,

    /// Make the image first, this large (K, M, G, T: powers of 1024); it must not exist
    #[arg(long, value_name = "SIZE", value_parser = image_bytes)]
    pub create: Option<u64>,

    /// Longest polling before sleep, in microseconds; 0: never poll
    #[arg(long, value_name = "US", default_value_t = default_poll_us(), value_parser = poll_us)]
    pub poll_us: u64,

    /// Permissions of the socket, octal
    #[arg(long, value_name = "MODE", default_value = "600", value_parser = socket_mode)]
    pub socket_mode: u32,

    /// Owner of the socket, name or number [default: who starts bareblk]
    #[arg(long, value_name = "USER")]
    pub socket_owner: Option<String>,

    /// Group of the socket, name or number
    #[arg(long, value_name = "GROUP")]
    pub socket_group: Option<String>,

    /// Where `bareblk ctl` connects; root and the server's user may [default: nowhere]
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,

    /// How long to wait for an image that is in use, in seconds
    #[arg(long, value_name = "S", default_value_t = 30, value_parser = timeout_s)]
    pub lock_timeout: u64,

    /// How long to wait for requests in flight when stopping, in seconds
    #[arg(long, value_name = "S", default_value_t = 30, value_parser = timeout_s)]
    pub stop_timeout: u64,

    #[command(flatten)]
    pub engine: EngineArgs,

    #[command(flatten)]
    pub log: LogArgs,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Log")]
pub struct LogArgs {
    /// Log more (-vv: everything)
    #[arg(short, long, action = clap::ArgAction::Count)]
    pub verbose: u8,

    /// How log lines look, on standard error
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
}

#[derive(Debug, Args)]
pub struct VmmArgs {
    /// The socket given to `bareblk serve`
    #[arg(long, value_name = "PATH")]
    pub socket: PathBuf,

    /// Which virtual machine monitor
    #[arg(long, value_enum, default_value_t = Vmm::Qemu)]
    pub vmm: Vmm,

    /// Queues, at most one per vCPU [default: QEMU and libvirt: one per vCPU; cloud-hypervisor: 1]
    #[arg(long, value_name = "N", value_parser = queues)]
    pub queues: Option<u16>,

    /// Size of each queue, no more than what `bareblk serve` was given
    #[arg(long, value_name = "N", default_value_t = MAX_QUEUE_SIZE, value_parser = queue_size)]
    pub queue_size: u16,

    /// The guest's memory (M, G, T: powers of 1024)
    #[arg(long, value_name = "SIZE", default_value = "4G", value_parser = size_bytes)]
    pub memory: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    Text,
    Json,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Vmm {
    Qemu,
    Libvirt,
    CloudHypervisor,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Shell {
    Bash,
    Zsh,
    Fish,
}

/// What to serve and how, checked as far as it can be without touching anything.
#[derive(Debug)]
pub struct ServeConfig {
    pub image: ImageOptions,
    pub socket: SocketConfig,
    pub wce: Wce,
    pub serial: Option<String>,
    pub queues: u16,
    pub queue_size: u16,
    pub engine: EngineChoice,
    pub engine_config: EngineConfig,
    pub poll: Duration,
    pub control: Option<PathBuf>,
    pub stop_timeout: Duration,
}

impl ServeArgs {
    /// Looks up users and groups; the rest is checked already.
    pub fn configuration(self) -> Result<ServeConfig> {
        if self.engine.iopoll && !self.cache.is_direct() {
            let why = "--iopoll needs --cache none or directsync: the page cache has nothing to poll";
            bail!(Contradiction(why));
        }
        if self.engine.io_threads.is_some() && self.engine.engine == EngineChoice::Named(EngineKind::IoUring)
        {
            bail!(Contradiction(
                "--io-threads has no effect with --engine io_uring, which has no threads of ours"
            ));
        }
        let socket = SocketConfig {
            path: self.socket,
            mode: self.socket_mode,
            uid: self.socket_owner.as_deref().map(user_id).transpose().context("--socket-owner")?,
            gid: self.socket_group.as_deref().map(group_id).transpose().context("--socket-group")?,
        };
        let image = ImageOptions {
            path: self.image,
            access: if self.readonly { Access::ReadOnly } else { Access::ReadWrite },
            cache: self.cache,
            block_size: self.block_size,
            discard: self.discard == Switch::On,
            create_bytes: self.create,
            lock_timeout: Duration::from_secs(self.lock_timeout),
        };
        Ok(ServeConfig {
            image,
            socket,
            wce: self.wce.into(),
            serial: self.serial,
            queues: self.queues,
            queue_size: self.queue_size,
            engine: self.engine.engine,
            engine_config: self.engine.configuration()?,
            poll: Duration::from_micros(self.poll_us),
            control: self.control,
            stop_timeout: Duration::from_secs(self.stop_timeout),
        })
    }
}

/// A script for `shell`'s completion.
pub fn completions(shell: Shell) -> String {
    let generator = match shell {
        Shell::Bash => clap_complete::Shell::Bash,
        Shell::Zsh => clap_complete::Shell::Zsh,
        Shell::Fish => clap_complete::Shell::Fish,
    };
    let mut script = Vec::new();
    clap_complete::generate(generator, &mut Cli::command(), "bareblk", &mut script);
    String::from_utf8_lossy(&script).into_owned()
}

/// Settings that the server accepts whatever the others are.
const GOOD_SERIAL: &str = "-";
const GOOD_QUEUES: u16 = 1;
const GOOD_QUEUE_SIZE: u16 = MAX_QUEUE_SIZE;

fn serial(text: &str) -> Result<String> {
    let checked = DiskConfig::check_settings(text, GOOD_QUEUES, GOOD_QUEUE_SIZE);
    checked.map_err(|error| match error {
        // The value is in clap's line already, and there without line breaks.
        InvalidDisk::Serial { max, .. } => anyhow!("give 1 to {max} printable ASCII characters"),
        other => other.into(),
    })?;
    Ok(text.to_owned())
}

fn queues(text: &str) -> Result<u16> {
    let queues = text.parse().map_err(|_| anyhow!("give a whole number from 1 to {MAX_QUEUES}"))?;
    DiskConfig::check_settings(GOOD_SERIAL, queues, GOOD_QUEUE_SIZE)?;
    Ok(queues)
}

pub fn queue_size(text: &str) -> Result<u16> {
    let queue_size =
        text.parse().map_err(|_| anyhow!("give a power of two from {MIN_QUEUE_SIZE} to {MAX_QUEUE_SIZE}"))?;
    DiskConfig::check_settings(GOOD_SERIAL, GOOD_QUEUES, queue_size)?;
    Ok(queue_size)
}

fn user_id(text: &str) -> Result<u32> {
    if let Ok(number) = text.parse() {
        return Ok(number);
    }
    let user = User::from_name(text).with_context(|| format!("user '{text}' cannot be looked up"))?;
    user.map(|user| user.uid.as_raw())
        .ok_or_else(|| anyhow!("user '{text}' does not exist: give a name or a number that does"))
}

fn group_id(text: &str) -> Result<u32> {
    if let Ok(number) = text.parse() {
        return Ok(number);
    }
    let group = Group::from_name(text).with_context(|| format!("group '{text}' cannot be looked up"))?;
    group
        .map(|group| group.gid.as_raw())
        .ok_or_else(|| anyhow!("group '{text}' does not exist: give a name or a number that does"))
}

pub fn cache_mode() -> impl TypedValueParser<Value = CacheMode> {
    PossibleValuesParser::new(CacheMode::ALL.map(CacheMode::name)).try_map(|text| text.parse::<CacheMode>())
}

fn socket_mode(text: &str) -> Result<u32> {
    match u32::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o777 => Ok(mode),
        _ => bail!("give three octal digits, such as 660"),
    }
}

/// "64M" → 67108864.
fn size_bytes(text: &str) -> Result<u64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match &text[digits.len()..] {
        "" => 0,
        "K" | "k" => 10,
        "M" | "m" => 20,
        "G" | "g" => 30,
        "T" | "t" => 40,
        _ => bail!("give a number of bytes, or one with K, M, G or T behind it"),
    };
    let number: u64 = digits
        .parse()
        .map_err(|_| anyhow!("give a whole number, with K, M, G or T behind it if you like"))?;
    number.checked_mul(1 << shift).context("at most 16777215T are possible")
}

/// "20G", but no half sectors.
pub fn image_bytes(text: &str) -> Result<u64> {
    match size_bytes(text)? {
        bytes if bytes > 0 && bytes.is_multiple_of(SECTOR_BYTES) => Ok(bytes),
        _ => bail!("give a multiple of {SECTOR_BYTES}"),
    }
}

fn timeout_s(text: &str) -> Result<u64> {
    match text.parse() {
        Ok(seconds) if seconds <= MAX_TIMEOUT_S => Ok(seconds),
        _ => bail!("give whole seconds, without a unit, at most {MAX_TIMEOUT_S}"),
    }
}

fn poll_us(text: &str) -> Result<u64> {
    match text.parse() {
        Ok(us) if us <= MAX_POLL_US => Ok(us),
        _ => bail!("give whole microseconds, without a unit, at most {MAX_POLL_US}"),
    }
}

fn default_poll_us() -> u64 {
    u64::try_from(DEFAULT_POLL.as_micros()).unwrap_or(MAX_POLL_US)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn definition_of_the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
