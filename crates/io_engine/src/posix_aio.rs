//! The C library's asynchronous I/O.
//!
//! Not here: op logic (`core.rs`).

use std::io;

use crate::contract::{Engine, EngineConfig, Handles};

/// The engine, not yet started.
#[derive(Debug)]
pub struct PosixAioEngine {
    _config: EngineConfig,
}

impl PosixAioEngine {
    /// Makes the engine.
    ///
    /// # Errors
    /// The kernel's.
    pub fn new(_config: EngineConfig) -> io::Result<Self> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

impl Engine for PosixAioEngine {
    fn start(self: Box<Self>) -> io::Result<Handles> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn describe(&self) -> String {
        "posix-aio".to_owned()
    }
}
