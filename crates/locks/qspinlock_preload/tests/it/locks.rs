//! Spin locks, mutexes and reader/writer locks of C programs under the library. The programs (`c/`) contain
//! the expectations.
//!
//! See also: condition variables (`conditions.rs`), forks and exits (`lifetimes.rs`).

use crate::preloaded;

#[test]
fn programs_notice_if_they_run_without_the_library() {
    let Some(complaint) = preloaded::complaint_without("spin") else { return };
    assert!(complaint.contains("version != "), "{complaint:?}");
}

#[test]
fn private_spin_locks_exclude_and_report_misuse() {
    preloaded::passes("spin");
}

#[test]
fn process_shared_spin_locks_exclude_processes_and_wake_them() {
    preloaded::passes("spin_shared");
}

#[test]
fn mutexes_of_every_replaced_kind_return_what_posix_says() {
    preloaded::passes("mutex");
}

#[test]
fn mutexes_and_conditions_that_are_passed_on_work_as_without_the_library() {
    preloaded::passes("passed");
}

#[test]
fn reader_writer_locks_share_readers_and_return_what_posix_says() {
    preloaded::passes("rwlock");
}

#[test]
fn c11_mutexes_and_conditions_are_replaced_together() {
    preloaded::passes("c11");
}
