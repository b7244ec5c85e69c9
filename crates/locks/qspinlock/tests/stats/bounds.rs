//! More lines that take locks than a thread has rows for.
//!
//! The test runs once more in a process of its own: a new thread takes over an ended thread's table with the rows in use.

use std::process::Command;

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

const NAME: &str = "bounds::sites_beyond_the_last_row_share_one";
/// Set in the process that runs only this test.
const ALONE: &str = "QSPINLOCK_TEST_ALONE";

#[test]
fn sites_beyond_the_last_row_share_one() {
    if std::env::var_os(ALONE).is_none() {
        let program = std::env::current_exe().unwrap();
        let output = Command::new(program).args(["--exact", NAME]).env(ALONE, "1").output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains("1 passed"), "{said}");
        return;
    }
    stats::set_mode(Mode::Counters);
    let taken = take_at_200_sites() as u64;
    let again = take_at_200_sites() as u64;
    let profile = stats::snapshot();
    let with_rows: u64 = profile.sites.iter().map(|site| site.times.acquired).sum();
    assert_eq!((taken, again, with_rows), (200, 200, 2 * SITES as u64));
    assert_eq!(profile.other.times.acquired, 400 - with_rows);
    assert!(profile.to_string().contains("(other sites)"), "{profile}");
}
