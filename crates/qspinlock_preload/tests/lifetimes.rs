//! Programs in C under the library where locks live dangerously: forks, before and after `main`, inside an allocator.
//!
//! Not here: what the calls return (`locks.rs`, `conditions.rs`).

mod preloaded;

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
