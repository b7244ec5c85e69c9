//! A pool of threads with plain calls.
//!
//! Not here: op logic (`core.rs`).

pub(crate) mod pool;

use std::io;

use crate::contract::{Engine, EngineConfig, Handles};

/// The engine, not yet started.
#[derive(Debug)]
pub struct ThreadsEngine {
    _config: EngineConfig,
}

impl ThreadsEngine {
    /// Makes the engine.
    ///
    /// # Errors
    /// The kernel's.
    pub fn new(_config: EngineConfig) -> io::Result<Self> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

impl Engine for ThreadsEngine {
    fn start(self: Box<Self>) -> io::Result<Handles> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn describe(&self) -> String {
        "threads".to_owned()
    }
}
