//! Plain calls in the worker itself.
//!
//! Not here: op logic (`core.rs`).

use std::io;

use crate::contract::{Engine, EngineConfig, Handles};

/// The engine, not yet started.
#[derive(Debug)]
pub struct SyncEngine {
    _config: EngineConfig,
}

impl SyncEngine {
    /// Makes the engine.
    ///
    /// # Errors
    /// The kernel's.
    pub fn new(_config: EngineConfig) -> io::Result<Self> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

impl Engine for SyncEngine {
    fn start(self: Box<Self>) -> io::Result<Handles> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn describe(&self) -> String {
        "sync".to_owned()
    }
}
