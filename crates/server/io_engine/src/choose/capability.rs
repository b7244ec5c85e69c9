//! A feature that the host has or lacks, and why: one line of `bareblk engines`.

/// A feature of the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capability {
    /// The feature's name.
    pub name: &'static str,
    /// Whether it can be used.
    pub available: bool,
    /// What the probe found, or why the feature is unavailable.
    pub detail: String,
}
