//! Whether the workers are alive: each is asked, and each that does not hang answers at once, busy or not.
//!
//! Not here: who wants to know (a watchdog, in the program), what a worker that hangs is waiting for.

use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use super::WorkerSet;
use crate::data_path::worker::command::Command;
use crate::data_path::worker::worker_options::WorkerId;

/// Workers that have been asked and have not answered yet. It keeps no worker from ending.
#[derive(Debug, Default)]
pub struct LivenessCheck {
    silent: Vec<(WorkerId, Receiver<()>)>,
}

impl LivenessCheck {
    /// Waits for the answers; names those who still owe theirs when the time is over. To be asked again for these.
    pub fn silent_after(&mut self, timeout: Duration) -> Vec<WorkerId> {
        let begin = Instant::now();
        self.silent.retain(|(_, answer)| {
            let left = timeout.saturating_sub(begin.elapsed());
            // One that has ended in order owes nothing.
            matches!(answer.recv_timeout(left), Err(RecvTimeoutError::Timeout))
        });
        self.silent.iter().map(|(id, _)| *id).collect()
    }
}

impl WorkerSet {
    /// Asks all workers. It wakes those that sleep.
    pub(crate) fn check_liveness(&self) -> LivenessCheck {
        let addresses: Vec<_> = self.table().workers.iter().map(|worker| worker.address.clone()).collect();
        let asked = addresses.into_iter().filter_map(|address| {
            let (ping, answer) = sync_channel(1);
            address.send(Command::Ping(ping)).ok().map(|()| (address.id, answer))
        });
        LivenessCheck { silent: asked.collect() }
    }
}
