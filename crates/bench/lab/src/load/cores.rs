//! Pins threads and processes to cores.
//!
//! - Unpinned threads may share a core for hundreds of milliseconds after a common start, which would distort the
//!   figures.

use std::sync::OnceLock;

use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The cores that this process could use at the first call.
pub(crate) fn all() -> &'static [usize] {
    static CORES: OnceLock<Vec<usize>> = OnceLock::new();
    CORES.get_or_init(|| {
        let Ok(set) = sched_getaffinity(None) else { return vec![0] };
        let cores: Vec<_> = (0..CpuSet::MAX_CPU).filter(|&core| set.is_set(core)).collect();
        if cores.is_empty() { vec![0] } else { cores }
    })
}

/// Pins the calling thread to core number `place`, counted round robin; false if the kernel refused.
pub(crate) fn pin_this_thread(place: usize) -> bool {
    pin(None, place)
}

/// Pins another process, which must have one thread, in the same way.
pub(crate) fn pin_process(process: u32, place: usize) -> bool {
    let id = i32::try_from(process).ok().and_then(Pid::from_raw);
    id.is_some_and(|id| pin(Some(id), place))
}

fn pin(who: Option<Pid>, place: usize) -> bool {
    sched_setaffinity(who, &set([place])).is_ok()
}

fn set(places: impl IntoIterator<Item = usize>) -> CpuSet {
    let mut set = CpuSet::new();
    places.into_iter().for_each(|place| set.set(at(place)));
    set
}

/// Index of core number `place`, counted round robin.
pub(crate) fn at(place: usize) -> usize {
    let cores = all();
    cores[place % cores.len()]
}

/// Runs `what` with the calling thread bound to the first `count` cores. Processes started by `what` stay on these
/// cores.
pub(crate) fn on_the_first<T>(count: usize, what: impl FnOnce() -> T) -> T {
    let before = sched_getaffinity(None);
    // Errors are ignored: placement is best effort, and the figures show the result.
    let _ = sched_setaffinity(None, &set(0..count));
    let done = what();
    let _ = before.and_then(|before| sched_setaffinity(None, &before));
    done
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mine() -> Vec<usize> {
        let set = sched_getaffinity(None).unwrap();
        (0..CpuSet::MAX_CPU).filter(|&core| set.is_set(core)).collect()
    }

    #[test]
    fn thread_is_bound_while_something_is_done_and_free_afterwards() {
        let found = std::thread::spawn(|| (on_the_first(1, mine), mine())).join().unwrap();
        assert_eq!(found, (vec![all()[0]], all().to_vec()));
    }

    #[test]
    fn thread_that_is_pinned_may_use_that_core_only() {
        let cores = all();
        let found = std::thread::spawn(|| {
            assert!(pin_this_thread(cores.len()));
            mine()
        });
        assert_eq!(found.join().unwrap(), [cores[0]]);
    }
}
