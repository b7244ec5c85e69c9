//! Wraps every call: catches panics, and converts the result to the return value of a C function.

use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::failure::Failure;

/// Runs `body` and converts its result to the return value.
#[inline]
pub(crate) fn guarded(body: impl FnOnce() -> Result<c_int, Failure>) -> c_int {
    // A poisoned lock, or the mark that `on_queue` sets, keeps later calls away from state that `body` left half
    // changed.
    let outcome = catch_unwind(AssertUnwindSafe(body)).unwrap_or(Err(Failure::Panic));
    outcome.unwrap_or_else(|failure| failure.report())
}

/// Converts a count to a result. No count of this library exceeds `c_int`.
pub(crate) fn count(count: usize) -> c_int {
    c_int::try_from(count).unwrap_or(c_int::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::bareblk_code;

    #[test]
    fn panic_ends_as_a_code_and_not_in_the_caller() {
        assert_eq!(guarded(|| panic!("on purpose")), bareblk_code::BAREBLK_ERR_BUG as c_int);
    }
}
