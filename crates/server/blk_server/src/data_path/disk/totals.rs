//! What a disk has done since it was added: its counters and latencies, which outlive queues, sessions and workers.
//!
//! `start_queue → QueueMeter (written by the queue's worker) … queue ended → added to `ended` → DiskTotals`
//!
//! A queue has ended when nothing but this list refers to its meter: the worker has then made its last store.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use crate::data_path::counters::{QueueCounters, QueueMeter};
use crate::data_path::latency::Latency;

/// The counters and latencies of a disk, over all its queues.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DiskTotals {
    /// The sums of all queues, including those that have ended. The gauges are those of the running queues.
    pub counters: QueueCounters,
    /// The latencies of all queues.
    pub latency: Latency,
}

impl DiskTotals {
    fn add(&mut self, meter: &QueueMeter) {
        self.counters = self.counters.plus(&meter.read());
        meter.latency.add_to(&mut self.latency);
    }
}

/// The totals of one disk.
#[derive(Debug, Default)]
pub(crate) struct Totals(Mutex<Parts>);

#[derive(Debug, Default)]
struct Parts {
    /// The queues that have ended, and the totals of the previous server.
    ended: DiskTotals,
    running: Vec<Arc<QueueMeter>>,
}

impl Totals {
    /// Creates the meter of a queue that starts.
    pub(crate) fn start_queue(&self) -> Arc<QueueMeter> {
        let mut parts = self.parts();
        let meter = Arc::<QueueMeter>::default();
        parts.running.push(Arc::clone(&meter));
        meter
    }

    pub(crate) fn read(&self) -> DiskTotals {
        let parts = self.parts();
        let mut totals = parts.ended.clone();
        parts.running.iter().for_each(|meter| totals.add(meter));
        totals
    }

    /// Adds the totals of the previous server. The previous server's gauges are left out, because they no longer apply.
    pub(crate) fn restore(&self, totals: &DiskTotals) {
        let ended = &mut self.parts().ended;
        ended.counters = ended.counters.plus(&totals.counters.without_gauges());
        ended.latency.add(&totals.latency);
    }

    /// Locks the parts, and adds the queues that have ended to `ended`.
    fn parts(&self) -> MutexGuard<'_, Parts> {
        let mut parts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Parts { ended, running } = &mut *parts;
        running.retain_mut(|meter| {
            let last = Arc::get_mut(meter);
            if let Some(meter) = &last {
                ended.add(meter);
                ended.counters = ended.counters.without_gauges();
            }
            last.is_none()
        });
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn did(reads: u64, in_flight: u64) -> QueueCounters {
        QueueCounters { reads, in_flight, ..QueueCounters::default() }
    }

    #[test]
    fn queue_that_has_ended_still_counts_and_its_gauges_do_not() {
        let totals = Totals::default();
        let [first, second] = [totals.start_queue(), totals.start_queue()];
        first.store(&did(5, 2));
        first.latency.read.note(100);
        second.store(&did(7, 3));
        second.latency.read.note(200);
        let both = totals.read();
        assert_eq!((both.counters, both.latency.read.count()), (did(12, 5), 2));
        drop(first);
        let after = totals.read();
        assert_eq!((after.counters, after.latency.read.count()), (did(12, 3), 2));
        drop(second);
        assert_eq!((totals.read().counters, totals.parts().running.len()), (did(12, 0), 0));
    }

    #[test]
    fn queues_that_come_and_go_leave_no_meters_behind() {
        let totals = Totals::default();
        (0..100).for_each(|_| totals.start_queue().store(&did(1, 0)));
        assert!(totals.0.lock().unwrap().running.len() <= 1);
        assert_eq!(totals.read().counters.reads, 100);
    }

    #[test]
    fn totals_of_the_previous_server_are_added_without_its_gauges() {
        let (totals, mut before) = (Totals::default(), DiskTotals::default());
        before.counters = did(40, 4);
        before.latency.flush.note(300);
        let meter = totals.start_queue();
        meter.store(&did(2, 1));
        totals.restore(&before);
        let now = totals.read();
        assert_eq!((now.counters, now.latency), (did(42, 1), before.latency));
    }
}
