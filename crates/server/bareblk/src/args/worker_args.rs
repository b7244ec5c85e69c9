//! Options that say how many workers there are and how their threads run.
//!
//! `--workers 2 --cpus 2-5 … → WorkersArgs → options() → one WorkerOptions each`
//! `[[worker]]` of a configuration file, or `ctl workers add` → [`WorkerArgs`] → one `WorkerOptions`
//!
//! If there are enough CPUs, each worker gets its own, so that workers of one server do not wait for each other.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use blk_server::{InvalidCpuList, SchedulingClass, WorkerOptions, parse_cpus};
use clap::Args;

use crate::args::values::whole;

/// Maximum number of workers of a process. A larger number is probably a typing mistake.
pub const MAX_WORKERS: u16 = 1024;
/// In the path of a control group, this stands for the worker's number.
const NUMBER: &str = "{}";

/// All workers of a server: they differ only in their CPUs.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Workers")]
pub struct WorkersArgs {
    /// Number of threads that serve queues; each disk's queues are spread over them [default: 1, or one per CPU of
    /// --cpus]
    #[arg(long, value_name = "N", value_parser = whole(1..=MAX_WORKERS))]
    pub workers: Option<u16>,

    /// Distribute these CPUs (such as 2-5,8) among the workers: one CPU each; several neighbouring CPUs each if there
    /// are fewer workers than CPUs; in turn if there are more workers [default: the process's affinity mask]
    #[arg(long, value_name = "LIST", value_parser = Cpus::parse)]
    pub cpus: Option<Cpus>,

    /// Nice value of each worker, -20 to 19
    #[arg(long, value_name = "N", value_parser = nice(), allow_hyphen_values = true)]
    pub worker_nice: Option<i8>,

    /// Scheduling class of each worker: other, batch, idle, fifo:P or rr:P, P from 1 to 99
    #[arg(long, value_name = "CLASS")]
    pub worker_class: Option<SchedulingClass>,

    /// Control group (v2, threaded) of each worker; {} stands for the worker's number. A path with a leading slash
    /// starts at the root of the hierarchy, any other path at bareblk's own group
    #[arg(long, value_name = "PATH", value_parser = cgroup)]
    pub worker_cgroup: Option<PathBuf>,
}

impl WorkersArgs {
    /// The options of each worker.
    pub fn options(&self) -> Vec<WorkerOptions> {
        let cpus = self.cpus.as_ref().map_or(&[][..], |Cpus(cpus)| cpus);
        let count = self.workers.map_or(cpus.len().max(1), usize::from);
        let worker = |number: usize| WorkerOptions {
            cpus: share(cpus, number, count).to_vec(),
            nice: self.worker_nice,
            class: self.worker_class,
            cgroup: self.worker_cgroup.as_deref().map(|path| numbered(path, number)),
        };
        (0..count).map(worker).collect()
    }
}

/// One worker: the keys of a `[[worker]]` table and the options of `ctl workers add`.
#[derive(Clone, Debug, Default, Args)]
pub struct WorkerArgs {
    /// CPUs that the worker may run on, such as 2-5,8 [default: the server's]
    #[arg(long, value_name = "LIST", value_parser = Cpus::parse)]
    pub cpus: Option<Cpus>,

    /// Nice value, -20 (the largest share of a CPU) to 19 (the smallest)
    #[arg(long, value_name = "N", value_parser = nice(), allow_hyphen_values = true)]
    pub nice: Option<i8>,

    /// Scheduling class: other, batch, idle, fifo:P or rr:P, P from 1 to 99
    #[arg(long, value_name = "CLASS")]
    pub class: Option<SchedulingClass>,

    /// Control group (v2, threaded)
    #[arg(long, value_name = "PATH", value_parser = cgroup)]
    pub cgroup: Option<PathBuf>,
}

impl From<WorkerArgs> for WorkerOptions {
    fn from(args: WorkerArgs) -> Self {
        let WorkerArgs { cpus, nice, class, cgroup } = args;
        Self { cpus: cpus.map(|Cpus(cpus)| cpus).unwrap_or_default(), nice, class, cgroup }
    }
}

/// A list of CPUs, ascending.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cpus(pub Vec<u32>);

impl Cpus {
    pub fn parse(text: &str) -> Result<Self, InvalidCpuList> {
        parse_cpus(text).map(Self)
    }
}

/// The CPUs that worker `number` of `count` gets.
fn share(cpus: &[u32], number: usize, count: usize) -> &[u32] {
    if cpus.is_empty() {
        return &[];
    }
    let (first, end) = if count <= cpus.len() {
        (number * cpus.len() / count, (number + 1) * cpus.len() / count)
    } else {
        (number % cpus.len(), number % cpus.len() + 1)
    };
    cpus.get(first..end).unwrap_or_default()
}

fn numbered(path: &Path, number: usize) -> PathBuf {
    // A path that is not UTF-8 stays as it is.
    path.to_str().map_or(path.into(), |text| text.replace(NUMBER, &number.to_string()).into())
}

fn nice() -> impl Fn(&str) -> Result<i8> + Clone + Send + Sync {
    whole(-20..=19)
}

fn cgroup(text: &str) -> Result<PathBuf> {
    if text.trim_matches('/').is_empty() {
        bail!("give the path of a threaded group, such as /bareblk/fast from the root of the hierarchy");
    }
    Ok(text.into())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    #[command(no_binary_name = true)]
    struct Line {
        #[command(flatten)]
        workers: WorkersArgs,
    }

    fn options(line: &str) -> Vec<WorkerOptions> {
        Line::try_parse_from(line.split_whitespace()).unwrap().workers.options()
    }

    fn cpus(line: &str) -> Vec<Vec<u32>> {
        options(line).into_iter().map(|worker| worker.cpus).collect()
    }

    fn refusal(line: &str) -> String {
        Line::try_parse_from(line.split_whitespace()).unwrap_err().to_string()
    }

    #[test]
    fn one_worker_that_runs_anywhere_is_the_default() {
        assert_eq!(options(""), [WorkerOptions::default()]);
        assert_eq!(options("--workers 3"), vec![WorkerOptions::default(); 3]);
    }

    #[test]
    fn cpus_alone_make_a_worker_each() {
        assert_eq!(cpus("--cpus 2-4,8"), [[2], [3], [4], [8]]);
    }

    #[test]
    fn fewer_workers_than_cpus_get_neighbouring_ones_and_all_are_used() {
        assert_eq!(cpus("--workers 2 --cpus 2-5"), [[2, 3], [4, 5]]);
        assert_eq!(cpus("--workers 2 --cpus 0-4"), [vec![0, 1], vec![2, 3, 4]]);
        assert_eq!(cpus("--workers 1 --cpus 0-4"), [[0, 1, 2, 3, 4]]);
    }

    #[test]
    fn more_workers_than_cpus_take_turns() {
        assert_eq!(cpus("--workers 5 --cpus 1,3"), [[1], [3], [1], [3], [1]]);
    }

    #[test]
    fn every_share_is_of_the_list_and_no_cpu_is_left_out() {
        let list: Vec<u32> = (0..7).collect();
        for count in 1..20 {
            let mut dealt: Vec<u32> =
                (0..count).flat_map(|number| share(&list, number, count)).copied().collect();
            assert_eq!(dealt.len(), count.max(list.len()), "{count}");
            dealt.sort_unstable();
            dealt.dedup();
            assert_eq!(dealt, list, "{count}");
        }
    }

    #[test]
    fn nice_class_and_group_are_those_of_every_worker() {
        let line = "--workers 2 --worker-nice -5 --worker-class rr:7 --worker-cgroup bareblk/w{}";
        let expected = |number: usize| WorkerOptions {
            cpus: vec![],
            nice: Some(-5),
            class: Some(SchedulingClass::RoundRobin(7)),
            cgroup: Some(format!("bareblk/w{number}").into()),
        };
        assert_eq!(options(line), [expected(0), expected(1)]);
    }

    #[test]
    fn table_of_a_file_becomes_the_options_of_one_worker() {
        let args = WorkerArgs { cpus: Some(Cpus(vec![4, 5])), nice: Some(3), class: None, cgroup: None };
        let expected = WorkerOptions { cpus: vec![4, 5], nice: Some(3), ..WorkerOptions::default() };
        assert_eq!(WorkerOptions::from(args), expected);
        assert_eq!(WorkerOptions::from(WorkerArgs::default()), WorkerOptions::default());
    }

    #[test]
    fn values_that_cannot_be_are_refused_with_those_that_can() {
        for (line, part) in [
            ("--workers 0", "from 1 to 1024"),
            ("--workers 1025", "from 1 to 1024"),
            ("--cpus 5-2", "the smaller number must come first"),
            ("--cpus 1,x", "`x` is not a CPU"),
            ("--cpus 0-4000000000", "highest possible is 1023"),
            ("--worker-nice 20", "from -20 to 19"),
            ("--worker-nice -21", "from -20 to 19"),
            ("--worker-class fifo", "fifo:P or rr:P"),
            ("--worker-class fifo:100", "priority P from 1 to 99"),
            ("--worker-cgroup /", "threaded group"),
        ] {
            let text = refusal(line);
            assert!(text.contains(part), "{line}: {text}");
        }
    }
}
