//! What a queue's owner does after the back-end has disconnected: it moves to another ring, or gives up.
//!
//! `mail → the old ring's last completions → the new ring → everything not acknowledged, in order → doorbell`
//!
//! - A durable write whose flush was not acknowledged starts again with the write: data in the old back-end's
//!   own cache may be lost with it.
//! - A request that was cancelled, or whose deadline passed, is not sent again; its buffers go back to its
//!   owner.
//! - The owner trusts consistent results of the old ring, and resends the other requests.

use super::Queue;
use super::link::{Mail, Offer, RestartOutcome};
use super::slots::{Phase, Stage};
use crate::error::QueueError;

impl Queue {
    /// Handles the session's mail. Costs one load if there is none.
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
            // Rings even if the device has not requested it: a back-end that has just started may not have stored its
            // event setting yet.
            self.bell.ring();
        }
        RestartOutcome { completed, resubmitted }
    }

    /// Takes the requests that the old ring shows as completed, to report them later. Returns how many it took.
    fn take_acknowledged(&mut self) -> u64 {
        let mut completed = 0;
        while let Ok(Some(used)) = self.ring.pop_used() {
            #[allow(clippy::cast_possible_truncation)] // the ring returns the `u16` that it was given
            let index = used.token as u16;
            if self.slots.get(index).stage != Stage::Live {
                self.slots.returned(index);
                continue;
            }
            let result = self.outcome(index, used.written_bytes);
            if result.is_ok() && self.slots.get(index).phase == Phase::WriteBeforeFlush {
                // The write's flush has not completed, so the write is sent again.
                self.slots.rewind(index);
                continue;
            }
            self.slots.get_mut(index).in_ring = false;
            self.slots.end(index, result);
            completed += 1;
        }
        completed
    }

    /// Abandons the old ring: live requests will be resent, the others are returned.
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
