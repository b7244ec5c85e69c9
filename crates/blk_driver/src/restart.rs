//! The owner's part when the back-end went away: go over to another ring, or give up.
//!
//! `mail → the old ring's last completions → the new ring → everything not acknowledged, in order → doorbell`
//!
//! - A durable write whose flush was not acknowledged starts again with the write: what the old back-end had in a
//!   cache of its own may be gone with it.
//! - A request that had ended by its deadline or was cancelled is not done again; its buffers are its owner's.
//! - The old ring is believed as far as it makes sense. Where it does not, the rest is done again.
//!
//! Not here: how the offer comes here (`link.rs`), who makes it (`device.rs`).

use crate::error::QueueError;
use crate::link::{Mail, Offer, RestartOutcome};
use crate::queue::Queue;
use crate::slots::{Phase, Stage};

impl Queue {
    /// Follows what the session has to say, if anything. One load if not.
    #[inline]
    pub(crate) fn read_mail(&mut self) {
        if self.link.has_mail() {
            self.follow_mail();
        }
    }

    #[cold]
    fn follow_mail(&mut self) {
        match self.link.take_mail() {
            None => {}
            Some(Mail::Gone) if self.dead.is_none() => {
                self.take_acknowledged();
                self.die(QueueError::Disconnected { queue: self.index });
            }
            Some(Mail::Restart(offer)) if self.dead.is_none() => {
                let outcome = self.restart(*offer);
                self.link.report(outcome);
            }
            Some(Mail::Gone | Mail::Restart(_)) => self.link.report(RestartOutcome::default()),
        }
    }

    fn restart(&mut self, offer: Offer) -> RestartOutcome {
        let completed = self.take_acknowledged();
        self.leave_ring();
        (self.ring, self.bell, self.area.side) = (offer.ring, offer.bell, offer.side);
        self.armed = false;
        for index in self.slots.indices() {
            let status = self.area.status(index);
            if let Some(last) = self.slots.get_mut(index).chain.last_mut() {
                *last = status;
            }
        }
        let resubmitted = self.send_waiting();
        if resubmitted > 0 {
            self.publish();
            // Not asked for: a back-end that has just begun may not have said what it wants.
            self.bell.ring();
        }
        RestartOutcome { completed, resubmitted }
    }

    /// Takes what the old ring shows as done; its owners are told later. Returns how many requests have ended.
    fn take_acknowledged(&mut self) -> u64 {
        let mut completed = 0;
        while let Ok(Some(used)) = self.ring.pop_used() {
            #[allow(clippy::cast_possible_truncation)] // as it was given to the ring
            let index = used.token as u16;
            if self.slots.get(index).stage != Stage::Live {
                self.slots.returned(index);
                continue;
            }
            let result = self.outcome(index, used.written_bytes);
            if result.is_ok() && self.slots.get(index).phase == Phase::WriteBeforeFlush {
                // Still in need of its flush, hence done again.
                self.slots.rewind(index);
                continue;
            }
            self.slots.get_mut(index).in_ring = false;
            self.slots.end(index, result);
            completed += 1;
        }
        completed
    }

    /// Nobody looks at the ring any more: what is live is to be sent again, the rest comes back.
    fn leave_ring(&mut self) {
        for index in self.slots.indices() {
            match self.slots.get(index).stage {
                Stage::Live => self.slots.rewind(index),
                Stage::Zombie | Stage::Ending(_) => self.slots.abandon(index),
                Stage::Free | Stage::Returning => {}
            }
        }
    }
}
