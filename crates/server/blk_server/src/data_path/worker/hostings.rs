//! Placed disks whose completion worker this worker is to become, because a queue started or moved: what nobody waits for.
//!
//! `Command::Host → begin … completion worker | time is over: whoever has the engine keeps it, one line`
//!
//! - The worker that has the engine takes nothing new until all that is in it is complete. Where something of it never
//!   ends, the disk would stand still for good.
//!
//! Not here: changes that a caller waits for (`assignment/mod.rs`), the change itself (`io_engine`).

use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::error;

use crate::data_path::disk::engine_source::EngineSource;
use crate::data_path::worker::worker_options::WorkerId;

/// New requests of the disk wait as long, at most.
const LIMIT: Duration = Duration::from_secs(5);

#[derive(Debug)]
struct Pending {
    disk: String,
    source: Arc<EngineSource>,
    until: Instant,
}

/// See the file's head.
#[derive(Debug)]
pub(crate) struct Hostings {
    worker: WorkerId,
    pending: Vec<Pending>,
    due: Option<Instant>,
}

impl Hostings {
    pub(crate) fn new(worker: WorkerId) -> Self {
        Self { worker, pending: Vec::new(), due: None }
    }

    /// One that has begun before begins anew: whether it succeeded meanwhile, nobody looked.
    pub(crate) fn begin(&mut self, disk: String, source: &Arc<EngineSource>, now: Instant) {
        self.forget(source);
        self.pending.push(Pending { disk, source: Arc::clone(source), until: now + LIMIT });
        self.due.get_or_insert(now + LIMIT);
    }

    /// Somebody asked for it who waits, and has a limit of their own.
    pub(crate) fn forget(&mut self, source: &Arc<EngineSource>) {
        self.pending.retain(|pending| !Arc::ptr_eq(&pending.source, source));
        self.due = self.pending.first().map(|pending| pending.until);
    }

    /// When [`Hostings::look`] is to be called.
    #[inline]
    pub(crate) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// The order in which they began is the order in which they are due.
    #[cold]
    pub(crate) fn look(&mut self, now: Instant) {
        let worker = self.worker;
        for Pending { disk, source, .. } in self.pending.extract_if(.., |pending| now >= pending.until) {
            let asked_for = source.placement().completion_worker() == Some(worker);
            // Without any no queue runs, or none has an engine yet: nothing waits.
            let other = source.completion_worker().filter(|&other| asked_for && other != worker);
            let Some(other) = other else { continue };
            source.set_completion_worker(None);
            error!(
                disk,
                "worker {worker} is not made completion worker: requests in worker {other}'s engine have not ended \
                 after {} s; worker {other} goes on, then say `bareblk ctl placement {disk} --completion-worker \
                 {worker}`",
                LIMIT.as_secs()
            );
        }
        self.due = self.pending.first().map(|pending| pending.until);
    }
}
