//! Threads and processes, each on a core of its own choosing.
//!
//! - Threads that are not pinned may share a core for hundreds of milliseconds after a common start, and be measured so.
//!
//! Not here: what runs on them.

use std::sync::OnceLock;

use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The cores that this process could use when it first asked.
pub(crate) fn all() -> &'static [usize] {
    static CORES: OnceLock<Vec<usize>> = OnceLock::new();
    CORES.get_or_init(|| {
        let Ok(set) = sched_getaffinity(None) else { return vec![0] };
        let cores: Vec<_> = (0..CpuSet::MAX_CPU).filter(|&core| set.is_set(core)).collect();
        if cores.is_empty() { vec![0] } else { cores }
    })
}

/// Puts the calling thread on the core that is `place`'s turn, round robin; false if the kernel refused.
pub(crate) fn pin_this_thread(place: usize) -> bool {
    pin(None, place)
}

/// Puts another process there, of one thread.
pub(crate) fn pin_process(process: u32, place: usize) -> bool {
    let id = i32::try_from(process).ok().and_then(Pid::from_raw);
    id.is_some_and(|id| pin(Some(id), place))
}

fn pin(who: Option<Pid>, place: usize) -> bool {
    let cores = all();
    let mut set = CpuSet::new();
    set.set(cores[place % cores.len()]);
    sched_setaffinity(who, &set).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thread_that_is_pinned_may_use_that_core_only() {
        let cores = all();
        let found = std::thread::spawn(|| {
            assert!(pin_this_thread(cores.len()));
            let set = sched_getaffinity(None).unwrap();
            (0..CpuSet::MAX_CPU).filter(|&core| set.is_set(core)).collect::<Vec<_>>()
        });
        assert_eq!(found.join().unwrap(), [cores[0]]);
    }
}
