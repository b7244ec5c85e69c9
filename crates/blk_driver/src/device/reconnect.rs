//! Getting a back-end back: how often it is tried, and what is then done with the queues.
//!
//! `pause (10 ms … 500 ms) → open, as before → share memory → give the log, start each queue as it is
//!  or: new log, each queue: offer another ring, start it → report`
//!
//! - With a log, the rings stay and their owners notice nothing: the back-end does again what its predecessor had begun.
//!   Only after one that went by itself. One that we left (it hung, it sent garbage, it gave a queue up) may live, and
//!   write to the rings that it knows; and a log that its successor does not take is one that none will take. One that
//!   closes the connection over it may have died, or refuse it so: after [`LOG_TRIES`] in a row it is taken for that.
//! - Otherwise a queue's owner sends again. It need not be there: the back-end is started on an empty ring, which the owner
//!   finds in its next call and fills with all that was not acknowledged. An idle owner keeps nobody waiting.
//! - The report waits [`REPORT_LIMIT`] for owners; those who come later are counted in it, and go on all the same.
//! - The ring of an offer is the one that the last back-end did not know: what it still writes goes nowhere.
//!
//! Not here: what the owner does with the offer (`queue.rs`), whether it may be tried (`thread.rs`).

use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::{debug, warn};

use super::connect::{Session, Terms};
use super::error::in_a_line;
use super::log::Log;
use super::thread::Thread;
use super::{ConnectError, Event, MessageError, ReconnectReport};
use crate::error::MakeQueueError;
use crate::kick::{Doorbell, EventFd};
use crate::link::QueueLink;

const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
/// A connection that held so long was a good one: the next search starts eagerly again.
const GOOD_CONNECTION: Duration = Duration::from_secs(1);
/// How long the report waits for the queues' owners.
const REPORT_LIMIT: Duration = Duration::from_secs(1);

/// Back-ends in a row that close the connection once they have the log, before it is given up.
const LOG_TRIES: u32 = 3;

/// How fast it is tried: slower and slower, also against a back-end that takes connections and drops them.
#[derive(Debug, Default)]
pub(super) struct Pace {
    pause: Duration,
    connected_at: Option<Instant>,
}

impl Pace {
    /// There is a connection.
    pub(super) fn connected(&mut self) {
        self.connected_at = Some(Instant::now());
    }

    /// There is none any more. How long to wait before the first attempt.
    fn disconnected(&mut self) -> Duration {
        if self.connected_at.take().is_some_and(|since| since.elapsed() >= GOOD_CONNECTION) {
            self.pause = Duration::ZERO;
        }
        self.pause
    }

    /// How long to wait before another attempt.
    fn slower(&mut self) -> Duration {
        self.pause = (self.pause * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE);
        self.pause
    }
}

/// What the next back-end needs to go on with the rings as they are.
#[derive(Debug)]
pub(super) struct Kept {
    /// Of all rings, which all were started with it. `None`: others have to be made.
    log: Option<Log>,
    /// Back-ends in a row that had it and were gone before they had the rings.
    tries: u32,
    /// By queue.
    bells: Vec<Arc<EventFd>>,
}

impl Kept {
    pub(super) fn new(log: Option<Log>, bells: Vec<Arc<EventFd>>) -> Self {
        Self { log, tries: 0, bells }
    }

    /// A back-end was given the log and told of the rings, and this is what came of it.
    fn keep_after(&mut self, log: Log, went_on: &Result<(), MessageError>) {
        self.tries = if went_on.is_ok() { 0 } else { self.tries + 1 };
        self.log = match went_on {
            Ok(()) => Some(log),
            Err(MessageError::Closed { .. }) if self.tries < LOG_TRIES => Some(log),
            Err(error) => {
                let (tries, error) = (self.tries, in_a_line(error));
                warn!(
                    tries,
                    "in-flight log given up, what is in flight is sent again on other rings: {error}"
                );
                None
            }
        };
    }

    /// The rings are not to be gone on with.
    pub(super) fn forget_log(&mut self) {
        self.log = None;
    }
}

/// A reconnect whose queues' owners have not all gone over yet.
#[derive(Debug)]
pub(super) struct Restart {
    report: ReconnectReport,
    waiting: Vec<Arc<QueueLink>>,
    due: Instant,
}

impl Restart {
    /// When to look again at the latest.
    pub(super) fn due(&self) -> Instant {
        self.due
    }

    /// Adds up what owners did meanwhile; reports once all have, or at the limit.
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

    /// Tells what is known, also when the back-end goes again.
    pub(super) fn report(mut self, thread: &Thread) {
        self.report.owners_waited_for = u16::try_from(self.waiting.len()).unwrap_or(u16::MAX);
        thread.shared.events.push(Event::Reconnected(self.report));
    }
}

impl Thread {
    /// Tries for `limit`; `None` if that was in vain, or the device is dropped.
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
            if self
                .pause_until(not_after.map_or(next, |end| end.min(next)), |command| self.obey_alone(command))
            {
                return None;
            }
            if attempts > 0 && is_over() {
                let reason = format!("after {attempts} attempts: {reason}");
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
                // That the time was up is no reason if there is another one.
                Err(_) if is_over() && !reason.is_empty() => {}
                Err(error) => reason = in_a_line(&error),
            }
            debug!(attempts, "no reconnect yet: {reason}");
            pause = pace.slower();
        }
    }

    /// Also returns whether the rings are those that the queues had.
    fn attempt(&self, not_after: Option<Instant>, kept: &mut Kept) -> Result<(Session, bool), ConnectError> {
        let before = self.shared.info();
        let mut session =
            Session::open(&self.options, Terms::AsBefore(&before), not_after, &self.shared.stop)?;
        session.share(&self.map.memory())?;
        // What the last back-end signalled does not concern this one.
        self.err.clear();
        // Only as long as all goes well: an attempt may end with some queues on other rings.
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

    /// The rings as they are.
    fn go_on(&self, session: &mut Session, log: &Log, bells: &[Arc<EventFd>]) -> Result<(), MessageError> {
        session.give_log(log)?;
        // One that refuses it by going shall not be told of the rings.
        session.barrier()?;
        for ((queue, link), bell) in (0_u16..).zip(&self.links).zip(bells) {
            if has_ended(link) {
                continue;
            }
            session.start(queue, &link.place(), link.call(), bell, &self.err)?;
            // The last back-end may have died between its answers and their signal, or after it took a kick.
            bell.ring();
            link.call().ring();
        }
        Ok(())
    }

    /// Other rings, and a log of theirs if there is one.
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
        // Owners whose rings stay have nothing to do.
        let links = self.links.iter().filter(|link| !report.kept_rings && !has_ended(link));
        Restart { report, waiting: links.cloned().collect(), due: Instant::now() + REPORT_LIMIT }
    }
}

/// Whether nothing will ever be done with the queue again.
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
