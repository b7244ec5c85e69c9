//! A feature that the host has or lacks, and why: one line of `bareblk engines`.

/// A feature of the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capability {
    /// The feature's name.
    pub name: &'static str,
    /// Whether this process can use the feature.
    pub available: bool,
    /// Details that the probe found, or the reason why the feature is unavailable.
    pub detail: String,
}
