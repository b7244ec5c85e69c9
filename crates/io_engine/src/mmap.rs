//! A copy from or to a mapping of the file.
//!
//! Not here: op logic (`core.rs`).

use std::io;

use crate::contract::{Engine, EngineConfig, Handles};

/// The engine, not yet started.
#[derive(Debug)]
pub struct MmapEngine {
    _config: EngineConfig,
}

impl MmapEngine {
    /// Makes the engine.
    ///
    /// # Errors
    /// The kernel's.
    pub fn new(_config: EngineConfig) -> io::Result<Self> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

impl Engine for MmapEngine {
    fn start(self: Box<Self>) -> io::Result<Handles> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn describe(&self) -> String {
        "mmap".to_owned()
    }
}
