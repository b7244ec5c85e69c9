//! All settings of a server, from the command line or a configuration file, checked as a whole.

use std::path::PathBuf;

use blk_server::{LimitSettings, WorkerOptions};

use crate::args::serve_args::ServerArgs;
use crate::config::config_words::KeyValues;
use crate::config::disk_settings::DiskSettings;

/// All settings of a server.
#[derive(Clone, Debug)]
pub struct Configuration {
    /// At least one disk. No two disks have the same name, socket or image.
    pub disks: Vec<DiskSettings>,
    pub server: ServerSettings,
    /// Groups of disks that share limits, by name.
    pub groups: Vec<(String, LimitSettings)>,
    /// The file that has these settings, if any. A reload reads it again.
    pub file: Option<PathBuf>,
}

/// The settings of the process.
#[derive(Clone, Debug)]
pub struct ServerSettings {
    pub options: ServerArgs,
    /// One entry for each worker.
    pub workers: Vec<WorkerOptions>,
    /// The keys whose values are not the defaults, as written: a reload compares them. Empty without a file.
    pub words: KeyValues,
}

impl ServerSettings {
    /// `options` also describe the workers.
    pub fn new(options: ServerArgs) -> Self {
        Self { workers: options.workers.options(), options, words: KeyValues::default() }
    }

    /// Adopts those settings of `wanted` that a running server can change.
    pub fn follow(&mut self, wanted: &Self) {
        self.options.stop_timeout = wanted.options.stop_timeout;
    }
}
