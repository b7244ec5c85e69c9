//! Everything that a server is to serve, from the command line or a configuration file, checked as a whole.
//!
//! Not here: reading a file (`config_file.rs`), following it (`serving`).

use std::collections::BTreeMap;
use std::path::PathBuf;

use blk_server::WorkerOptions;

use crate::args::serve_args::ServerArgs;
use crate::config::disk_settings::DiskSettings;

/// What to serve.
#[derive(Clone, Debug)]
pub struct Configuration {
    /// At least one; names, sockets and images do not clash.
    pub disks: Vec<DiskSettings>,
    pub server: ServerSettings,
    /// The file that it was read from, and can be read from again.
    pub file: Option<PathBuf>,
}

/// The settings of the process.
#[derive(Clone, Debug)]
pub struct ServerSettings {
    pub options: ServerArgs,
    /// One entry for each worker.
    pub workers: Vec<WorkerOptions>,
    /// Each key with its value as written or its default: two readings of a file are compared by them. Empty without
    /// a file.
    pub words: BTreeMap<String, String>,
}

impl ServerSettings {
    /// Workers are those that `options` describe.
    pub fn new(options: ServerArgs) -> Self {
        Self { workers: options.workers.options(), options, words: BTreeMap::new() }
    }

    /// Takes over the settings of `wanted` that a running server can change.
    pub fn follow(&mut self, wanted: &Self) {
        self.options.stop_timeout = wanted.options.stop_timeout;
    }
}
