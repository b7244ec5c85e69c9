//! Parks failed requests of a queue and retries them.
//!
//! `complete → park … (due, resumed, about to stop) → retry_parked → op → complete`
//!
//! - For the guest and the in-flight log, a parked request is still in flight. The engine has no ops of it, so a queue
//!   whose requests are all parked can change its memory and move to another worker.
//! - A queue that stops parks nothing more. If the next server reads the in-flight log, parked requests stay in the
//!   log. Otherwise the queue retries them once and reports the results.
//!
//! The list of parked requests: `parked.rs`.

use std::time::Instant;

use guest_mem::IoVecs;
use io_engine::{Engine, OpError};
use tracing::{error, info, warn};
use virtio_blk::{ReplySlot, Status};

use super::fault_log::log_refused;
use super::starter::{Outcome, Starter};
use super::submit_context::{MAX_OPS, SubmitContext};
use super::{Queue, State};
use crate::data_path::disk::log_limit::Allowed;
use crate::data_path::queue::in_flight::{Finished, RequestInfo, RequestKind, Retry};
use crate::data_path::queue::parked::{AllAnswered, ParkPolicy, ParkedRequest, is_no_space};
use crate::data_path::queue::queue_start::Ending;
use crate::host::clock::process_ns;

impl Queue {
    /// Whether to park the request instead of reporting the error.
    #[cold]
    pub(super) fn should_park(&self, finished: Finished, error: OpError) -> bool {
        let RequestInfo { kind, .. } = finished.info;
        let wanted = self.parked.policy().is_some_and(|policy| policy.wants(error));
        // No retry restores the data that a failed sync lost. Without the guest's memory there is no data to write.
        let hopeless = kind == RequestKind::Flush || kind != RequestKind::Read && self.has_failed();
        let may_wait = !self.ends || self.leaves_parked;
        wanted && !hopeless && may_wait && !self.view.is_poisoned()
    }

    #[cold]
    pub(super) fn park(
        &mut self,
        tag: u16,
        finished: Finished,
        error: OpError,
        rest: &mut IoVecs,
        now: Instant,
    ) {
        let is_first = finished.tries == 0;
        self.in_flight.park(tag, &finished);
        self.parked.push(ParkedRequest { tag, since: now, buffers: rest.take_rest() }, is_first, now);
        if is_first {
            self.log_parked(now, &finished, error);
        }
    }

    #[cold]
    fn log_parked(&self, now: Instant, finished: &Finished, failure: OpError) {
        let Some(Allowed { suppressed }) = self.disk.host_log_allowed(now) else { return };
        let RequestInfo { kind, sector, bytes, .. } = finished.info;
        let (disk, queue, offset) = (self.disk.name(), self.index, finished.info.offset_bytes());
        let cure = match failure {
            OpError::Errno(errno) if is_no_space(errno) => "free space for the image",
            _ => "repair the storage that holds the image",
        };
        let again = match self.parked.policy() {
            Some(ParkPolicy { retry_after: Some(pause), .. }) => {
                format!(
                    "the server retries it every {} s, or at once on `bareblk ctl resume {disk}`",
                    pause.as_secs()
                )
            }
            _ => format!("then run `bareblk ctl resume {disk}`"),
        };
        error!(
            disk,
            queue,
            suppressed,
            sector,
            offset,
            bytes,
            "{kind} is parked and the guest waits: {failure}; {cure}; {again}"
        );
    }

    /// Logs the end of parking after the last completion.
    #[cold]
    pub(super) fn parked_answered(&mut self, failed: bool) {
        if let Some(AllAnswered { requests, failed }) = self.parked.answered(failed) {
            let (disk, queue) = (self.disk.name(), self.index);
            info!(disk, queue, requests, failed, "all parked requests are answered");
        }
    }

    #[inline]
    pub(crate) fn retry_due(&self) -> Option<Instant> {
        self.parked.due()
    }

    /// Returns whether to retry parked requests now.
    pub(crate) fn look_at_parked(&mut self, now: Instant) -> bool {
        self.parked.look(now, self.has_failed());
        self.has_retries()
    }

    /// Whether the next pass retries parked requests. During a drain it does not, because a retry would prolong the
    /// drain.
    #[inline]
    pub(crate) fn has_retries(&self) -> bool {
        self.parked.has_retries() && self.state != State::Draining
    }

    /// Marks all parked requests for a retry, and returns their number.
    pub(crate) fn resume_parked(&mut self) -> usize {
        self.parked.retry_all()
    }

    /// Whether the engine or the pool has no room for another request of this queue.
    pub(crate) fn has_no_room(&self, engine: &dyn Engine) -> bool {
        self.waits_for_room || engine.room_of(self.file) < MAX_OPS
    }

    /// Restarts parked requests, within the engine's room and the disk's budget. Returns how many.
    #[cold]
    pub(super) fn retry_parked(&mut self, context: &mut SubmitContext<'_>) -> usize {
        let mut tried = 0;
        while self.has_retries() && tried < context.batch && !context.budget.is_spent() {
            if context.room < MAX_OPS {
                self.waits_for_room = true;
                break;
            }
            let Some(ParkedRequest { tag, since, buffers }) = self.parked.pop_retry() else { break };
            self.counted.parked_time += context.now.saturating_duration_since(since);
            context.now_ns = process_ns(context.now);
            context.budget.take(0);
            self.retry(tag, buffers, context);
            tried += 1;
        }
        tried
    }

    fn retry(&mut self, tag: u16, buffers: IoVecs, context: &mut SubmitContext<'_>) {
        let Some(retry) = self.in_flight.take_parked(tag) else { return };
        let Retry { reply, info, .. } = retry;
        self.counted.retries += 1;
        // If a read has lost its memory, its stored bytes are unknown.
        let stored_bytes = match (info.kind, buffers.remaining_bytes()) {
            (RequestKind::Read, rest_bytes @ 1..) => info.bytes.saturating_sub(rest_bytes),
            _ => 0,
        };
        let outcome = self.starter(tag, reply, context).restart(info, buffers).unwrap_or_else(|refusal| {
            log_refused(&self.disk, self.index, context.now, &refusal);
            Outcome::Finished { status: Status::IoErr, stored_bytes }
        });
        match outcome {
            Outcome::Submitted | Outcome::Later => self.in_flight.note_retry(tag, &retry, stored_bytes),
            Outcome::Finished { status, stored_bytes } => {
                self.parked_answered(status != Status::Ok);
                self.count_other(status);
                self.answer(tag, &reply, status, stored_bytes);
            }
        }
    }

    fn starter<'s, 'w, 'l>(
        &'s mut self,
        tag: u16,
        reply: ReplySlot,
        context: &'l mut SubmitContext<'w>,
    ) -> Starter<'s, 'w, 'l> {
        Starter {
            disk: &self.disk,
            image: &self.image,
            view: &self.view,
            in_flight: &mut self.in_flight,
            parked: &mut self.parked,
            context,
            file: self.file,
            durability: self.disk.durability(self.session.write_cache()),
            token: u64::from(self.id) << 16 | u64::from(tag),
            tag,
            reply,
        }
    }

    /// Prepares the queue for a stop. When the session ends, the front-end learns no ring position, and the next server
    /// reads the log, as after a crash. On a stop by the front-end, `leaves_unbegun` says whether the next server reads
    /// the log.
    pub(super) fn stop_parking(&mut self, ending: Ending) {
        let has_log = self.in_flight_log.is_some() && !self.lost_log();
        self.leaves_parked |= has_log && (self.leaves_unbegun || ending == Ending::Session);
        self.ends = true;
        if !self.leaves_parked {
            self.parked.retry_all();
        }
    }

    /// Whether a command that waits for the queue can be carried out: no request is in the engine, and a queue that
    /// ends has no parked requests or leaves them in the log. Other parked requests stay in the queue.
    #[inline]
    pub(crate) fn is_quiet(&self) -> bool {
        self.in_flight.in_engine() == 0 && (self.parked.is_empty() || !self.ends || self.leaves_parked)
    }

    /// Moves the buffers of parked requests to the queue's new memory. Requests whose buffers are not in it fail.
    pub(super) fn rebind_parked(&mut self) {
        let lost: usize = self
            .parked
            .iter_mut()
            .map(|parked| usize::from(parked.buffers.rebind(&self.view).is_err()))
            .sum();
        if lost > 0 {
            let (disk, queue) = (self.disk.name(), self.index);
            warn!(
                disk,
                queue, lost, "the front-end removed the memory of parked requests, so these requests fail"
            );
            self.parked.retry_all();
        }
    }

    /// Logs that the queue ends while its parked requests stay in the in-flight log.
    pub(super) fn log_left_parked(&self) {
        if !self.parked.is_empty() {
            let (disk, queue, requests) = (self.disk.name(), self.index, self.in_flight.parked());
            info!(disk, queue, requests, "parked requests stay in the in-flight log for the next server");
        }
    }
}
