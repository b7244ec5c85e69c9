//! A change to the source of the crate that is mutated.

use serde::Serialize;

/// The crate that is mutated.
pub(crate) const CRATE: &str = "crates/locks/qspinlock";

/// A change to the source.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Mutant {
    /// File, function and change: stays the same when lines move.
    pub(crate) name: String,
    /// For readers: file and line.
    pub(crate) place: String,
    /// For readers: a description.
    pub(crate) what: String,
    /// Written by hand. It must compile.
    pub(crate) by_hand: bool,
    /// Must be noticed, and is part of each run of the tests.
    pub(crate) in_smoke: bool,
    /// The changed files, relative to the crate.
    #[serde(skip)]
    pub(crate) files: Vec<(String, String)>,
}
