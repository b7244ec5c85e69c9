//! Three threads.
