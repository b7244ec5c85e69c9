//! `kick`: the loads, and their positions on the curves.
//!
//! - The number of loads depends on the cores: in-process loads with 1, 2, 4, … threads up to the number of
//!   cores (8 from ten cores on), and one with twice as many threads as cores.

use crate::experiment::Workload;
use crate::load::Pattern;
use crate::load::shared_queue::null_device::By;

/// Key of the axis: spin time per notification, in µs.
pub(crate) const NOTIFY_US: &str = "notify-us";
/// Key of the axis: threads on the queue.
pub(crate) const THREADS: &str = "threads";
const COSTS_US: [u32; 5] = [0, 1, 2, 5, 10];
/// Notification cost, in µs, of the in-process load's variants and of the target.
const USUAL_COST_US: u32 = 2;

/// Where the requests go.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Way {
    /// To a null device in this process, by a notification that takes `cost_us`.
    Process { cost_us: u32, by: By, event_idx: bool },
    /// To a server in this process, over sockets, with this many disks.
    Socket { disks: usize },
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Load {
    pub workload: Workload,
    pub way: Way,
    pub pattern: Pattern,
    pub read_percent: u8,
    pub block_bytes: u32,
    pub jobs: Jobs,
    pub threads: usize,
    /// Depth of each job.
    pub depth: u16,
    pub queue_size: u16,
    /// Number of requests of the whole published job, if the job has an end.
    pub requests: Option<u64>,
}

/// The number of jobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Jobs {
    /// One job per thread.
    PerThread,
    /// A fixed number of jobs.
    Fixed(usize),
}

/// The published job: 256 × 4 MB × 3, in blocks of 512 bytes.
pub(crate) const JOBS: usize = 256;
pub(crate) const JOB_BYTES: u64 = 4 << 20;
const JOB_REQUESTS: u64 = JOBS as u64 * JOB_BYTES / 512 * 3;

/// Cores that this process may use.
pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Number of threads with which the in-process target is judged: all cores of a small machine, 8 on a larger one.
pub(crate) fn contending_threads(cores: usize) -> usize {
    if cores >= 10 { 8 } else { thread_counts(cores).into_iter().next_back().unwrap_or(1) }
}

/// Powers of two up to the number of cores.
pub(crate) fn thread_counts(cores: usize) -> Vec<usize> {
    (0..=3).map(|power| 1 << power).filter(|&count| count <= cores.max(1)).collect()
}

impl Load {
    /// Whether there are more threads than cores. Locks that only spin are not measured then.
    pub fn is_crowded(&self, cores: usize) -> bool {
        self.threads > cores
    }
}

/// All loads, in the order of the tables.
pub(crate) fn loads(cores: usize) -> Vec<Load> {
    let counts = thread_counts(cores).into_iter().chain([2 * cores]);
    let mut loads: Vec<_> =
        counts.flat_map(|threads| COSTS_US.map(|cost_us| on_the_curve(cost_us, threads, cores))).collect();
    let threads = contending_threads(cores);
    loads.push(other(threads, By::Notifier, true));
    loads.push(other(threads, By::Thread, false));
    loads.extend(PATTERNS.map(|pattern| published_job("jobs", "a thread each", pattern, JOBS)));
    let on_cores = format!("on {}", threads_in_words(cores));
    loads.extend(PATTERNS.map(|pattern| published_job("vcpus", &on_cores, pattern, cores)));
    loads.push(disks(12, 8192, 50, cores));
    loads.push(disks(4, 1024, 100, cores));
    loads
}

/// Id of an in-process load on the curves.
pub(crate) fn process_id(cost_us: u32, threads: usize) -> String {
    format!("process-{cost_us}us-{threads}t")
}

fn threads_in_words(threads: usize) -> String {
    if threads == 1 { "1 thread".to_owned() } else { format!("{threads} threads") }
}

fn in_process(id: &str, label: &str, threads: usize, way: Way) -> Load {
    Load {
        workload: Workload::new(id, label),
        way,
        pattern: Pattern::Random,
        read_percent: 100,
        block_bytes: 512,
        jobs: Jobs::PerThread,
        threads,
        depth: 32,
        queue_size: 256,
        requests: None,
    }
}

fn on_the_curve(cost_us: u32, threads: usize, cores: usize) -> Load {
    let crowded = if threads > cores { " (more than cores)" } else { "" };
    let words = threads_in_words(threads);
    let label = format!("in process, {cost_us} µs per notification, {words}{crowded}");
    let way = Way::Process { cost_us, by: By::Notifier, event_idx: false };
    let mut load = in_process(&process_id(cost_us, threads), &label, threads, way);
    #[allow(clippy::cast_precision_loss)] // a number of threads
    let place = threads as f64;
    load.workload = load.workload.at(NOTIFY_US, f64::from(cost_us)).at(THREADS, place);
    load
}

fn other(threads: usize, by: By, event_idx: bool) -> Load {
    let (id, what) = match by {
        By::Thread => ("process-own-thread", "the device has its own thread"),
        By::Notifier => ("process-event-idx", "with EVENT_IDX"),
    };
    let words = threads_in_words(threads);
    let label = format!("in process, {USUAL_COST_US} µs per notification, {words}, {what}");
    in_process(id, &label, threads, Way::Process { cost_us: USUAL_COST_US, by, event_idx })
}

const PATTERNS: [(&str, Pattern, u8); 4] = [
    ("read", Pattern::Sequential, 100),
    ("write", Pattern::Sequential, 0),
    ("randread", Pattern::Random, 100),
    ("randwrite", Pattern::Random, 0),
];

fn published_job(
    prefix: &str,
    words: &str,
    (name, pattern, read_percent): (&str, Pattern, u8),
    threads: usize,
) -> Load {
    let label = format!("socket, {name}, 512 B, {JOBS} jobs of depth 64, {words}");
    Load {
        workload: Workload::new(&format!("{prefix}-{name}"), &label),
        way: Way::Socket { disks: 1 },
        pattern,
        read_percent,
        block_bytes: 512,
        jobs: Jobs::Fixed(JOBS),
        threads,
        depth: 64,
        queue_size: 1024,
        requests: Some(JOB_REQUESTS),
    }
}

fn disks(disks: usize, block_bytes: u32, read_percent: u8, cores: usize) -> Load {
    let (kib, words) = (block_bytes / 1024, threads_in_words(cores));
    let mix = if read_percent == 100 { "random reads" } else { "random 50/50" };
    let label = format!("socket, {disks} disks, {kib} KiB {mix}, on {words}");
    Load {
        workload: Workload::new(&format!("disks-{disks}"), &label),
        way: Way::Socket { disks },
        pattern: Pattern::Random,
        read_percent,
        block_bytes,
        jobs: Jobs::Fixed(disks * cores),
        threads: cores,
        depth: 32,
        queue_size: 256,
        requests: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn target_is_judged_at_all_cores_of_a_small_machine_and_at_eight_of_a_larger() {
        assert_eq!([1, 2, 3, 4, 8, 10, 64].map(contending_threads), [1, 2, 2, 4, 8, 8, 8]);
        assert_eq!(thread_counts(2), [1, 2]);
        assert_eq!(thread_counts(40), [1, 2, 4, 8]);
    }

    #[test]
    fn loads_have_names_of_their_own_on_every_machine() {
        for cores in [1, 2, 3, 8, 64, 256] {
            let loads = loads(cores);
            let ids: std::collections::BTreeSet<_> = loads.iter().map(|load| &load.workload.id).collect();
            assert_eq!(ids.len(), loads.len(), "{cores} cores");
        }
    }

    #[test]
    fn published_job_is_six_million_requests() {
        assert_eq!(JOB_REQUESTS, 6_291_456);
    }
}
