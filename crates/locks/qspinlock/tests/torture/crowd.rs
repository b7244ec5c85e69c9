//! Up to 64 threads per core on a few locks, with all calls, moving between cores; few threads on many locks.
//!
//! These tests use no signals, no forks, and no threads that end early.

use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Instant;

use fastrand::Rng;
use qspinlock::{Fair, Fifo, Hybrid, Native, Policy};

use crate::rig::{self, CROWD_PER_CORE, Guarded, watched};

/// Contended visits of each thread after the run. They must have all of their nodes back.
const VISITS_AFTERWARDS: usize = 20;

/// The CPUs that a thread may run on.
#[derive(Clone, Copy)]
struct Cpus(libc::cpu_set_t);

impl Cpus {
    fn allowed() -> Self {
        // SAFETY: a set of CPUs is plain bits.
        let mut set = unsafe { std::mem::zeroed() };
        // SAFETY: the size is that of the set, which is written.
        let result = unsafe { libc::sched_getaffinity(0, size_of_val(&set), &raw mut set) };
        assert_eq!(result, 0);
        Self(set)
    }

    /// Moves the thread to a random subset of them, at least one.
    fn move_around(&self, rng: &mut Rng) {
        // SAFETY: only reads bits of the set.
        let allowed = |cpu: &usize| unsafe { libc::CPU_ISSET(*cpu, &self.0) };
        let all: Vec<usize> = (0..libc::CPU_SETSIZE as usize).filter(allowed).collect();
        let certainly = rng.choice(&all).copied();
        // SAFETY: a set of CPUs is plain bits.
        let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
        for &cpu in all.iter().filter(|_| rng.bool()).chain(&certainly) {
            // SAFETY: `cpu` is below the set's size, because it comes from such a set.
            unsafe { libc::CPU_SET(cpu, &mut set) };
        }
        // SAFETY: the size is that of the set, which is read.
        unsafe { libc::sched_setaffinity(0, size_of_val(&set), &raw const set) };
    }
}

/// Visits the locks until `end`; returns how often it was inside.
fn wander<P: Policy>(locks: &[Guarded<P>], cpus: Cpus, end: Instant, seed: u64) -> u64 {
    let mut rng = Rng::with_seed(seed);
    let mut inside = 0;
    while Instant::now() < end {
        let at = rng.usize(..locks.len());
        inside += u64::from(locks[at].visit_somehow(&mut rng));
        if rng.u16(..1000) == 0 {
            cpus.move_around(&mut rng);
        }
    }
    inside
}

fn torture<P: Policy, const LOCKS: usize>(threads: usize) {
    let locks = [const { Guarded::<P>::new() }; LOCKS];
    let afterwards = Guarded::<P>::new();
    let (cpus, end) = (Cpus::allowed(), rig::end());
    let inside = AtomicU64::new(0);
    let all_quiet = Barrier::new(threads);
    watched(&locks, || {
        thread::scope(|scope| {
            for seed in 0..threads as u64 {
                let (locks, afterwards, inside, all_quiet) = (&locks, &afterwards, &inside, &all_quiet);
                scope.spawn(move || {
                    inside.fetch_add(wander(locks, cpus, end, seed), Relaxed);
                    all_quiet.wait();
                    locks.iter().for_each(Guarded::assert_quiet);
                    let before = rig::waits_without_node();
                    (0..VISITS_AFTERWARDS).for_each(|_| afterwards.visit());
                    assert_eq!(rig::waits_without_node(), before, "nodes of this thread are lost");
                });
            }
        });
    });
    let [inside, counted] = [inside.into_inner(), locks.iter().map(Guarded::visits).sum()];
    println!("{threads} threads, {LOCKS} locks: {inside} acquisitions");
    assert_eq!(counted, inside);
    assert_eq!(afterwards.visits(), (threads * VISITS_AFTERWARDS) as u64);
    assert!(inside > threads as u64);
}

#[test]
fn crowd_on_fair_locks_goes_in_one_by_one_and_all_finish() {
    torture::<Fair, 3>(CROWD_PER_CORE * rig::cores());
}

#[test]
fn crowd_on_fifo_locks_goes_in_one_by_one_and_all_finish() {
    torture::<Fifo, 3>(CROWD_PER_CORE * rig::cores());
}

#[test]
fn crowd_on_hybrid_locks_goes_in_one_by_one_and_all_finish() {
    torture::<Hybrid, 3>(CROWD_PER_CORE * rig::cores());
}

#[test]
fn thread_per_core_on_native_locks_goes_in_one_by_one_and_all_finish() {
    torture::<Native, 2>(rig::cores());
}

#[test]
fn timed_waits_on_more_fair_locks_than_a_thread_has_nodes_leave_nothing_behind() {
    torture::<Fair, 16>(8 * rig::cores());
}

#[test]
fn timed_waits_on_more_hybrid_locks_than_a_thread_has_nodes_leave_nothing_behind() {
    torture::<Hybrid, 16>(8 * rig::cores());
}
