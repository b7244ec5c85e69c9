//! The command line of `bareblk bench`: fio's options under fio's names, and ours for sockets.
//!
//! - The table for job files also checks these options, so an option means the same in a job file and on the command
//!   line.
//! - Option names have underscores, as in fio; hyphens are accepted too.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail};
use bareblk::command_line::{Wrong, queue_size};
use clap::{ArgGroup, Args, ValueEnum};
use workload::{Client, Job, LockKind, parse_cpus, parse_time};

pub const EXAMPLES: &str = "\
Examples:
  bareblk bench --socket /run/vm1.sock --rw randread --bs 4k --iodepth 32 --runtime 10
      measures what a guest would get, without a guest
  bareblk bench --file disk.raw --rw randread --bs 4k --iodepth 32 --runtime 10
      runs the same load on the file itself, bypassing the page cache
  bareblk bench --socket /run/vm1.sock --rw randwrite --size 1g --verify crc32c
      writes 1 GiB (the disk's contents are LOST) and reads it back
  bareblk bench --compare socket:/run/vm1.sock file:/mnt/other.raw --rw randread --iodepth 32 --runtime 20
      measures both targets in turn; reports whether the difference exceeds the noise
  bareblk bench job.fio --socket /run/vm1.sock --json result.json
      runs a job file of fio; result.json has fio's layout

Sizes and times are fio's: 4k is 4096, 10 means 10 seconds. Differences from fio: docs/how-to/bench.md.
Ctrl-C ends the run with the result so far and exit code 130.

Exit codes: 0 success, 1 an error (one line on standard error), 2 wrong usage, 130 or 143 ended by a signal";

/// Checks a value as in a job file.
macro_rules! fio {
    ($option:literal) => {
        |text: &str| checked($option, text)
    };
}

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("target").args(["socket", "file", "compare"]))]
pub struct BenchArgs {
    /// A job file of fio; options on the command line override it
    pub job_file: Option<PathBuf>,

    /// The vhost-user-blk socket to measure
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,

    /// The file or block device to measure directly, without a back-end
    #[arg(long, value_name = "PATH")]
    pub file: Option<PathBuf>,

    /// Measure two targets in turn: socket:PATH, file:PATH, file:PATH:ENGINE, or a path
    #[arg(long, num_args = 2, value_names = ["A", "B"])]
    pub compare: Option<Vec<String>>,

    /// With --compare: number of pairs of runs; the runtime is divided among them
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=10_000), requires = "compare")]
    pub rounds: u32,

    /// Write the result in fio's JSON layout to FILE; without FILE, to standard output instead of the text
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-", conflicts_with = "compare")]
    pub json: Option<PathBuf>,

    #[command(flatten)]
    pub load: LoadArgs,

    #[command(flatten)]
    pub client: ClientArgs,
}

/// The options as given, checked.
#[derive(Debug, Args)]
#[command(next_help_heading = "Load, with fio's options")]
pub struct LoadArgs {
    /// Name of the job in reports [default: bench]
    #[arg(long, value_name = "TEXT", value_parser = fio!("name"))]
    name: Option<String>,
    /// read, write, rw, randread, randwrite, randrw [default: read]
    #[arg(long, alias = "readwrite", value_name = "PATTERN", value_parser = fio!("rw"))]
    rw: Option<String>,
    /// Percent of reads in rw and randrw [default: 50]
    #[arg(long, value_name = "P", value_parser = fio!("rwmixread"))]
    rwmixread: Option<String>,
    /// Block size [default: 4k]
    #[arg(long, alias = "blocksize", value_name = "SIZE", value_parser = fio!("bs"))]
    bs: Option<String>,
    /// Requests in flight per job [default: 1]
    #[arg(long, alias = "depth", value_name = "N", value_parser = fio!("iodepth"))]
    iodepth: Option<String>,
    /// Requests per submission [default: for files 1, as in fio; for sockets all requests that are ready]
    #[arg(long = "iodepth_batch", aliases = ["iodepth-batch", "iodepth_batch_submit", "iodepth-batch-submit"], value_name = "N", value_parser = fio!("iodepth_batch"))]
    iodepth_batch: Option<String>,
    /// Number of jobs, one thread each [default: as many as --queues, else 1]
    #[arg(long, alias = "numjobs", value_name = "N", value_parser = fio!("numjobs"))]
    pub jobs: Option<String>,
    /// Stop after this time; without --size and --loops: run for this time
    #[arg(long, value_name = "TIME", value_parser = fio!("runtime"))]
    runtime: Option<String>,
    /// Start again from the beginning until the runtime is over
    #[arg(long = "time_based", alias = "time-based", num_args = 0..=1, require_equals = true, default_missing_value = "1", value_name = "0|1", value_parser = fio!("time_based"))]
    time_based: Option<String>,
    /// Size of the area that each job covers, from --offset on [default: all of the device]
    #[arg(long, value_name = "SIZE", value_parser = fio!("size"))]
    size: Option<String>,
    /// Start of the area that each job covers [default: 0]
    #[arg(long, value_name = "SIZE", value_parser = fio!("offset"))]
    offset: Option<String>,
    /// How many times each job covers its area [default: 1]
    #[arg(long, value_name = "N", value_parser = fio!("loops"))]
    loops: Option<String>,
    /// crc32c: write blocks with a header and a checksum, and check them when they are read back
    #[arg(long, value_name = "METHOD", value_parser = fio!("verify"))]
    verify: Option<String>,
    /// Flush after every N writes
    #[arg(long, value_name = "N", value_parser = fio!("fsync"))]
    fsync: Option<String>,
    /// Limit in bytes per second, per job and direction
    #[arg(long, value_name = "SIZE", value_parser = fio!("rate"))]
    rate: Option<String>,
    /// Limit in requests per second, per job and direction
    #[arg(long = "rate_iops", alias = "rate-iops", value_name = "N", value_parser = fio!("rate_iops"))]
    rate_iops: Option<String>,
    /// Seed of the random numbers
    #[arg(long, value_name = "N", value_parser = fio!("randseed"))]
    randseed: Option<String>,
    /// Report all jobs as one
    #[arg(long = "group_reporting", alias = "group-reporting", num_args = 0..=1, require_equals = true, default_missing_value = "1", value_name = "0|1", value_parser = fio!("group_reporting"))]
    group_reporting: Option<String>,
    /// Files: bypass the page cache [default: 1; fio's is 0]
    #[arg(long, num_args = 0..=1, default_missing_value = "1", value_name = "0|1", value_parser = fio!("direct"))]
    direct: Option<String>,
    /// Files: io_uring, libaio (aio), psync (sync), posixaio [default: io_uring]
    #[arg(long, value_name = "ENGINE", value_parser = fio!("ioengine"))]
    ioengine: Option<String>,
    /// Has no effect: there is never a map of random blocks
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "1", value_name = "0|1", value_parser = fio!("norandommap"))]
    norandommap: Option<String>,
    /// Has no effect: jobs are always threads
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "1", value_name = "0|1", value_parser = fio!("thread"))]
    thread: Option<String>,
}

impl LoadArgs {
    /// The given options, under fio's names.
    pub fn given(&self) -> Vec<(String, Option<String>)> {
        let all = [
            ("name", &self.name),
            ("rw", &self.rw),
            ("rwmixread", &self.rwmixread),
            ("bs", &self.bs),
            ("iodepth", &self.iodepth),
            ("iodepth_batch", &self.iodepth_batch),
            ("numjobs", &self.jobs),
            ("runtime", &self.runtime),
            ("time_based", &self.time_based),
            ("size", &self.size),
            ("offset", &self.offset),
            ("loops", &self.loops),
            ("verify", &self.verify),
            ("fsync", &self.fsync),
            ("rate", &self.rate),
            ("rate_iops", &self.rate_iops),
            ("randseed", &self.randseed),
            ("group_reporting", &self.group_reporting),
            ("direct", &self.direct),
            ("ioengine", &self.ioengine),
            ("norandommap", &self.norandommap),
            ("thread", &self.thread),
        ];
        let given = all.into_iter().filter(|(_, value)| value.is_some());
        given.map(|(option, value)| (option.to_owned(), value.clone())).collect()
    }

    /// Refuses options without effect on sockets. A job file may have such options, because it can be used for both
    /// kinds of target.
    pub fn check_for_sockets(&self) -> Result<()> {
        let given = [("--direct", self.direct.is_some()), ("--ioengine", self.ioengine.is_some())];
        match given.iter().find(|(_, given)| *given) {
            Some((option, _)) => bail!(Wrong(format!(
                "{option} has an effect only on files: leave it out, because a socket's back-end decides \
                 how to open its image"
            ))),
            None => Ok(()),
        }
    }

    /// The job that the command line describes.
    pub fn job(&self) -> Result<Job> {
        let mut job = Job { group_reporting: true, ..Job::default() };
        for (option, value) in self.given() {
            job.set(&option, value.as_deref())?;
        }
        // If only a time is given, it is the length of the run.
        let amount = self.size.is_some() || self.loops.is_some() || self.time_based.is_some();
        job.time_based |= job.runtime.is_some() && !amount;
        Ok(job)
    }
}

/// The text, if the table for job files accepts it.
fn checked(option: &str, text: &str) -> Result<String> {
    match Job::default().set(option, Some(text)) {
        Ok(()) => Ok(text.to_owned()),
        // clap's message already names option and value.
        Err(workload::OptionError::Value { wanted, .. }) => bail!("give {wanted}"),
        Err(other) => Err(other.into()),
    }
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Client")]
pub struct ClientArgs {
    /// Sockets: number of queues; further jobs share queues [default: one per job, at most as many as the device has]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub queues: Option<u16>,

    /// Sockets: descriptors per queue, a power of two [default: what the depth needs, up to 1024]
    #[arg(long, value_name = "N", value_parser = queue_size)]
    queue_size: Option<u16>,

    /// Sockets: layout of the rings [default: split if the device supports both]
    #[arg(long, value_name = "split|packed", value_enum, hide_possible_values = true)]
    ring: Option<RingLayout>,

    /// Sockets: notify the device while the queue's lock is held, or after its release [default: unlocked]
    #[arg(long, value_name = "locked|unlocked", value_enum, hide_possible_values = true)]
    kick: Option<Kick>,

    /// Sockets: lock each shared queue with this lock. If the option is given, queues of one job are locked too
    /// [default: std]
    #[arg(long, value_name = "ticket|std|parking_lot", value_parser = lock)]
    lock: Option<LockKind>,

    /// Poll for completions instead of sleeping
    #[arg(long)]
    poll: bool,

    /// Pin the jobs to these CPUs in turn, such as 0-3,8
    #[arg(long, value_name = "CPUS", value_parser = pin)]
    pin: Option<Cpus>,

    /// Maximum time for one request: a slower request ends the run with an error
    #[arg(long, value_name = "TIME", default_value = "30", value_parser = time)]
    deadline: Duration,

    /// Sockets: if the back-end disconnects, wait at most this long for it to return, then continue
    #[arg(long, value_name = "TIME", value_parser = time)]
    reconnect: Option<Duration>,

    /// Sockets: request an in-flight log from the back-end; with --compare, off,on means no log for A, one for B
    /// [default: on with --reconnect if the back-end supports it, else off]
    #[arg(long, value_name = "on|off", value_parser = in_flight)]
    inflight: Option<InFlight>,
}

/// The values of `--inflight`: one for both targets, or one each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InFlight {
    Both(bool),
    Each([bool; 2]),
}

/// The CPUs of `--pin`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cpus(Vec<usize>);

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum RingLayout {
    Split,
    Packed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kick {
    Locked,
    Unlocked,
}

impl ClientArgs {
    pub fn client(&self) -> Client {
        Client {
            queues: self.queues,
            queue_size: self.queue_size,
            packed: self.ring.map(|ring| ring == RingLayout::Packed),
            kick_locked: self.kick.map(|kick| kick == Kick::Locked),
            lock: self.lock,
            poll: self.poll,
            cpus: self.pin.as_ref().map(|cpus| cpus.0.clone()).unwrap_or_default(),
            reconnect: self.reconnect,
            in_flight_log: self.in_flight_logs()[0],
            patience: self.deadline,
        }
    }

    /// The settings of the two compared targets.
    pub fn clients(&self) -> [Client; 2] {
        self.in_flight_logs().map(|in_flight_log| Client { in_flight_log, ..self.client() })
    }

    fn in_flight_logs(&self) -> [Option<bool>; 2] {
        match self.inflight {
            None => [None; 2],
            Some(InFlight::Both(on)) => [Some(on); 2],
            Some(InFlight::Each(on)) => on.map(Some),
        }
    }

    /// Refuses two values for one target.
    pub fn check_for_one(&self) -> Result<()> {
        if matches!(self.inflight, Some(InFlight::Each(_))) {
            bail!(Wrong("--inflight accepts two values only with --compare: give on or off".to_owned()));
        }
        Ok(())
    }

    /// Refuses options without effect on files.
    pub fn check_for_files(&self) -> Result<()> {
        let given = [
            ("--queues", self.queues.is_some()),
            ("--queue-size", self.queue_size.is_some()),
            ("--ring", self.ring.is_some()),
            ("--kick", self.kick.is_some()),
            ("--lock", self.lock.is_some()),
            ("--reconnect", self.reconnect.is_some()),
            ("--inflight", self.inflight.is_some()),
        ];
        match given.iter().find(|(_, given)| *given) {
            Some((option, _)) => {
                bail!(Wrong(format!("{option} has an effect only on sockets: leave it out, or use --socket")))
            }
            None => Ok(()),
        }
    }
}

fn lock(text: &str) -> Result<LockKind> {
    match LockKind::ALL.into_iter().find(|lock| lock.name() == text) {
        Some(lock) => Ok(lock),
        None => bail!("give one of {}", LockKind::ALL.map(LockKind::name).join(", ")),
    }
}

fn in_flight(text: &str) -> Result<InFlight> {
    match text {
        "on" => Ok(InFlight::Both(true)),
        "off" => Ok(InFlight::Both(false)),
        "off,on" => Ok(InFlight::Each([false, true])),
        "on,off" => Ok(InFlight::Each([true, false])),
        _ => bail!("give on or off, or off,on with --compare"),
    }
}

fn pin(text: &str) -> Result<Cpus> {
    match parse_cpus(text) {
        Some(cpus) => Ok(Cpus(cpus)),
        None => bail!("give CPU numbers, such as 0-3,8"),
    }
}

fn time(text: &str) -> Result<Duration> {
    match parse_time(text).filter(|time| !time.is_zero()) {
        Some(time) => Ok(time),
        None => bail!("give a time such as 10 (seconds), 500ms or 2m"),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command};

    fn parse(words: &[&str]) -> Box<BenchArgs> {
        let words = ["bareblk", "bench"].into_iter().chain(words.iter().copied());
        match Cli::try_parse_from(words).unwrap().command {
            Command::Bench(args) => args,
            other => panic!("{other:?}"),
        }
    }

    fn job(words: &[&str]) -> Job {
        parse(words).load.job().unwrap()
    }

    #[test]
    fn command_line_of_fio_is_understood_as_it_is() {
        let job = job(&[
            "--file=d",
            "--name=bare",
            "--ioengine=libaio",
            "--direct=1",
            "--norandommap",
            "--thread",
            "--numjobs=1",
            "--time_based",
            "--runtime=120",
            "--size=25g",
            "--bs=16k",
            "--rw=randwrite",
            "--iodepth=74",
        ]);
        assert_eq!((job.name.as_str(), job.pattern.word(), job.block_bytes), ("bare", "randwrite", 16384));
        assert!(job.time_based && job.direct && job.depth == 74 && job.size_bytes == Some(25 << 30));
    }

    #[test]
    fn runtime_alone_is_how_long_to_run_and_beside_a_size_it_is_a_limit() {
        assert!(job(&["--file=d", "--runtime=5"]).time_based);
        assert!(!job(&["--file=d", "--runtime=5", "--size=1m"]).time_based);
        assert!(!job(&["--file=d", "--runtime=5", "--time_based=0"]).time_based);
    }

    #[test]
    fn client_is_what_was_asked_for() {
        let words =
            ["--socket=s", "--kick", "locked", "--lock", "ticket", "--ring", "packed", "--pin", "1,3"];
        let client = parse(&words).client.client();
        assert_eq!((client.kick_locked, client.lock), (Some(true), Some(LockKind::Ticket)));
        assert_eq!((client.packed, client.cpus), (Some(true), vec![1, 3]));
        assert!(!parse(&["--socket=s"]).client.client().wants_lock());
    }

    #[test]
    fn in_flight_log_is_for_both_targets_or_for_each() {
        let logs = |words: &[&str]| parse(words).client.clients().map(|client| client.in_flight_log);
        assert_eq!(logs(&["--socket=s"]), [None, None]);
        assert_eq!(logs(&["--socket=s", "--inflight=on"]), [Some(true), Some(true)]);
        assert_eq!(logs(&["--compare", "a", "b", "--inflight=off,on"]), [Some(false), Some(true)]);
        let line = parse(&["--socket=s", "--inflight=on,off"]).client.check_for_one().unwrap_err();
        assert!(line.to_string().contains("give on or off"), "{line}");
    }

    #[test]
    fn options_of_sockets_are_refused_for_files_by_name() {
        let line = parse(&["--file=d", "--queues=2"]).client.check_for_files().unwrap_err().to_string();
        assert!(line.starts_with("--queues has an effect only on sockets"), "{line}");
    }
}
