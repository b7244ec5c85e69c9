//! Condition variables of C programs under the library. The programs (`c/`) contain the expectations.
//!
//! See also: condition variables that are passed on (`locks.rs`).

use crate::preloaded;

#[test]
fn signals_wake_those_who_wait_and_none_is_lost() {
    preloaded::passes("cond");
}

#[test]
fn cancelled_waits_have_the_mutex_in_their_handlers() {
    preloaded::passes("cancel");
}

#[test]
fn handlers_made_for_exceptions_have_it_as_well() {
    preloaded::passes_with("cancel", &["-fexceptions"]);
}

#[test]
fn condition_may_be_destroyed_and_its_memory_go_as_soon_as_all_are_woken() {
    preloaded::passes("destroy");
}
