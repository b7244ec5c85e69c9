//! Breaks a queue whose ring, kick or memory is unusable, and logs failed, refused and stuck requests.

use std::time::{Duration, Instant, SystemTime};

use io_engine::OpError;
use rustix::io::Errno;
use tracing::{error, warn};
use virtqueue::RingFault;

use super::fault_log::report_ring_fault;
use super::{Queue, State};
use crate::data_path::disk::log_limit::Allowed;
use crate::data_path::disk::slow_requests::SlowRequest;
use crate::data_path::queue::in_flight::{Finished, RequestInfo};
use crate::host::clock::process_ns;

impl Queue {
    /// Breaks the queue because guest memory was lost.
    pub(crate) fn break_memory(&mut self) {
        self.state = State::Broken;
    }

    /// The memory that the front-end truncated, if any.
    pub(crate) fn memory_fault(&self) -> Option<String> {
        let what = if let Some(region) = self.memory().poisoned() {
            format!("memory region at guest address {:#x}", region.spec().guest_addr.0)
        } else if self.memory().log().is_some_and(|log| log.bits().is_poisoned()) {
            "dirty log".to_owned()
        } else if self.lost_log() {
            "in-flight log".to_owned()
        } else {
            return None;
        };
        Some(format!("the front-end truncated the file of its {what}"))
    }

    pub(crate) fn break_kick(&mut self, errno: Errno) {
        self.break_with(&format!("its kick descriptor can no longer be polled: {errno}"));
    }

    /// Breaks a queue that no worker can serve any more.
    pub(crate) fn break_moved(&mut self) {
        self.break_with("no worker can serve it");
    }

    #[cold]
    pub(super) fn break_ring(&mut self, fault: &RingFault) {
        self.break_with(&fault.to_string());
    }

    #[cold]
    fn break_with(&mut self, what: &str) {
        if self.state == State::Broken {
            return;
        }
        self.state = State::Broken;
        report_ring_fault(&self.disk, self.index, self.err.as_ref(), what);
    }

    #[cold]
    pub(super) fn log_failed(&mut self, now: Instant, finished: Finished, error: OpError) {
        if let Some(Allowed { suppressed }) = self.disk.host_log_allowed(now) {
            let RequestInfo { kind, sector, bytes, .. } = finished.info;
            let (disk, queue, offset) = (self.disk.name(), self.index, finished.info.offset_bytes());
            error!(disk, queue, suppressed, sector, offset, bytes, "{kind} failed: {error}");
        }
    }

    /// Remembers a slow request, and logs it unless too many were logged recently.
    #[cold]
    pub(super) fn note_slow(&mut self, now: Instant, finished: Finished, took_ns: u64, failed: bool) {
        self.counted.slow += 1;
        let Finished { info: RequestInfo { kind, sector, bytes, .. }, tries, .. } = finished;
        let (queue, kind, took, tries) = (self.index, kind.name(), Duration::from_nanos(took_ns), tries + 1);
        let at = SystemTime::now();
        self.disk.slow().add(SlowRequest { at, queue, kind, sector, bytes, took, tries, failed });
        if let Some(Allowed { suppressed }) = self.disk.slow_log_allowed(now) {
            let (disk, us) = (self.disk.name(), took.as_micros());
            warn!(disk, queue, suppressed, sector, bytes, us, tries, "{kind} was slow");
        }
    }

    /// Logs each stuck request once.
    pub(crate) fn report_stuck(&mut self, now: Instant) {
        let now_ns = process_ns(now);
        while self.in_flight.has_stuck(now_ns) && self.disk.host_log_allowed(now).is_some() {
            let Some((RequestInfo { kind, sector, bytes, .. }, age)) = self.in_flight.report_stuck(now_ns)
            else {
                return;
            };
            let (disk, queue, seconds) = (self.disk.name(), self.index, age.as_secs());
            warn!(disk, queue, sector, bytes, seconds, "{kind} is stuck in the host");
        }
    }
}
