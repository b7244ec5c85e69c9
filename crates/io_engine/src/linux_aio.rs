//! Linux AIO: `io_submit`, completions read from the ring in user memory.
//!
//! Not here: op logic (`core.rs`).

use std::io;

use crate::contract::{Engine, EngineConfig, Handles};

/// The engine, not yet started.
#[derive(Debug)]
pub struct LinuxAioEngine {
    _config: EngineConfig,
}

impl LinuxAioEngine {
    /// Makes the engine.
    ///
    /// # Errors
    /// The kernel's.
    pub fn new(_config: EngineConfig) -> io::Result<Self> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

impl Engine for LinuxAioEngine {
    fn start(self: Box<Self>) -> io::Result<Handles> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn describe(&self) -> String {
        "linux-aio".to_owned()
    }
}
