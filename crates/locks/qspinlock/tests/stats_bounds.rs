//! More lines that take locks than a thread has rows for.
//!
//! Runs as its own process: a new thread takes over an ended thread's table with the rows in use.
//!
//! See also: everything else about statistics (`tests/stats.rs`).
#![allow(missing_docs, clippy::unwrap_used)]

use lock_api::Mutex;
use qspinlock::TicketLock;
use qspinlock::stats::{self, Mode, Profiled, SITES};

static L: Mutex<Profiled<TicketLock>, ()> = Mutex::new(());

/// Each expression is a separate site: they differ in the column.
macro_rules! take_each {
    ($($lock:expr),* $(,)?) => { [$(drop($lock)),*].len() };
}

#[rustfmt::skip]
fn take_at_200_sites() -> usize {
    take_each![
        L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(),
        L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(),
        L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(),
        L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(),
        L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(),
        L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(),
        L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(),
        L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(),
        L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(),
        L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(),
        L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(),
        L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(),
        L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(),
        L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(),
        L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(),
        L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(),
        L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(),
        L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(),
        L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(),
        L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(), L.lock(),
    ]
}

#[test]
fn sites_beyond_the_last_row_share_one() {
    stats::set_mode(Mode::Counters);
    let taken = take_at_200_sites() as u64;
    let again = take_at_200_sites() as u64;
    let profile = stats::snapshot();
    let with_rows: u64 = profile.sites.iter().map(|site| site.times.acquired).sum();
    assert_eq!((taken, again, with_rows), (200, 200, 2 * SITES as u64));
    assert_eq!(profile.other.times.acquired, 400 - with_rows);
    assert!(profile.to_string().contains("(other sites)"), "{profile}");
}
