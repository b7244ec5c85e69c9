//! fio on the host, without a guest: the performance of the storage without a server.
//!
//! - Jobs are threads. As processes, each would be a separate session (setsid), and the scheduler gives sessions equal
//!   shares (sched(7), autogroup). Next to busy neighbours, that share would differ from a server's.
//! - fio's CPU time therefore excludes the work of kernel threads for its io_uring, which on a RAM disk is all of the
//!   I/O.

use std::path::Path;
use std::process::Command;

use super::fio::{Basics, command, filename, lacking, report};
use crate::experiment::SampleError;
use crate::load::cpu::Usage;
use crate::load::server::process::Storage;
use crate::load::{BlockJob, Figures};
use crate::stop::Stop;

/// Length of the run that shows what connecting costs.
const CONNECTING_S: f64 = 0.001;

/// How fio accesses the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Engine {
    /// io_uring with O_DIRECT.
    IoUring,
    /// One call after another (`pread`, `pwrite`), through the page cache.
    Psync,
}

fn arguments(path: &Path, job: &BlockJob, engine: Engine) -> Vec<String> {
    let (engine, depth, direct) = match engine {
        Engine::IoUring => ("io_uring", job.depth, 1),
        Engine::Psync => ("psync", 1, 0),
    };
    let storage = [format!("--ioengine={engine}"), format!("--direct={direct}"), filename(path)];
    on(&storage, &BlockJob { depth, ..*job })
}

/// The arguments of a job on the storage that these arguments describe.
fn on(storage: &[String], job: &BlockJob) -> Vec<String> {
    let &BlockJob { writes, block_bytes, depth, jobs, file_bytes, seconds, seed } = job;
    let rw = if writes { "randwrite" } else { "randread" };
    let basics = Basics { rw, block_bytes, depth, file_bytes, seconds, seed };
    let mut arguments: Vec<String> = ["--name=host", "--group_reporting"].map(str::to_owned).into();
    arguments.extend_from_slice(storage);
    arguments.push(format!("--numjobs={jobs}"));
    arguments.extend(basics.arguments());
    arguments
}

/// Runs fio on the file `path`. Its report is stored in the folder `scratch`.
pub(crate) fn measure(
    path: &Path,
    job: &BlockJob,
    engine: Engine,
    scratch: &Path,
    stop: &Stop,
) -> Result<Figures, SampleError> {
    let json = report(command(&arguments(path, job, engine)), scratch, stop)?;
    read(&json, job.writes).ok_or_else(lacking)
}

/// Runs fio on a disk elsewhere, with the engine for it. CPU time and context switches are those of the whole process:
/// fio reports those of its own thread, and librbd works on others.
pub(crate) fn measure_remote(
    storage: Storage<'_>,
    job: &BlockJob,
    scratch: &Path,
    stop: &Stop,
) -> Result<Figures, SampleError> {
    let run = |seconds| {
        let before = Usage::of_children();
        let json = report(remote(storage, &BlockJob { seconds, ..*job }), scratch, stop)?;
        Ok::<_, SampleError>((json, Usage::of_children().since(before)))
    };
    let (_, connecting) = run(CONNECTING_S)?;
    let (json, all) = run(job.seconds)?;
    let used = all.since(connecting);
    let mut figures = read(&json, job.writes).ok_or_else(lacking)?;
    if let Some(ios) = figures.get("requests").copied() {
        #[allow(clippy::cast_precision_loss)] // of one sample
        let switches = used.switches() as f64;
        figures.insert("cpu", (used.user + used.system).as_secs_f64() * 1e6 / ios);
        figures.insert("switches", switches / ios);
    }
    Ok(figures)
}

/// fio for a disk elsewhere. Without its uncounted ramp, because the costs of the process cover all requests.
fn remote(storage: Storage<'_>, job: &BlockJob) -> Command {
    let (engine, conf) = match storage {
        Storage::File(path) | Storage::Qcow2 { path, .. } => {
            (vec!["--ioengine=io_uring".to_owned(), filename(path)], None)
        }
        Storage::Rbd { pool, image, conf } => {
            let options = [format!("--pool={pool}"), format!("--rbdname={image}")];
            let always = ["--ioengine=rbd", "--clientname=admin"].map(str::to_owned);
            (always.into_iter().chain(options).collect(), Some(conf))
        }
        Storage::Nbd(socket) => {
            let uri = format!("--uri=nbd+unix:///?socket={}", socket.display());
            (vec!["--ioengine=nbd".to_owned(), uri], None)
        }
    };
    let mut fio = command(&on(&engine, job));
    fio.arg("--ramp_time=0");
    // The engine has no option for the configuration file.
    conf.iter().for_each(|conf| _ = fio.env("CEPH_CONF", conf));
    fio
}

/// Reads the figures from fio's report; `None` if the job failed.
fn read(json: &serde_json::Value, writes: bool) -> Option<Figures> {
    let job = json.get("jobs")?.get(0)?;
    let side = job.get(if writes { "write" } else { "read" })?;
    let (ios, runtime_s) = (side.get("total_ios")?.as_f64()?, side.get("runtime")?.as_f64()? / 1000.0);
    if job.get("error")?.as_i64()? != 0 {
        return None;
    }
    if ios <= 0.0 || runtime_s <= 0.0 {
        // The run was too short on a busy machine, so this sample has no figures.
        return Some(Figures::new());
    }
    let percent = job.get("usr_cpu")?.as_f64()? + job.get("sys_cpu")?.as_f64()?;
    let percentile = |name: &str| Some(side.get("clat_ns")?.get("percentile")?.get(name)?.as_f64()? / 1000.0);
    let mut figures = Figures::from([
        ("requests", ios),
        ("iops", ios / runtime_s),
        ("cpu", percent / 100.0 * job.get("job_runtime")?.as_f64()? * 1000.0 / ios),
        ("latency", side.get("lat_ns")?.get("mean")?.as_f64()? / 1000.0),
        ("switches", job.get("ctx")?.as_f64()? / ios),
    ]);
    figures.extend(percentile("99.000000").map(|us| ("p99", us)));
    Some(figures)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn psync_has_one_request_in_flight_per_job_and_uses_the_page_cache() {
        let job = BlockJob {
            writes: false,
            block_bytes: 4096,
            depth: 64,
            jobs: 2,
            file_bytes: 1 << 20,
            seconds: 0.5,
            seed: 9,
        };
        let line = arguments(Path::new("/a:b"), &job, Engine::Psync).join(" ");
        for part in ["--rw=randread", "--iodepth=1", "--direct=0", "--numjobs=2", "--filename=/a\\:b"] {
            assert!(line.contains(part), "{line}");
        }
        let line = arguments(Path::new("/f"), &job, Engine::IoUring).join(" ");
        assert!(line.contains("--iodepth=64 ") && line.contains("--direct=1 "), "{line}");
    }

    #[test]
    fn disks_elsewhere_have_the_engines_for_them_and_no_ramp() {
        let job = BlockJob {
            writes: true,
            block_bytes: 4096,
            depth: 8,
            jobs: 1,
            file_bytes: 1 << 20,
            seconds: 0.5,
            seed: 9,
        };
        let line = |fio: &Command| {
            fio.get_args().map(|arg| arg.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
        };
        let rbd = remote(Storage::Rbd { pool: "p", image: "i", conf: Path::new("/c") }, &job);
        assert!(line(&rbd).contains("--ioengine=rbd --clientname=admin --pool=p --rbdname=i "), "{rbd:?}");
        assert!(line(&rbd).ends_with("--ramp_time=0") && rbd.get_envs().count() == 1, "{rbd:?}");
        let nbd = line(&remote(Storage::Nbd(Path::new("/n")), &job));
        assert!(
            nbd.contains("--ioengine=nbd --uri=nbd+unix:///?socket=/n ") && nbd.contains("--rw=randwrite"),
            "{nbd}"
        );
    }

    #[test]
    fn report_of_fio_3_becomes_figures_of_the_direction_asked_for() {
        let json = serde_json::json!({"jobs": [{"error": 0, "usr_cpu": 6.0, "sys_cpu": 19.0, "job_runtime": 300, "ctx": 500,
            "read": {"total_ios": 10_000, "runtime": 100, "lat_ns": {"mean": 2500.0},
                "clat_ns": {"percentile": {"99.000000": 9000}}},
            "write": {"total_ios": 0, "runtime": 0}}]});
        let figures = read(&json, false).unwrap();
        assert_eq!((figures["latency"], figures["p99"], figures["switches"]), (2.5, 9.0, 0.05));
        assert!(
            (figures["iops"] - 100_000.0).abs() < 1e-6 && (figures["cpu"] - 7.5).abs() < 1e-9,
            "{figures:?}"
        );
        assert!(read(&json, true).unwrap().is_empty(), "nothing was written");
    }

    #[test]
    fn report_of_a_failed_job_has_no_figures() {
        let json = serde_json::json!({"jobs": [{"error": 5, "read": {"total_ios": 10, "runtime": 1}}]});
        assert!(read(&json, false).is_none());
    }
}
