//! A queue's parked requests: when a failure is parked, trying again, and what becomes of them when the queue stops or moves.
//!
//! `complete → hold … (due, resumed, about to stop) → retry_parked → op → complete`
//!
//! - They are in flight for the guest and for the log, and not for the engine: a queue whose engine has nothing left is
//!   quiet, may change its memory and move to another worker, with all that it holds.
//! - A queue that is about to stop holds nothing more: where the in-flight log reaches whoever serves the ring next,
//!   they stay in it; elsewhere they are tried once more, and answered as that ends.
//!
//! Not here: the list of them (`parked.rs`), who asks (`worker/commands.rs`).

use std::time::Instant;

use guest_mem::IoVecs;
use io_engine::{Engine, OpError};
use tracing::{error, info, warn};
use virtio_blk::{ReplySlot, Status};

use super::faults::log_refused;
use super::starter::Starter;
use super::{BATCH, MAX_OPS, Outcome, Queue, State, SubmitContext};
use crate::data_path::disk::log_limit::Allowed;
use crate::data_path::queue::in_flight::{Finished, RequestInfo, RequestKind, Retry};
use crate::data_path::queue::parked::{AllAnswered, ParkPolicy, ParkedRequest, is_no_space};
use crate::data_path::queue::queue_start::Ending;

impl Queue {
    /// Whether the request stays in flight although it failed.
    #[cold]
    pub(super) fn should_park(&self, finished: &Finished, error: OpError) -> bool {
        let RequestInfo { kind, .. } = finished.info;
        let wanted = self.parked.policy().is_some_and(|policy| policy.wants(error));
        // What a failed sync lost, no second try brings back; and without the memory there is nothing to write.
        let hopeless = kind == RequestKind::Flush || kind != RequestKind::Read && self.disk.has_failed();
        let may_wait = !self.ends || self.leaves_parked;
        wanted && !hopeless && may_wait && !self.view.is_poisoned()
    }

    #[cold]
    pub(super) fn park(
        &mut self,
        tag: u16,
        finished: &Finished,
        error: OpError,
        rest: &mut IoVecs,
        now: Instant,
    ) {
        let is_first = finished.tries == 0;
        self.in_flight.park(tag, finished, now);
        self.parked.push(ParkedRequest { tag, buffers: rest.take_rest() }, is_first, now);
        if is_first {
            self.log_parked(now, finished, error);
        }
    }

    #[cold]
    fn log_parked(&self, now: Instant, finished: &Finished, failure: OpError) {
        let Some(Allowed { suppressed }) = self.disk.host_log_allowed(now) else { return };
        let RequestInfo { kind, sector, bytes, .. } = finished.info;
        let (disk, queue, offset) = (self.disk.name(), self.index, finished.info.offset_bytes());
        let cure = match failure {
            OpError::Errno(errno) if is_no_space(errno) => "make room for the image",
            _ => "repair what holds the image",
        };
        let again = match self.parked.policy() {
            Some(ParkPolicy { retry_after: Some(pause), .. }) => {
                format!(
                    "it is tried again every {} s, or at once by `bareblk ctl resume {disk}`",
                    pause.as_secs()
                )
            }
            _ => format!("then say `bareblk ctl resume {disk}`"),
        };
        error!(
            disk,
            queue,
            suppressed,
            sector,
            offset,
            bytes,
            "{kind} is parked, the guest waits: {failure}; {cure}; {again}"
        );
    }

    /// A request that was parked before is answered.
    #[cold]
    pub(super) fn parked_answered(&mut self, failed: bool) {
        if let Some(AllAnswered { requests, failed }) = self.parked.answered(failed) {
            let (disk, queue) = (self.disk.name(), self.index);
            info!(disk, queue, requests, failed, "all parked requests are answered");
        }
    }

    /// When [`Queue::look_at_parked`] is to be called.
    #[inline]
    pub(crate) fn retry_due(&self) -> Option<Instant> {
        self.parked.due()
    }

    /// Whether some are to be tried again now.
    pub(crate) fn look_at_parked(&mut self, now: Instant) -> bool {
        self.parked.look(now, self.disk.has_failed());
        self.has_retries()
    }

    /// Whether requests are to be tried again in the next pass. Not during a drain, which ends sooner without them: they
    /// wait for the end of it.
    #[inline]
    pub(crate) fn has_retries(&self) -> bool {
        self.parked.has_retries() && self.state != State::Draining
    }

    /// Somebody asks for it. Returns how many there are.
    pub(crate) fn resume_parked(&mut self) -> usize {
        self.parked.retry_all()
    }

    /// Whether a request of this queue would find no room now: none was left at its last look, or the disk's other queues
    /// have taken it since.
    pub(crate) fn has_no_room(&self, engine: &dyn Engine) -> bool {
        self.waits_for_room || engine.room_of(self.file) < MAX_OPS
    }

    /// Those that are to be tried again go to the engine, as far as it has room, and no more than the disk's turn has. Returns how
    /// many were looked at.
    #[cold]
    pub(super) fn retry_parked(&mut self, context: &mut SubmitContext<'_>) -> usize {
        let mut tried = 0;
        while self.has_retries() && tried < BATCH && !context.budget.is_spent() {
            if context.engine.room_of(self.file) < MAX_OPS {
                self.waits_for_room = true;
                break;
            }
            let Some(ParkedRequest { tag, buffers }) = self.parked.pop_retry() else { break };
            context.budget.take(0);
            self.retry(tag, buffers, context);
            tried += 1;
        }
        tried
    }

    fn retry(&mut self, tag: u16, buffers: IoVecs, context: &mut SubmitContext<'_>) {
        let Some(Retry { reply, info, tries }) = self.in_flight.take_parked(tag) else { return };
        self.counted.retries += 1;
        // Of a read that has lost its memory nobody can tell any more.
        let stored_bytes = match (info.kind, buffers.remaining_bytes()) {
            (RequestKind::Read, rest_bytes @ 1..) => info.bytes.saturating_sub(rest_bytes),
            _ => 0,
        };
        let outcome = self.starter(tag, reply, context).restart(info, buffers).unwrap_or_else(|refusal| {
            log_refused(&self.disk, self.index, context.now, &refusal);
            Outcome::Finished { status: Status::IoErr, stored_bytes }
        });
        match outcome {
            Outcome::Submitted | Outcome::Later => self.in_flight.note_retry(tag, tries, stored_bytes),
            Outcome::Finished { status, stored_bytes } => {
                self.parked_answered(status != Status::Ok);
                self.count_other(status);
                let written_bytes = reply.write(&self.view, status, stored_bytes);
                self.ring.push_used(tag, written_bytes);
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

    /// The queue is about to stop. With its session it does so as in a crash: nobody is told where the ring stands, and
    /// whoever serves it next goes by the log. Otherwise the front-end says whether it knows what is in the log.
    pub(super) fn stop_parking(&mut self, ending: Ending) {
        let has_log = self.log.is_some() && !self.lost_log();
        self.leaves_parked |= has_log && (self.leaves_unbegun || ending == Ending::Session);
        self.ends = true;
        if !self.leaves_parked {
            self.parked.retry_all();
        }
    }

    /// Whether whoever waits for the queue has nothing more to wait for.
    #[inline]
    pub(crate) fn is_quiet(&self) -> bool {
        self.in_flight.in_engine() == 0 && (self.parked.is_empty() || !self.ends || self.leaves_parked)
    }

    /// The buffers of parked requests lie in the memory that the queue uses from now on. Those that are not in it are given up.
    pub(super) fn rebind_parked(&mut self) {
        let lost: usize = self
            .parked
            .iter_mut()
            .map(|parked| usize::from(parked.buffers.rebind(&self.view).is_err()))
            .sum();
        if lost > 0 {
            let (disk, queue) = (self.disk.name(), self.index);
            warn!(disk, queue, lost, "parked requests have lost their memory to the front-end and fail");
            self.parked.retry_all();
        }
    }

    /// The queue goes: what it holds is in the log, for whoever serves the ring next.
    pub(super) fn log_left_parked(&self) {
        if !self.parked.is_empty() {
            let (disk, queue, requests) = (self.disk.name(), self.index, self.in_flight.parked());
            info!(disk, queue, requests, "parked requests stay in the in-flight log for the next server");
        }
    }
}
