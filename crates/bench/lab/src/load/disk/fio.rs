//! The load as run by fio, the tool behind the published figures, if it is installed.
//!
//! `fio --ioengine=libaio --direct=1 … --output-format=json --output=FILE → Measured`

use std::path::Path;
use std::process::{Command, Stdio};

use super::program;
use crate::experiment::SampleError;
use crate::load::{Job, Measured, Pattern, WARM_UP};
use crate::stop::Stop;

/// fio's version, such as "fio-3.33"; `None` if fio is not installed.
pub(crate) fn version() -> Option<String> {
    let output = Command::new("fio").arg("--version").stdin(Stdio::null()).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}

/// Tells the user how to install fio.
pub(crate) const MISSING: &str = "fio is not installed: apt install fio";

/// Options that all fio jobs have.
pub(crate) struct Basics {
    /// fio's word for the pattern.
    pub(crate) rw: &'static str,
    pub(crate) block_bytes: u32,
    pub(crate) depth: u32,
    pub(crate) file_bytes: u64,
    pub(crate) seconds: f64,
    pub(crate) seed: u64,
}

impl Basics {
    /// Jobs are threads, run for a fixed time, and report in JSON.
    pub(crate) fn arguments(&self) -> Vec<String> {
        let ms = 1000.0 * self.seconds;
        let always =
            ["--norandommap", "--thread", "--time_based", "--fallocate=none", "--output-format=json"];
        let mut arguments: Vec<String> = always.map(str::to_owned).into();
        arguments.extend([
            format!("--rw={}", self.rw),
            format!("--bs={}", self.block_bytes),
            format!("--iodepth={}", self.depth),
            format!("--size={}", self.file_bytes),
            format!("--runtime={:.0}ms", ms.max(1.0)),
            format!("--ramp_time={:.0}ms", (ms * WARM_UP).max(1.0)),
            format!("--randseed={}", self.seed >> 1),
        ]);
        arguments
    }
}

/// The arguments of one sample on the file `path`.
pub(crate) fn arguments(path: &Path, job: &Job) -> Vec<String> {
    let &Job { pattern, block_bytes, file_bytes, seconds, seed, .. } = job;
    let rw = match pattern {
        Pattern::Random => "randwrite",
        Pattern::Sequential => "write",
    };
    let basics = Basics { rw, block_bytes, depth: job.depth.into(), file_bytes, seconds, seed };
    let mut arguments: Vec<String> =
        ["--name=bare", "--ioengine=libaio", "--direct=1", "--numjobs=1"].map(str::to_owned).into();
    arguments.push(filename(path));
    arguments.extend(basics.arguments());
    arguments
}

pub(crate) fn filename(path: &Path) -> String {
    // In fio's option, a colon separates two files.
    format!("--filename={}", path.display().to_string().replace(':', "\\:"))
}

/// Runs fio on the file `path`. Its report is stored in the folder `scratch`.
pub(crate) fn run(path: &Path, job: &Job, scratch: &Path, stop: &Stop) -> Result<Measured, SampleError> {
    let json = report(command(&arguments(path, job)), scratch, stop)?;
    read(&json).ok_or_else(lacking)
}

pub(crate) fn lacking() -> SampleError {
    SampleError::because("fio", &"the report has no figures for the job")
}

pub(crate) fn command(arguments: &[String]) -> Command {
    let mut command = Command::new("fio");
    command.args(arguments);
    command
}

/// Returns fio's report, which fio writes to a file in the folder `scratch`.
pub(crate) fn report(
    mut command: Command,
    scratch: &Path,
    stop: &Stop,
) -> Result<serde_json::Value, SampleError> {
    let report = scratch.join("fio.json");
    let failed = |error: &dyn std::fmt::Display| SampleError::because("fio", error);
    command.arg(format!("--output={}", report.display()));
    program::run(&mut command, "fio", MISSING, stop)?;
    let text = std::fs::read_to_string(&report).map_err(|error| failed(&error))?;
    let _ = std::fs::remove_file(&report);
    serde_json::from_str(after_warnings(&text)).map_err(|error| failed(&error))
}

/// Skips fio's warnings, which precede the JSON object in the same file.
fn after_warnings(text: &str) -> &str {
    text.find("{\n").and_then(|at| text.get(at..)).unwrap_or(text)
}

fn read(json: &serde_json::Value) -> Option<Measured> {
    let job = json.get("jobs")?.get(0)?;
    let write = job.get("write")?;
    let mean = |name: &str| write.get(name)?.get("mean")?.as_f64();
    let (requests, runtime_ms) = (write.get("total_ios")?.as_u64()?, write.get("runtime")?.as_f64()?);
    let percent = job.get("usr_cpu")?.as_f64()? + job.get("sys_cpu")?.as_f64()?;
    if job.get("error")?.as_i64()? != 0 || requests == 0 || runtime_ms <= 0.0 {
        return None;
    }
    #[allow(clippy::cast_precision_loss)] // requests of one sample
    let cpu_us_per_io = percent / 100.0 * job.get("job_runtime")?.as_f64()? * 1000.0 / requests as f64;
    Some(Measured {
        requests,
        seconds: runtime_ms / 1000.0,
        submit_us: mean("slat_ns").map(|ns| ns / 1000.0),
        client_submit_us: None,
        complete_ms: mean("lat_ns").map(|ns| ns / 1e6),
        cpu_us_per_io: Some(cpu_us_per_io),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(pattern: Pattern) -> Job {
        Job { pattern, block_bytes: 16 << 10, depth: 74, file_bytes: 1 << 30, seconds: 0.15, seed: 9 }
    }

    #[test]
    fn job_is_the_published_one_on_the_file_given() {
        let line = arguments(Path::new("/a:b/disk.raw"), &job(Pattern::Random)).join(" ");
        for part in ["--rw=randwrite", "--bs=16384", "--iodepth=74", "--runtime=150ms", "--ramp_time=15ms"] {
            assert!(line.contains(part), "{line}");
        }
        assert!(line.contains("--filename=/a\\:b/disk.raw") && line.contains("--direct=1"), "{line}");
        let line = arguments(Path::new("/d"), &job(Pattern::Sequential)).join(" ");
        assert!(line.contains("--rw=write "), "{line}");
    }

    #[test]
    fn report_of_fio_3_becomes_figures() {
        let json = serde_json::json!({"fio version": "fio-3.33", "jobs": [{
            "error": 0, "usr_cpu": 6.0, "sys_cpu": 19.0, "job_runtime": 150,
            "write": {"total_ios": 10_000, "runtime": 151, "bw_bytes": 1,
                "slat_ns": {"mean": 3060.5}, "clat_ns": {"mean": 1.0}, "lat_ns": {"mean": 1_049_899.5}}}]});
        let measured = read(&json).unwrap();
        assert_eq!((measured.requests, measured.seconds), (10_000, 0.151));
        assert!((measured.submit_us.unwrap() - 3.0605).abs() < 1e-9);
        assert!((measured.complete_ms.unwrap() - 1.049_899_5).abs() < 1e-9);
        assert!((measured.cpu_us_per_io.unwrap() - 3.75).abs() < 1e-9);
    }

    #[test]
    fn report_of_a_failed_job_has_no_figures() {
        let json = serde_json::json!({"jobs": [{"error": 5, "usr_cpu": 1.0, "sys_cpu": 1.0, "job_runtime": 1,
            "write": {"total_ios": 10, "runtime": 1}}]});
        assert!(read(&json).is_none());
    }

    #[test]
    fn warnings_before_the_report_are_skipped() {
        assert_eq!(after_warnings("note: {x}\nfio: hm\n{\n \"jobs\": []}"), "{\n \"jobs\": []}");
    }
}
