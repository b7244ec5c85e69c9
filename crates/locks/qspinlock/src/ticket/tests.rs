//! Tests that read the ticket lock's word: order of service, wrap of the tickets.
//!
//! See also: tests for every lock (`tests/it/contract.rs`), all interleavings (`model/`).
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::thread;
use std::vec::Vec;

use lock_api::{RawMutex, RawMutexFair};

use super::*;
use crate::TicketMutex;

/// Starts threads that queue one after another while the lock is held; returns the order of service.
fn order_of_service(lock: TicketLock, waiters: u16) -> Vec<u16> {
    let mutex = Arc::new(lock_api::Mutex::from_raw(lock, Vec::new()));
    let held = mutex.lock();
    let mut threads = Vec::new();
    for name in 0..waiters {
        let theirs = Arc::clone(&mutex);
        threads.push(thread::spawn(move || theirs.lock().push(name)));
        wait_until_outstanding(&mutex, 2 + name);
    }
    drop(held);
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    Arc::into_inner(mutex).unwrap().into_inner()
}

fn wait_until_outstanding(mutex: &TicketMutex<Vec<u16>>, wanted: u16) {
    // SAFETY: the raw lock is only read.
    let raw = unsafe { mutex.raw() };
    while raw.outstanding() < wanted {
        thread::yield_now();
    }
}

#[test]
fn waiters_are_served_in_the_order_they_came() {
    assert_eq!(order_of_service(TicketLock::starting_at(0), 5), [0, 1, 2, 3, 4]);
}

#[test]
fn order_is_kept_across_the_wrap_of_the_tickets() {
    assert_eq!(order_of_service(TicketLock::starting_at(u16::MAX - 2), 5), [0, 1, 2, 3, 4]);
}

#[test]
fn calling_the_last_ticket_leaves_the_drawn_ones_alone() {
    let lock = TicketLock::starting_at(u16::MAX);
    let ticket = lock.acquire();
    assert_eq!((ticket.0, lock.word.load(Relaxed)), (u16::MAX, 0x0000_FFFF));
    lock.release(ticket);
    assert_eq!(lock.word.load(Relaxed), 0);
}

#[test]
fn try_lock_across_the_wrap_succeeds_when_free_and_fails_when_held() {
    let lock = TicketLock::starting_at(u16::MAX);
    let ticket = lock.try_acquire().unwrap();
    assert!(lock.try_acquire().is_none() && lock.is_locked());
    lock.release(ticket);
    assert_eq!(lock.try_acquire().unwrap().0, 0);
}

#[test]
fn bump_without_waiters_keeps_the_ticket_and_with_one_lets_it_go_first() {
    let lock = Arc::new(TicketLock::starting_at(u16::MAX));
    let mut ticket = lock.acquire();
    // SAFETY: `ticket` is the holder's.
    unsafe { lock.bump(&mut ticket) };
    assert_eq!(ticket.0, u16::MAX);
    let other = thread::spawn({
        let lock = Arc::clone(&lock);
        move || {
            let ticket = lock.acquire();
            let drawn = ticket.0;
            lock.release(ticket);
            drawn
        }
    });
    while lock.outstanding() < 2 {
        thread::yield_now();
    }
    // SAFETY: `ticket` is the holder's.
    unsafe { lock.bump(&mut ticket) };
    assert_eq!((other.join().unwrap(), ticket.0), (0, 1));
}

#[test]
fn thirty_two_thousand_waiters_are_as_many_as_may_be() {
    // One more would abort the process.
    assert_not_crowded(MAX_OUTSTANDING, 0);
    assert_not_crowded(3, u16::MAX - 3);
}

#[test]
fn lock_is_four_bytes() {
    assert_eq!((size_of::<TicketLock>(), size_of::<TicketMutex<()>>()), (4, 4));
}
