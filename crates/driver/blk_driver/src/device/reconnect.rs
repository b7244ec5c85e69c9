//! Reconnects to a back-end: the timing of the attempts, and the restart of the queues.
//!
//! `pause (10 ms … 500 ms) → open, as before → share memory → give the log, start each queue as it is
//!  or: new log, each queue: offer another ring, start it → report`
//!
//! - With a log, the rings stay and their owners notice nothing: the new back-end redoes its predecessor's unfinished
//!   requests. This is done only if the previous back-end closed the connection itself. A back-end that the driver
//!   left, because it hung, sent garbage or gave up a queue, may still run and write to the rings that it was given.
//! - If a back-end refuses the log, the driver drops the log, because every other back-end would refuse it too. A
//!   back-end that closes the connection after it got the log may have crashed, or may refuse the log that way; after
//!   [`LOG_TRIES`] such closes in a row, the driver treats the log as refused.
//! - Without a log, a queue's owner sends its requests again. The owner need not act at once: the back-end is started
//!   on an empty ring. The owner finds that ring in its next call and fills it with every request that was not
//!   acknowledged. An idle owner delays no other queue.
//! - The report waits [`REPORT_LIMIT`] for owners; it states how many owners had not called by then; these move to the
//!   new ring later.
//! - The ring of an offer is the one that the last back-end was not given, so a late write of that back-end has no
//!   effect.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::{debug, warn};

use super::connect::{Session, Terms};
use super::info::{Event, ReconnectReport};
use super::log::Log;
use super::state::Thread;
use crate::error::{ConnectError, MakeQueueError, MessageError, in_a_line};
use crate::kick::{Doorbell, EventFd};
use crate::queue::link::QueueLink;

const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
/// A connection that lasted this long was good: the first attempt to reconnect after it is immediate.
const GOOD_CONNECTION: Duration = Duration::from_secs(1);
/// How long the report waits for the queues' owners.
const REPORT_LIMIT: Duration = Duration::from_secs(1);

/// The driver drops the log after this many back-ends in a row have closed the connection after receiving the log.
const LOG_TRIES: u32 = 3;

/// The delay between attempts. It also grows for a back-end that accepts connections and drops them.
#[derive(Debug, Default)]
pub(super) struct Pace {
    pause: Duration,
    connected_at: Option<Instant>,
}

impl Pace {
    /// A connection was established.
    pub(super) fn connected(&mut self) {
        self.connected_at = Some(Instant::now());
    }

    /// The connection is lost. Returns how long to wait before the first attempt.
    fn disconnected(&mut self) -> Duration {
        if self.connected_at.take().is_some_and(|since| since.elapsed() >= GOOD_CONNECTION) {
            self.pause = Duration::ZERO;
        }
        self.pause
    }

    /// Returns how long to wait before another attempt.
    fn slower(&mut self) -> Duration {
        self.pause = (self.pause * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE);
        self.pause
    }
}

/// The state that the next back-end needs to continue with the same rings.
#[derive(Debug)]
pub(super) struct Kept {
    /// The log of all rings; every ring was started with it. `None`: new rings are needed.
    log: Option<Log>,
    /// Back-ends in a row that got the log and disconnected before they had all rings.
    tries: u32,
    /// Doorbells, by queue.
    bells: Vec<Arc<EventFd>>,
}

impl Kept {
    pub(super) fn new(log: Option<Log>, bells: Vec<Arc<EventFd>>) -> Self {
        Self { log, tries: 0, bells }
    }

    /// Keeps or drops the log after the driver has passed it and the rings to a back-end, with the result `went_on`.
    fn keep_after(&mut self, log: Log, went_on: &Result<(), MessageError>) {
        self.tries = if went_on.is_ok() { 0 } else { self.tries + 1 };
        self.log = match went_on {
            Ok(()) => Some(log),
            Err(MessageError::Closed { .. }) if self.tries < LOG_TRIES => Some(log),
            Err(error) => {
                let (tries, error) = (self.tries, in_a_line(error));
                warn!(
                    tries,
                    "the driver dropped the in-flight log and sends requests in flight again on new rings: \
                     {error}"
                );
                None
            }
        };
    }

    /// Makes the next back-end use new rings.
    pub(super) fn forget_log(&mut self) {
        self.log = None;
    }
}

/// A completed reconnect whose queues' owners have not all moved yet.
#[derive(Debug)]
pub(super) struct Restart {
    report: ReconnectReport,
    waiting: Vec<Arc<QueueLink>>,
    due: Instant,
}

impl Restart {
    /// When to check again at the latest.
    pub(super) fn due(&self) -> Instant {
        self.due
    }

    /// Adds up the owners' outcomes; reports when all owners have moved, or at the limit.
    pub(super) fn report_if_due(mut self, thread: &Thread) -> Option<Self> {
        let report = &mut self.report;
        self.waiting.retain(|link| match link.outcome() {
            Some(outcome) => {
                report.completed += outcome.completed;
                report.resubmitted += outcome.resubmitted;
                false
            }
            None => !has_ended(link),
        });
        if !self.waiting.is_empty() && Instant::now() < self.due {
            return Some(self);
        }
        self.report(thread);
        None
    }

    /// Reports the outcomes that are known so far. The thread also calls this if the back-end disconnects again.
    pub(super) fn report(mut self, thread: &Thread) {
        self.report.owners_waited_for = u16::try_from(self.waiting.len()).unwrap_or(u16::MAX);
        thread.shared.events.push(Event::Reconnected(self.report));
    }
}

impl Thread {
    /// Tries to connect for `limit`; `None` if no attempt succeeded, or the device was dropped.
    pub(super) fn reconnect(
        &self,
        limit: Duration,
        pace: &mut Pace,
        kept: &mut Kept,
    ) -> Option<(Session, Restart)> {
        let since = Instant::now();
        let not_after = since.checked_add(limit);
        let is_over = || not_after.is_some_and(|end| Instant::now() >= end);
        let (mut pause, mut attempts, mut reason) = (pace.disconnected(), 0, String::new());
        loop {
            let next = Instant::now() + pause;
            if self.pause_until(not_after.map_or(next, |end| end.min(next)), |command| {
                self.execute_without_back_end(command)
            }) {
                return None;
            }
            if attempts > 0 && is_over() {
                let reason = format!("{attempts} attempts to connect failed, the last with: {reason}");
                self.shared.events.push(Event::GaveUp { reason });
                return None;
            }
            attempts += 1;
            match self.attempt(not_after, kept) {
                Ok((session, kept_rings)) => {
                    let (away, nothing) = (since.elapsed(), ReconnectReport::default());
                    let restart = self.restart(ReconnectReport { attempts, away, kept_rings, ..nothing });
                    self.shared.note_peer(&session);
                    self.shared.set_info(&session.info);
                    return Some((session, restart));
                }
                // Keep an earlier reason, which explains more than "the time was up".
                Err(_) if is_over() && !reason.is_empty() => {}
                Err(error) => reason = in_a_line(&error),
            }
            debug!(attempts, "attempt to reconnect failed: {reason}");
            pause = pace.slower();
        }
    }

    /// Connects once. Also returns whether the queues keep their rings.
    fn attempt(&self, not_after: Option<Instant>, kept: &mut Kept) -> Result<(Session, bool), ConnectError> {
        let before = self.shared.info();
        let mut session =
            Session::open(&self.options, Terms::AsBefore(&before), not_after, &self.shared.stop)?;
        session.share(&self.map.memory())?;
        // A signal from the last back-end does not concern this one.
        self.err.clear();
        // Takes the log out of `kept`, and puts it back only on success: a failed attempt may leave some queues on
        // other rings.
        let log = kept.log.take().filter(|_| session.takes_log());
        let keeps_rings = log.is_some();
        if let Some(log) = log {
            let went_on = self.go_on(&mut session, &log, &kept.bells);
            kept.keep_after(log, &went_on);
            went_on?;
        } else {
            kept.tries = 0;
            kept.log = self.start_anew(&mut session, &mut kept.bells)?;
        }
        session.settle();
        Ok((session, keeps_rings))
    }

    /// Continues with the same rings.
    fn go_on(&self, session: &mut Session, log: &Log, bells: &[Arc<EventFd>]) -> Result<(), MessageError> {
        session.give_log(log)?;
        // A back-end that refuses the log by closing the connection must not learn of the rings.
        session.barrier()?;
        for ((queue, link), bell) in (0_u16..).zip(&self.links).zip(bells) {
            if has_ended(link) {
                continue;
            }
            session.start(queue, &link.place(), link.call(), bell, &self.err)?;
            // The last back-end may have died after it stored answers but before it signalled them, or after it
            // consumed a kick.
            bell.ring();
            link.call().ring();
        }
        Ok(())
    }

    /// Starts with new rings, and with a new log for them if the back-end offers one.
    fn start_anew(
        &self,
        session: &mut Session,
        bells: &mut [Arc<EventFd>],
    ) -> Result<Option<Log>, ConnectError> {
        let log = session.new_log(self.options.queues)?;
        for ((queue, link), kept) in (0_u16..).zip(&self.links).zip(bells) {
            if has_ended(link) {
                continue;
            }
            let bell = Arc::new(EventFd::new().map_err(ConnectError::Resources)?);
            let offered = link.offer_restart(Arc::clone(&bell) as Arc<dyn Doorbell>);
            let place = offered.map_err(MakeQueueError::Ring)?;
            kept.clone_from(&bell);
            session.start(queue, &place, link.call(), &bell, &self.err)?;
        }
        Ok(log)
    }

    fn restart(&self, report: ReconnectReport) -> Restart {
        // Owners that keep their rings need not do anything.
        let links = self.links.iter().filter(|link| !report.kept_rings && !has_ended(link));
        Restart { report, waiting: links.cloned().collect(), due: Instant::now() + REPORT_LIMIT }
    }
}

/// Whether the queue can no longer be used.
fn has_ended(link: &QueueLink) -> bool {
    link.is_dropped() || link.is_broken()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_become_rarer_up_to_half_a_second() {
        let mut pace = Pace::default();
        assert_eq!(pace.disconnected(), Duration::ZERO);
        let pauses: Vec<u128> = (0..8).map(|_| pace.slower().as_millis()).collect();
        assert_eq!(pauses, [10, 20, 40, 80, 160, 320, 500, 500]);
    }

    #[test]
    fn connection_that_does_not_hold_does_not_make_the_search_eager_again() {
        let mut pace = Pace::default();
        pace.slower();
        pace.connected();
        assert_eq!(pace.disconnected(), FIRST_PAUSE);
    }

    #[test]
    fn connection_that_held_makes_the_search_eager_again() {
        let connected_at = Instant::now().checked_sub(2 * GOOD_CONNECTION);
        let mut pace = Pace { pause: LONGEST_PAUSE, connected_at };
        assert_eq!(pace.disconnected(), Duration::ZERO);
    }
}
