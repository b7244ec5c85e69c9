//! Applies a worker's options to its thread: control group, CPUs, scheduling class, nice value, in this order.
//!
//! - The thread does this itself before it allocates, so that its memory comes from its own node. Threads that it
//!   starts later inherit all four settings.
//! - The group comes first, because a cpuset resets the affinity.
//! - If a setting fails, the thread ends, and its worker does not start.

use std::io;

use preempt_rt::sched::{PreemptRtError, Scheduler, SchedulerParams};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit, setpriority_process};
use rustix::thread::{CapabilitySet, CpuSet, capabilities, sched_getaffinity, sched_setaffinity};
use tracing::{debug, info, warn};

use crate::data_path::worker::worker_options::{
    SchedulingClass, WorkerId, WorkerOptions, WorkerOptionsError,
};
use crate::host::cgroup;
use crate::host::cpu_list::{MAX_CPU, format_cpus, parse_kernel_list};
use crate::host::numa;

/// Applies `options` to the calling thread.
pub(crate) fn apply(options: &WorkerOptions) -> Result<(), WorkerOptionsError> {
    options.check_ranges()?;
    if let Some(group) = &options.cgroup {
        cgroup::join(group)?;
    }
    if !options.cpus.is_empty() {
        bind(&options.cpus)?;
    }
    if let Some(class) = options.class {
        set_class(class)?;
    }
    options.nice.map_or(Ok(()), set_nice)
}

impl WorkerOptions {
    /// Checks whether a worker could run with these options, by applying them to a thread that ends at once.
    ///
    /// # Errors
    /// The first [`WorkerOptionsError`].
    pub fn check(&self) -> Result<(), WorkerOptionsError> {
        let options = self.clone();
        let thread = std::thread::Builder::new().name("bareblk-check".into()).spawn(move || apply(&options));
        let thread = thread.map_err(|source| system("start a thread", source))?;
        thread.join().unwrap_or_else(|_| Err(system("try the worker's options", io::ErrorKind::Other.into())))
    }
}

/// Logs the worker's CPUs and settings, by default at level debug. Returns the NUMA node from which the worker's memory
/// comes; `None` if there may be several.
pub(crate) fn log_start(id: WorkerId, options: &WorkerOptions) -> Option<u32> {
    let cpus = allowed_cpus().unwrap_or_default();
    let (cpus, node) = (format_cpus(&cpus), numa::node_of(&cpus));
    if *options == WorkerOptions::default() {
        debug!(worker = %id, cpus, node, "worker started");
        return node;
    }
    let class = options.class.map(tracing::field::display);
    let group = options.cgroup.as_deref().map(|path| tracing::field::display(path.display()));
    info!(worker = %id, cpus, node, nice = options.nice, class, cgroup = group, "worker started");
    node
}

/// Enables the calling worker to interrupt guests without waiting for their front-ends.
pub(crate) fn prepare_signals(id: WorkerId) {
    if let Err(error) = io_engine::prepare_signals() {
        warn!(worker = %id, "a front-end that fills its call descriptor can block this worker forever: {error}");
    }
}

/// Warns if workers share CPUs, which is seldom intended.
pub(crate) fn warn_if_crowded(workers: &[WorkerOptions]) {
    let Some(allowed) = allowed_cpus() else { return };
    if let Some(cpus) = crowded(workers, &allowed) {
        warn!(
            workers = workers.len(),
            cpus = format_cpus(&cpus),
            "there are more workers than CPUs that they may use"
        );
    }
}

/// Returns the CPUs that `workers` may use, if they are fewer than the workers.
fn crowded(workers: &[WorkerOptions], allowed: &[u32]) -> Option<Vec<u32>> {
    let cpus_of = |worker: &WorkerOptions| {
        if worker.cpus.is_empty() { allowed.to_vec() } else { worker.cpus.clone() }
    };
    let mut cpus: Vec<u32> = workers.iter().flat_map(cpus_of).collect();
    cpus.sort_unstable();
    cpus.dedup();
    (cpus.len() < workers.len()).then_some(cpus)
}

fn system(action: impl Into<String>, source: io::Error) -> WorkerOptionsError {
    WorkerOptionsError::System { action: action.into(), source }
}

/// Returns `None` if the host has more CPUs than a `CpuSet` can hold.
fn allowed_cpus() -> Option<Vec<u32>> {
    let set = sched_getaffinity(None).ok()?;
    Some((0..=MAX_CPU).filter(|&cpu| set.is_set(cpu as usize)).collect())
}

fn online_cpus() -> Option<Vec<u32>> {
    parse_kernel_list(&std::fs::read_to_string("/sys/devices/system/cpu/online").ok()?)
}

fn bind(cpus: &[u32]) -> Result<(), WorkerOptionsError> {
    let not_in =
        |set: &[u32]| -> Vec<u32> { cpus.iter().filter(|cpu| !set.contains(cpu)).copied().collect() };
    if let Some(online) = online_cpus().filter(|online| !not_in(online).is_empty()) {
        return Err(WorkerOptionsError::Offline { cpus: not_in(&online), online });
    }
    // The kernel would let the thread leave the process's initial affinity, but the operator chose that affinity.
    let not_allowed = |allowed: Vec<u32>| WorkerOptionsError::NotAllowed { cpus: not_in(&allowed), allowed };
    if let Some(allowed) = allowed_cpus().filter(|allowed| !not_in(allowed).is_empty()) {
        return Err(not_allowed(allowed));
    }
    let mut set = CpuSet::new();
    cpus.iter().for_each(|&cpu| set.set(cpu as usize));
    let action = || format!("bind the worker to CPU {}", format_cpus(cpus));
    sched_setaffinity(None, &set).map_err(|errno| system(action(), errno.into()))?;
    // The kernel ignores CPUs in the set that the thread cannot use.
    match allowed_cpus() {
        Some(bound) if bound != cpus => Err(not_allowed(bound)),
        _ => Ok(()),
    }
}

fn set_class(class: SchedulingClass) -> Result<(), WorkerOptionsError> {
    let scheduler = match class {
        SchedulingClass::Other => Scheduler::SCHED_NORMAL,
        SchedulingClass::Batch => Scheduler::SCHED_BATCH,
        SchedulingClass::Idle => Scheduler::SCHED_IDLE,
        SchedulingClass::Fifo(_) => Scheduler::SCHED_FIFO,
        SchedulingClass::RoundRobin(_) => Scheduler::SCHED_RR,
    };
    let params = SchedulerParams { priority: class.priority().unwrap_or(0).into() };
    scheduler.with_params(params).set_current().map_err(|error| match error {
        PreemptRtError::Errno(errno) if errno == Errno::PERM.raw_os_error() => {
            WorkerOptionsError::ClassDenied { class, why: why_no_class(class) }
        }
        PreemptRtError::Errno(errno) => system(class_action(class), io::Error::from_raw_os_error(errno)),
        other => system(class_action(class), io::Error::other(other)),
    })
}

fn class_action(class: SchedulingClass) -> String {
    format!("give the worker scheduling class {class}")
}

fn why_no_class(class: SchedulingClass) -> String {
    let Some(priority) = class.priority() else {
        return "the process needs CAP_SYS_NICE".into();
    };
    if capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_NICE)) {
        return "the process has CAP_SYS_NICE, but its control group has no real-time budget (cpu.rt_runtime_us)"
            .into();
    }
    let limit = limit_text(Resource::Rtprio);
    format!("the process needs CAP_SYS_NICE, or a limit RLIMIT_RTPRIO of {priority} (the limit is {limit})")
}

fn set_nice(nice: i8) -> Result<(), WorkerOptionsError> {
    // On Linux this applies to one thread.
    setpriority_process(None, nice.into()).map_err(|errno| match errno {
        Errno::ACCESS | Errno::PERM => {
            WorkerOptionsError::NiceDenied { nice, limit: limit_text(Resource::Nice) }
        }
        errno => system(format!("set the worker's nice value to {nice}"), errno.into()),
    })
}

fn limit_text(resource: Resource) -> String {
    getrlimit(resource).current.map_or("unlimited".into(), |limit| limit.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on(cpus: &[u32]) -> WorkerOptions {
        WorkerOptions { cpus: cpus.into(), ..WorkerOptions::default() }
    }

    #[test]
    fn workers_are_crowded_if_together_they_have_fewer_cpus_than_heads() {
        let allowed = [0, 1, 2];
        assert_eq!(crowded(&[on(&[]), on(&[]), on(&[])], &allowed), None);
        assert_eq!(crowded(&[on(&[1]), on(&[2])], &allowed), None);
        assert_eq!(crowded(&[on(&[1]), on(&[1])], &allowed), Some(vec![1]));
        assert_eq!(crowded(&[on(&[]), on(&[]), on(&[]), on(&[0])], &allowed), Some(vec![0, 1, 2]));
    }

    #[test]
    fn trying_options_out_leaves_the_caller_as_it_was() {
        let before = allowed_cpus().unwrap();
        on(&before[..1]).check().unwrap();
        assert_eq!(allowed_cpus().unwrap(), before);
    }

    #[test]
    fn cpu_that_does_not_exist_is_refused_with_those_that_do() {
        let error = on(&[0, 1023]).check().unwrap_err();
        let online = format_cpus(&online_cpus().unwrap());
        let expected = format!("CPU 1023 is offline or does not exist: the online CPUs are {online}");
        assert_eq!(error.to_string(), expected);
    }

    /// Uses a separate thread, because that thread stays bound.
    #[test]
    fn cpu_outside_the_affinity_is_refused_with_those_inside() {
        let cpus = allowed_cpus().unwrap();
        if cpus.len() < 2 {
            return xtask::skip::skip(xtask::skip::Reason::OneCpu, "");
        }
        let refused = std::thread::spawn(move || {
            bind(&cpus[1..2]).unwrap();
            (on(&cpus[..1]).check().unwrap_err().to_string(), cpus)
        });
        let (error, cpus) = refused.join().unwrap();
        let expected = format!(
            "CPU {} is outside the process's affinity mask: the process may run on {}",
            cpus[0], cpus[1]
        );
        assert!(error.starts_with(&expected), "{error}");
    }
}
