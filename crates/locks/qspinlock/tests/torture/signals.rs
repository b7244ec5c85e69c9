//! Signal handlers that take locks while the thread they interrupt waits for another lock, and handlers that
//! interrupt those.
//!
//! A handler may take only locks that its thread does not hold: the handlers here have locks of their own.
//!
//! No handler forks.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use fastrand::Rng;
use qspinlock::{Fair, Fifo, Hybrid, Policy};

use crate::rig::{self, Guarded, watched};

/// The signals; each has a handler with its own locks.
const SIGNALS: [libc::c_int; 2] = [libc::SIGUSR1, libc::SIGUSR2];

static FAIR: [Guarded<Fair>; 2] = [const { Guarded::new() }; 2];
static HYBRID: [Guarded<Hybrid>; 2] = [const { Guarded::new() }; 2];
static HANDLED: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];

/// Takes the locks of its signal. The second signal may interrupt the first one's handler.
extern "C" fn handle(signal: libc::c_int) {
    let at = usize::from(signal == SIGNALS[1]);
    FAIR[at].visit();
    HYBRID[at].visit();
    HANDLED[at].fetch_add(1, Relaxed);
}

fn install_handlers() {
    for signal in SIGNALS {
        // SAFETY: an action is plain data, and zeroes are a valid value.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = handle as extern "C" fn(libc::c_int) as usize;
        action.sa_flags = libc::SA_RESTART;
        if signal == SIGNALS[1] {
            // The second signal interrupts the first, but not the other way round: each would wait for what
            // the other holds.
            // SAFETY: the set is the action's, and the signal exists.
            unsafe { libc::sigaddset(&raw mut action.sa_mask, SIGNALS[0]) };
        }
        // SAFETY: the handler uses only atomics and locks that are made for handlers.
        let result = unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) };
        assert_eq!(result, 0);
    }
}

/// Sends signals to `threads`, which stay alive until after `end`.
fn bombard(threads: &[libc::pthread_t]) -> u64 {
    let (mut rng, mut sent, end) = (Rng::with_seed(1), 0, rig::end());
    while std::time::Instant::now() < end {
        let thread = threads[rng.usize(..threads.len())];
        // SAFETY: the thread is alive, and has handlers for both.
        unsafe { libc::pthread_kill(thread, SIGNALS[rng.usize(..2)]) };
        sent += 1;
        if rng.u8(..4) == 0 {
            thread::sleep(Duration::from_micros(rng.u64(..100)));
        }
    }
    sent
}

fn torture<P: Policy>() {
    install_handlers();
    let locks = [const { Guarded::<P>::new() }; 2];
    let over = AtomicBool::new(false);
    let handled = || HANDLED.iter().map(|handled| handled.load(Relaxed)).sum::<u64>();
    let handled_before = handled();
    watched(&locks, || {
        thread::scope(|scope| {
            let (own_id, ids) = std::sync::mpsc::channel();
            let workers = 8 * rig::cores();
            for seed in 0..workers as u64 {
                let (own_id, locks, over) = (own_id.clone(), &locks, &over);
                scope.spawn(move || {
                    // SAFETY: takes nothing, cannot fail.
                    own_id.send(unsafe { libc::pthread_self() }).unwrap();
                    let mut rng = Rng::with_seed(seed);
                    while !over.load(Relaxed) {
                        locks[rng.usize(..2)].visit_somehow(&mut rng);
                    }
                });
            }
            let ids: Vec<_> = ids.iter().take(workers).collect();
            let sent = bombard(&ids);
            over.store(true, Relaxed);
            println!("{sent} signals, {} handled", handled() - handled_before);
        });
    });
    locks.iter().for_each(Guarded::assert_quiet);
    assert!(handled() > handled_before);
}

#[test]
fn handlers_take_locks_while_their_thread_waits_for_a_fair_one() {
    torture::<Fair>();
}

#[test]
fn handlers_take_locks_while_their_thread_waits_for_a_fifo_one() {
    torture::<Fifo>();
}

#[test]
fn handlers_take_locks_while_their_thread_waits_for_a_hybrid_one() {
    torture::<Hybrid>();
}
