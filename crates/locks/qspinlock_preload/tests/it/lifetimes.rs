//! C programs under the library whose locks have difficult lifetimes: forks, before and after `main`, inside
//! an allocator, among C++ destructors.
//!
//! See also: return values of the calls (`locks.rs`, `conditions.rs`).

use crate::preloaded;

#[test]
fn locks_that_atfork_handlers_take_work_in_parent_and_child() {
    preloaded::passes("fork");
}

#[test]
fn locks_work_before_main_after_it_and_at_the_end_of_threads() {
    preloaded::passes("early_and_late");
}

#[test]
fn allocator_behind_a_mutex_is_not_entered_again() {
    preloaded::passes("allocator");
}

#[test]
fn errno_is_left_as_it_was() {
    preloaded::passes("errno");
}

#[test]
fn cpp_standard_library_uses_them_and_cancellation_runs_destructors() {
    preloaded::passes_in_cpp("standard_library");
}
