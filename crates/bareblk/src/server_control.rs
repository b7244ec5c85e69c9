//! What a control client can do with a server of one image.
//!
//! Not here: how it asks (`control`), what is done (`blk_server`).

use std::sync::Arc;
use std::time::Duration;

use anyhow::anyhow;
use blk_server::{Server, ServerReport, WorkerId, WorkerOptions};
use serde_json::{Map, Value};
use signal_hook::consts::SIGTERM;
use tracing::error;

use crate::control::reports::ReloadAnswer;
use crate::control::{Control, Refused};

/// A running server.
#[derive(Debug)]
pub struct ServerControl {
    server: Arc<Server>,
}

impl ServerControl {
    pub fn new(server: Arc<Server>) -> Self {
        Self { server }
    }
}

impl Control for ServerControl {
    fn report(&self) -> ServerReport {
        self.server.report()
    }

    fn add_worker(&self, options: WorkerOptions) -> Result<WorkerId, Refused> {
        Ok(self.server.add_worker(options)?)
    }

    fn remove_worker(&self, id: WorkerId, timeout: Duration) -> Result<(), Refused> {
        Ok(self.server.remove_worker(id, timeout)?)
    }

    fn attach(&self, disk: &str, queue: u16, worker: WorkerId, timeout: Duration) -> Result<(), Refused> {
        Ok(self.server.attach(disk, queue, worker, timeout)?)
    }

    fn add_disk(&self, table: Map<String, Value>) -> Result<String, Refused> {
        drop(table);
        Err(Refused::Failed(anyhow!("this server takes no further disk: start it with --config")))
    }

    fn remove_disk(&self, name: &str, force: bool, timeout: Duration) -> Result<(), Refused> {
        Ok(self.server.remove_disk(name, force, timeout)?)
    }

    fn resize_disk(&self, name: &str, size_bytes: u64, force: bool) -> Result<(), Refused> {
        Ok(self.server.resize_disk(name, size_bytes, force)?)
    }

    fn reload(&self) -> Result<ReloadAnswer, Refused> {
        self.server.refresh_capacities();
        Ok(ReloadAnswer::default())
    }

    /// The way a stop from outside takes, so that there is one only.
    fn shutdown(&self) {
        if let Err(error) = signal_hook::low_level::raise(SIGTERM) {
            error!("cannot stop as a control client asked: {error}");
        }
    }
}
