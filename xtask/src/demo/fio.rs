//! The demo's fio jobs, with the same arguments in the guest and on the host, and reading fio's JSON.
//!
//! Both sides use libaio: every kernel has it, but containers often forbid io_uring.

use anyhow::{Context, Result};
use serde_json::Value;

/// A timed job; `name` is also fio's `rw` value.
#[derive(Debug, Clone, Copy)]
pub(super) struct Job {
    pub(super) name: &'static str,
    /// The job's title in the table.
    pub(super) title: &'static str,
    /// The key of the job's figures in fio's JSON.
    side: &'static str,
}

/// The jobs, in the order in which they run.
pub(super) const JOBS: &[Job] = &[
    Job { name: "randread", title: "4k random read, depth 32", side: "read" },
    Job { name: "randwrite", title: "4k random write, depth 32", side: "write" },
];

/// 4k to 128k at depth 16; each block is read back and compared.
const VERIFY_ARGS: &str = "--name=verify --filename=/dev/vda --ioengine=libaio --direct=1 --rw=randwrite \
                           --bsrange=4k-128k --iodepth=16 --size=64m --verify=crc32c --verify_fatal=1";

/// The result of a job.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Numbers {
    pub(super) ios: u64,
    pub(super) iops: f64,
    pub(super) mib_per_s: f64,
    pub(super) latency_us: f64,
    /// CPU time of fio's thread.
    pub(super) cpu_us: f64,
}

impl Job {
    pub(super) fn args(&self, file: &str, seconds: u32) -> Vec<String> {
        let mut words = self.on("--ioengine=libaio --direct=1", seconds);
        // In fio, `:` ends a file name.
        words.push(format!("--filename={}", file.replace(':', "\\:")));
        words
    }

    /// The arguments with an engine, and without the name of a file.
    pub(super) fn on(&self, engine: &str, seconds: u32) -> Vec<String> {
        let name = self.name;
        let timed = format!("--time_based --runtime={seconds} --output-format=json");
        let words = format!("--name={name} --rw={name} --bs=4k --iodepth=32 {engine} {timed}");
        words.split(' ').map(str::to_owned).collect()
    }

    pub(super) fn parse(&self, json: &str) -> Result<Numbers> {
        let start = json.find('{').context("fio printed no JSON")?; // warnings may precede it
        let value: Value = serde_json::from_str(&json[start..]).context("fio's JSON is broken")?;
        let job = &value["jobs"][0];
        let side = &job[self.side];
        let number = |value: &Value, name: &str| {
            value[name].as_f64().with_context(|| format!("fio's JSON has no {name} ({})", self.side))
        };
        Ok(Numbers {
            ios: side["total_ios"].as_u64().context("fio's JSON has no total_ios")?,
            iops: number(side, "iops")?,
            mib_per_s: number(side, "bw_bytes")? / f64::from(1 << 20),
            latency_us: number(&side["lat_ns"], "mean")? / 1000.0,
            cpu_us: (number(job, "usr_cpu")? + number(job, "sys_cpu")?) / 100.0
                * number(job, "job_runtime")?
                * 1000.0,
        })
    }
}

/// The script that the guest runs; each job's result is between `BB-BEGIN` and `BB-END`.
pub(super) fn guest_script(seconds: u32) -> String {
    let mut script = format!(
        "echo BB-START verify\nfio {VERIFY_ARGS} > /tmp/verify 2>&1 || {{ cat /tmp/verify; exit 2; }}\n\
         echo BB-DONE verify\n"
    );
    for job in JOBS {
        let (name, args) = (job.name, job.args("/dev/vda", seconds).join(" "));
        script.push_str(&format!(
            "echo BB-START {name}\nfio {args} > /tmp/{name} || {{ cat /tmp/{name}; exit 3; }}\n\
             echo BB-DONE {name}\necho BB-BEGIN {name}\ncat /tmp/{name}\necho BB-END {name}\n"
        ));
    }
    script
}

#[cfg(test)]
mod tests {
    use super::*;

    const JSON: &str = r#"fio: a warning
        {"jobs": [{"usr_cpu": 10.0, "sys_cpu": 15.0, "job_runtime": 4000, "read": {"total_ios": 50000, "iops": 10000.5, "bw_bytes": 41943040, "lat_ns": {"mean": 3200000.0}},
                   "write": {"total_ios": 0, "iops": 0, "bw_bytes": 0, "lat_ns": {"mean": 0}}}]}"#;

    #[test]
    fn numbers_are_those_of_the_jobs_own_side() {
        let numbers = JOBS[0].parse(JSON).unwrap();
        assert_eq!(
            numbers,
            Numbers { ios: 50_000, iops: 10_000.5, mib_per_s: 40.0, latency_us: 3200.0, cpu_us: 1e6 }
        );
        assert_eq!(JOBS[1].parse(JSON).unwrap().ios, 0);
    }

    #[test]
    fn output_without_json_is_an_error() {
        assert!(JOBS[0].parse("fio: cannot open").is_err());
        assert!(JOBS[0].parse("{\"jobs\": []}").is_err());
    }

    #[test]
    fn guest_runs_verification_first_and_marks_every_job() {
        let script = guest_script(5);
        assert!(script.starts_with("echo BB-START verify\n"));
        assert_eq!(script.matches("BB-BEGIN").count(), JOBS.len());
        assert!(script.contains("--runtime=5"));
    }
}
