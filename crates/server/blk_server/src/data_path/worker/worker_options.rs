//! Options of a worker's thread: its CPUs, nice value, scheduling class and control group.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::str::FromStr;

pub use io_engine::WorkerId;

use crate::host::cgroup::CgroupError;
use crate::host::cpu_list::{MAX_CPU, format_cpus};

/// The scheduling class of a worker's thread (sched(7)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SchedulingClass {
    /// `SCHED_OTHER`.
    Other,
    /// `SCHED_BATCH`.
    Batch,
    /// `SCHED_IDLE`.
    Idle,
    /// `SCHED_FIFO` with this priority, 1 to 99.
    Fifo(u8),
    /// `SCHED_RR` with this priority, 1 to 99.
    RoundRobin(u8),
}

/// Priorities of the real-time classes.
const PRIORITIES: std::ops::RangeInclusive<u8> = 1..=99;
/// Nice values.
const NICES: std::ops::RangeInclusive<i8> = -20..=19;

impl SchedulingClass {
    /// The priority of a real-time class.
    #[must_use]
    pub fn priority(self) -> Option<u8> {
        match self {
            Self::Fifo(priority) | Self::RoundRobin(priority) => Some(priority),
            Self::Other | Self::Batch | Self::Idle => None,
        }
    }
}

/// Formats the class as [`FromStr`] reads it: `other`, `batch`, `idle`, `fifo:50`, `rr:50`.
impl fmt::Display for SchedulingClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Other => f.write_str("other"),
            Self::Batch => f.write_str("batch"),
            Self::Idle => f.write_str("idle"),
            Self::Fifo(priority) => write!(f, "fifo:{priority}"),
            Self::RoundRobin(priority) => write!(f, "rr:{priority}"),
        }
    }
}

/// The text is not a scheduling class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("give other, batch, idle, fifo:P or rr:P, with a priority P from 1 to 99")]
pub struct InvalidClass;

impl FromStr for SchedulingClass {
    type Err = InvalidClass;

    fn from_str(text: &str) -> Result<Self, InvalidClass> {
        let (name, priority) = match text.split_once(':') {
            Some((name, priority)) => (name, Some(priority.parse().map_err(|_| InvalidClass)?)),
            None => (text, None),
        };
        match (name, priority) {
            ("other", None) => Ok(Self::Other),
            ("batch", None) => Ok(Self::Batch),
            ("idle", None) => Ok(Self::Idle),
            ("fifo", Some(priority)) if PRIORITIES.contains(&priority) => Ok(Self::Fifo(priority)),
            ("rr", Some(priority)) if PRIORITIES.contains(&priority) => Ok(Self::RoundRobin(priority)),
            _ => Err(InvalidClass),
        }
    }
}

/// Options of a worker's thread. For an option that is not set, the thread inherits the process's setting.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkerOptions {
    /// CPUs on which the thread may run, in ascending order; empty: all CPUs of the process.
    pub cpus: Vec<u32>,
    /// Nice value, -20 to 19.
    pub nice: Option<i8>,
    /// The worker's scheduling class.
    pub class: Option<SchedulingClass>,
    /// A control group (version 2, threaded). With a leading slash the path begins at the root of the hierarchy (the
    /// mount point may precede it), otherwise at the process's own group.
    pub cgroup: Option<PathBuf>,
}

impl WorkerOptions {
    /// Checks the values that can be checked without asking the system.
    pub(crate) fn check_ranges(&self) -> Result<(), WorkerOptionsError> {
        if let Some(&cpu) = self.cpus.iter().find(|&&cpu| cpu > MAX_CPU) {
            return Err(WorkerOptionsError::CpuTooHigh { cpu });
        }
        if let Some(nice) = self.nice.filter(|nice| !NICES.contains(nice)) {
            return Err(WorkerOptionsError::Nice { nice });
        }
        let priority = self.class.and_then(SchedulingClass::priority);
        match (self.class, priority.filter(|priority| !PRIORITIES.contains(priority))) {
            (Some(class), Some(_)) => Err(WorkerOptionsError::Priority { class }),
            _ => Ok(()),
        }
    }
}

/// Why a worker cannot run with its options.
#[derive(Debug, thiserror::Error)]
pub enum WorkerOptionsError {
    /// No thread can be bound to the CPU.
    #[error("CPU {cpu} is too high: the highest possible is {MAX_CPU}")]
    CpuTooHigh {
        /** The CPU's number. */
        cpu: u32,
    },
    /// The CPU is off or does not exist.
    #[error(
        "CPU {} is offline or does not exist: the online CPUs are {}",
        format_cpus(cpus),
        format_cpus(online)
    )]
    Offline {
        /** The CPUs that are not online. */
        cpus: Vec<u32>,
        /** The CPUs that are online. */
        online: Vec<u32>,
    },
    /// The process's affinity does not include the CPU.
    #[error(
        "CPU {} is outside the process's affinity mask: the process may run on {} (set by a cpuset, or by the affinity at its start)",
        format_cpus(cpus),
        format_cpus(allowed)
    )]
    NotAllowed {
        /** The CPUs on which the process may not run. */
        cpus: Vec<u32>,
        /** The CPUs that the process may use. */
        allowed: Vec<u32>,
    },
    /// The nice value is out of range.
    #[error("nice {nice} is out of range: choose from -20 (the largest share) to 19 (the smallest)")]
    Nice {
        /** The requested nice value. */
        nice: i8,
    },
    /// The process may not use this nice value.
    #[error(
        "nice {nice} is not permitted: the process needs CAP_SYS_NICE, or a limit RLIMIT_NICE of {} (the limit is {limit})",
        20 - i32::from(*nice)
    )]
    NiceDenied {
        /** The requested nice value. */
        nice: i8,
        /** `RLIMIT_NICE`, as `ulimit -e` shows it. */
        limit: String,
    },
    /// The priority is out of range.
    #[error("class {class} is out of range: priorities are 1 (lowest) to 99")]
    Priority {
        /** The requested class. */
        class: SchedulingClass,
    },
    /// The process may not use this class.
    #[error("class {class} is not permitted: {why}")]
    ClassDenied {
        /** The requested class. */
        class: SchedulingClass,
        /** The missing right. */
        why: String,
    },
    /// The thread cannot join its control group.
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    /// Another error.
    #[error("cannot {action}")]
    System {
        /** The attempted action. */
        action: String,
        /** The kernel's error. */
        #[source]
        source: io::Error,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn class_that_is_written_is_read_back() {
        use SchedulingClass::{Batch, Fifo, Idle, Other, RoundRobin};
        for class in [Other, Batch, Idle, Fifo(1), Fifo(99), RoundRobin(50)] {
            assert_eq!(class.to_string().parse(), Ok(class));
        }
    }

    #[test]
    fn text_that_is_no_class_is_refused() {
        for text in
            ["", "fifo", "rr", "fifo:", "fifo:0", "fifo:100", "fifo:-1", "fifo:1:2", "other:5", "FIFO:1"]
        {
            assert_eq!(text.parse::<SchedulingClass>(), Err(InvalidClass), "{text}");
        }
    }

    #[test]
    fn values_beyond_their_range_are_refused_with_the_range() {
        let error = |options: WorkerOptions| options.check().unwrap_err().to_string();
        let plain = WorkerOptions::default;
        assert!(
            error(WorkerOptions { nice: Some(20), ..plain() })
                .contains("nice 20 is out of range: choose from -20")
        );
        assert!(error(WorkerOptions { nice: Some(-21), ..plain() }).contains("-21"));
        let class = Some(SchedulingClass::RoundRobin(100));
        assert!(error(WorkerOptions { class, ..plain() }).contains("class rr:100 is out of range"));
        assert!(error(WorkerOptions { cpus: vec![0, 1024], ..plain() }).contains("highest possible is 1023"));
    }
}
