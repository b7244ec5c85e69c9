//! A change to the source of the crate that is mutated.

use serde::Serialize;

/// The crate that is mutated.
pub(crate) const CRATE: &str = "crates/locks/qspinlock";

/// A change to the source.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Mutant {
    /// File, function and change. The name stays the same when lines move.
    pub(crate) name: String,
    /// File and line, for readers.
    pub(crate) place: String,
    /// A description, for readers.
    pub(crate) what: String,
    /// Whether the mutant was written by hand. Such a mutant must compile.
    pub(crate) by_hand: bool,
    /// Whether the mutant is part of each run of the tests, and must be noticed.
    pub(crate) in_smoke: bool,
    /// The changed files, relative to the crate.
    #[serde(skip)]
    pub(crate) files: Vec<(String, String)>,
}
