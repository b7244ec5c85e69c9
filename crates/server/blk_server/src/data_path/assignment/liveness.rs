//! Checks whether the workers are alive: a busy worker still answers at once, a hung one does not.

use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use super::WorkerSet;
use crate::data_path::worker::command::Command;
use crate::data_path::worker::worker_options::WorkerId;

/// The workers that have not answered yet. Some of them may have ended since.
#[derive(Debug, Default)]
pub struct LivenessCheck {
    silent: Vec<(WorkerId, Receiver<()>)>,
}

impl LivenessCheck {
    /// Waits for answers. Returns the workers that did not answer in time; the next call waits for them again.
    pub fn silent_after(&mut self, timeout: Duration) -> Vec<WorkerId> {
        let begin = Instant::now();
        self.silent.retain(|(_, answer)| {
            let left = timeout.saturating_sub(begin.elapsed());
            // A worker that has ended normally does not count as silent.
            matches!(answer.recv_timeout(left), Err(RecvTimeoutError::Timeout))
        });
        self.silent.iter().map(|(id, _)| *id).collect()
    }
}

impl WorkerSet {
    /// Pings all workers, which wakes those that sleep.
    pub(crate) fn check_liveness(&self) -> LivenessCheck {
        let addresses: Vec<_> = self.table().workers.iter().map(|worker| worker.address.clone()).collect();
        let asked = addresses.into_iter().filter_map(|address| {
            let (ping, answer) = sync_channel(1);
            address.send(Command::Ping(ping)).ok().map(|()| (address.id, answer))
        });
        LivenessCheck { silent: asked.collect() }
    }
}
