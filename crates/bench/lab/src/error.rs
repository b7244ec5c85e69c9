//! Why a run ended without a result. Each error is one line with a remedy.

use std::io;
use std::path::PathBuf;

/// Why the run ended. A run that ends this way keeps no results.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// The experiment does not exist.
    #[error("experiment '{name}' is unknown: give one of {known}")]
    UnknownExperiment {
        /** The unknown name. */
        name: String,
        /** The names of all experiments. */
        known: String,
    },
    /// The results folder cannot be used.
    #[error("results cannot be written to {}: choose a writable folder with --out", path.display())]
    Output {
        /** The file or folder. */
        path: PathBuf,
        /** The kernel's error. */
        #[source]
        source: io::Error,
    },
    /// The test file, or the folder for it, cannot be used.
    #[error(
        "cannot create the test file of {} MiB in {}: choose a folder with enough space with --storage",
        size_bytes >> 20,
        path.display()
    )]
    Storage {
        /** The folder. */
        path: PathBuf,
        /** Size of the test file. */
        size_bytes: u64,
        /** The kernel's error. */
        #[source]
        source: io::Error,
    },
    /// Earlier results in the same folder cannot be read.
    #[error(
        "this version cannot read the earlier result {}: move the file away, or choose another folder with --out",
        path.display()
    )]
    Unreadable {
        /** The file. */
        path: PathBuf,
        /** The JSON error. */
        #[source]
        source: serde_json::Error,
    },
    /// A drawing failed.
    #[error("the plot {name} cannot be drawn: {reason}")]
    Plot {
        /** The plot's file name. */
        name: String,
        /** The library's message. */
        reason: String,
    },
    /// No variant could be measured.
    #[error("no variant could be measured: {reason}")]
    Nothing {
        /** The error of the first variant. */
        reason: String,
    },
    /// The user interrupted the run.
    #[error("interrupted; no result was written")]
    Interrupted,
}

impl LabError {
    pub(crate) fn output(path: impl Into<PathBuf>, source: io::Error) -> Self {
        Self::Output { path: path.into(), source }
    }
}
