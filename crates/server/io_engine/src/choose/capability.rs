//! One thing that a host offers, or does not, and why: a line of `bareblk engines`.
//!
//! Not here: finding out (`io_uring/capabilities.rs`).

/// See the file's head.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capability {
    /// What it is called.
    pub name: &'static str,
    /// Whether it can be used.
    pub available: bool,
    /// What was found, or why not.
    pub detail: String,
}
