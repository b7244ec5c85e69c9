//! An independent client: `qemu-img bench` drives a server's socket through libblkio, or the file itself.
//!
//! `warm-up run → its pace → server's cost → qemu-img bench -c (pace × seconds) → server's cost → Figures`
//!
//! - qemu-img cannot send requests in random order, only at a fixed step. The step is chosen so that it visits every
//!   block once, in an order that read-ahead does not predict.
//! - Its one queue of 256 descriptors holds 85 requests; further requests wait in qemu-img. It sleeps until it is
//!   notified.
//! - Its run is limited by a number of requests, not by time, so a short run first measures its pace. It reports its
//!   run time in milliseconds.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::program;
use crate::experiment::SampleError;
use crate::load::cpu::Usage;
use crate::load::disk::clients::warm_up_seconds;
use crate::load::server::cost::Cost;
use crate::load::server::process::ServerProcess;
use crate::load::{BlockJob, Figures};
use crate::stop::Stop;

const NAME: &str = "qemu-img";
/// Tells the user how to install it.
pub(crate) const MISSING: &str = "qemu-img with libblkio is not installed: apt install qemu-utils qemu-block-extra \
    (Debian 13), or name one with --qemu-img";
/// The block driver that needs libblkio.
const DRIVER: &str = "virtio-blk-vhost-user";
/// Requests of the first run, which measures roughly how fast the target is.
const FIRST_REQUESTS: u64 = 2_000;
/// The length of a step, as a share of the file: the golden ratio, which spreads successive blocks evenly.
const STEP: f64 = 0.618_034;

/// The client's disk.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Disk<'d> {
    /// A server's disk.
    Served(&'d ServerProcess),
    /// The file itself, opened with O_DIRECT and io_uring.
    File(&'d Path),
}

/// The program `qemu-img`.
#[derive(Clone, Debug)]
pub(crate) struct QemuImg {
    program: PathBuf,
    /// "qemu-img 10.0.13", or the reason why it cannot be used.
    version: Result<String, String>,
}

impl QemuImg {
    /// Checks whether the program can drive a vhost-user-blk socket. `None`: `qemu-img` in PATH.
    pub fn find(program: Option<&Path>) -> Self {
        let program = program.unwrap_or(Path::new(NAME)).to_path_buf();
        let version = version(&program);
        Self { program, version }
    }

    /// The version of qemu-img for the report, or the reason why qemu-img is not used.
    pub fn version(&self) -> Result<&str, &str> {
        self.version.as_deref().map_err(String::as_str)
    }

    /// Measures a load of one queue.
    pub fn measure(&self, disk: Disk<'_>, job: &BlockJob, stop: &Stop) -> Result<Figures, SampleError> {
        self.version.as_ref().map_err(|why| SampleError::Unavailable(why.clone()))?;
        let first = self.run(disk, job, FIRST_REQUESTS, stop)?;
        let warm = self.run(disk, job, requests(FIRST_REQUESTS, first, warm_up_seconds(job)), stop)?;
        let count = requests(requests(FIRST_REQUESTS, first, warm_up_seconds(job)), warm, job.seconds);
        let server = || match disk {
            Disk::Served(server) => Cost::of(server.pid()),
            Disk::File(_) => Cost::default(),
        };
        let (before, usage) = (server(), Usage::of_children());
        let seconds = self.run(disk, job, count, stop)?;
        let (cost, used) = (server().since(before), Usage::of_children().since(usage));
        Ok(figures(count, seconds, job.depth, matches!(disk, Disk::Served(_)).then_some(cost), &used))
    }

    /// Runs `count` requests, and returns how long they took, in seconds.
    fn run(&self, disk: Disk<'_>, job: &BlockJob, count: u64, stop: &Stop) -> Result<f64, SampleError> {
        let mut command = Command::new(&self.program);
        command.args(arguments(disk.options(), job, count)).env("LC_ALL", "C");
        let said = program::run(&mut command, NAME, MISSING, stop)?;
        seconds(&said).ok_or_else(|| {
            SampleError::because(NAME, &"the output has no line \"Run completed in … seconds\"")
        })
    }
}

impl Disk<'_> {
    fn options(self) -> String {
        // In QEMU's options, a comma ends a value.
        let quoted = |path: &Path| path.display().to_string().replace(',', ",,");
        match self {
            Self::Served(server) => {
                format!("driver={DRIVER},path={},cache.direct=on", quoted(server.socket()))
            }
            Self::File(path) => format!("driver=file,filename={},cache.direct=on,aio=io_uring", quoted(path)),
        }
    }
}

fn version(program: &Path) -> Result<String, String> {
    let output = |arguments: &[&str]| {
        let ran = Command::new(program).args(arguments).env("LC_ALL", "C").stdin(Stdio::null()).output();
        ran.map_err(|_| MISSING.to_owned())
    };
    let ended = output(&["--version"])?;
    let text = String::from_utf8_lossy(&ended.stdout).into_owned();
    let line = text.lines().next().filter(|_| ended.status.success()).ok_or_else(|| MISSING.to_owned())?;
    // This run of qemu-img always fails, because no server exists. Only the reason matters.
    let tried =
        output(&["info", "--image-opts", &format!("driver={DRIVER},path=/dev/null,cache.direct=on")])?;
    if String::from_utf8_lossy(&tried.stderr).contains("Unknown driver") {
        return Err(MISSING.to_owned());
    }
    Ok(line.replacen(" version ", " ", 1))
}

fn arguments(options: String, job: &BlockJob, count: u64) -> Vec<String> {
    let mut arguments: Vec<String> = ["bench", "-t", "none"].map(str::to_owned).into();
    let pairs = [
        ("-c", count),
        ("-d", job.depth.into()),
        ("-s", job.block_bytes.into()),
        ("-S", step_bytes(job)),
        ("-o", offset_bytes(job)),
    ];
    arguments.extend(pairs.into_iter().flat_map(|(option, value)| [option.to_owned(), value.to_string()]));
    arguments.extend(job.writes.then(|| "-w".to_owned()));
    arguments.extend(["--image-opts".to_owned(), options]);
    arguments
}

fn blocks(job: &BlockJob) -> u64 {
    (job.file_bytes / u64::from(job.block_bytes)).max(1)
}

/// Returns a step that has no common factor with the number of blocks, so that every block is visited before any block
/// is visited again.
#[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)] // any step will do
fn step_bytes(job: &BlockJob) -> u64 {
    let blocks = blocks(job);
    // qemu-img's limit is 2 GiB.
    let largest = (i32::MAX as u64 / u64::from(job.block_bytes)).min(blocks);
    let wanted = ((largest as f64 * STEP) as u64).max(1);
    let step = (wanted..).find(|&step| common_factor(step, blocks) == 1).unwrap_or(1);
    step * u64::from(job.block_bytes)
}

fn common_factor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { common_factor(b, a % b) }
}

/// Position of the first request, which differs between rounds.
fn offset_bytes(job: &BlockJob) -> u64 {
    job.seed % blocks(job) * u64::from(job.block_bytes)
}

/// The number of requests that would take `wanted` seconds, if `count` took `seconds`.
#[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)] // an estimate
fn requests(count: u64, seconds: f64, wanted: f64) -> u64 {
    let pace = count as f64 / seconds.max(0.001);
    ((pace * wanted) as u64).clamp(100, i32::MAX as u64)
}

/// Reads "Run completed in 0.360 seconds."
fn seconds(said: &str) -> Option<f64> {
    let line = said.lines().find_map(|line| line.strip_prefix("Run completed in "))?;
    line.split_ascii_whitespace().next()?.parse().ok()
}

#[allow(clippy::cast_precision_loss)] // requests of one sample
fn figures(count: u64, seconds: f64, depth: u32, server: Option<Cost>, client: &Usage) -> Figures {
    if seconds <= 0.0 {
        // The run was too short for qemu-img's clock, so this sample has no figures.
        return Figures::new();
    }
    let ios = count as f64;
    let us = |time: std::time::Duration| time.as_secs_f64() * 1e6 / ios;
    let mut figures = Figures::from([
        ("iops", ios / seconds),
        ("client-cpu", us(client.user + client.system)),
        // `depth` requests are always in flight.
        ("latency", f64::from(depth) * seconds * 1e6 / ios),
    ]);
    if let Some(server) = server {
        figures.insert("cpu", server.cpu_ns as f64 / 1000.0 / ios);
        figures.insert("switches", server.switches as f64 / ios);
    }
    figures
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::time::Duration;

    use super::*;

    fn job(file_bytes: u64, writes: bool) -> BlockJob {
        BlockJob { writes, block_bytes: 4096, depth: 64, jobs: 1, file_bytes, seconds: 0.5, seed: 70_000 }
    }

    #[test]
    fn step_visits_every_block_of_the_file_once() {
        for blocks in [1_u64, 2, 3, 15, 1024, 16_383, 262_144] {
            let step = step_bytes(&job(blocks * 4096, false)) / 4096;
            let visited: std::collections::BTreeSet<_> = (0..blocks).map(|at| at * step % blocks).collect();
            assert_eq!(visited.len() as u64, blocks, "step {step}");
        }
    }

    #[test]
    fn step_stays_below_the_programs_limit() {
        assert!(step_bytes(&job(1 << 40, false)) < 1 << 31);
    }

    #[test]
    fn file_is_opened_as_the_peer_opens_it_and_commas_do_not_end_its_name() {
        let line = arguments(Disk::File(Path::new("/a,b")).options(), &job(1 << 20, true), 500).join(" ");
        // 256 blocks, of which every 159th is next, starting with the 112th.
        let expected = "bench -t none -c 500 -d 64 -s 4096 -S 651264 -o 458752 -w --image-opts \
                        driver=file,filename=/a,,b,cache.direct=on,aio=io_uring";
        assert_eq!(line, expected);
    }

    #[test]
    fn time_is_read_from_its_last_line() {
        let said = "Sending 20000 read requests, 4096 bytes each\nRun completed in 0.360 seconds.\n";
        assert_eq!((seconds(said), seconds("no")), (Some(0.36), None));
        assert_eq!(requests(20_000, 0.36, 0.5), 27_777);
        assert_eq!(requests(2_000, 0.0, 0.5), 1_000_000, "0.000 s is at most a millisecond");
    }

    #[test]
    fn figures_are_per_request_and_the_host_has_no_server() {
        let used = Usage { user: Duration::from_millis(10), ..Usage::default() };
        let server = Cost { cpu_ns: 3_000_000, switches: 500, writes: None };
        let found = figures(1_000, 0.01, 64, Some(server), &used);
        assert_eq!((found["iops"], found["client-cpu"], found["cpu"]), (100_000.0, 10.0, 3.0));
        assert_eq!((found["latency"], found["switches"]), (640.0, 0.5));
        assert!(!figures(1_000, 0.01, 64, None, &used).contains_key("cpu"));
        assert!(figures(1_000, 0.0, 64, None, &used).is_empty());
    }

    fn script(text: &str) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("client");
        std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
        (folder, path)
    }

    #[test]
    fn program_without_libblkio_is_not_used_and_one_with_it_is() {
        let says = "[ $1 = --version ] && echo 'qemu-img version 10.0.13 (Debian)' && exit; echo";
        let (_folder, old) = script(&format!("{says} \"Unknown driver '{DRIVER}'\" >&2; exit 1"));
        assert_eq!(QemuImg::find(Some(&old)).version(), Err(MISSING));
        let (_folder, new) = script(&format!("{says} 'blkio_connect failed' >&2; exit 1"));
        assert_eq!(QemuImg::find(Some(&new)).version(), Ok("qemu-img 10.0.13 (Debian)"));
        assert_eq!(QemuImg::find(Some(Path::new("/no/such"))).version(), Err(MISSING));
    }

    #[test]
    fn sample_is_as_long_as_the_pace_of_the_warm_up_says() {
        // Imitates a device that needs a millisecond per request.
        let (_folder, program) = script(
            "[ $1 = bench ] || exit 0\nms=$5; [ $4 = -c ] || exit 9\n\
             printf 'Run completed in %d.%03d seconds.\\n' $((ms / 1000)) $((ms % 1000))",
        );
        let client = QemuImg { program, version: Ok(String::new()) };
        let found =
            client.measure(Disk::File(Path::new("/f")), &job(1 << 20, false), &Stop::default()).unwrap();
        assert_eq!((found["iops"], found["latency"]), (1_000.0, 64_000.0));
    }
}
