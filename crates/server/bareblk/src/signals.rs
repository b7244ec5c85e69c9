//! Receives signals: for a server that starts (`EndAtOnce`) or serves (`Requests`).
//!
//! - SIGTERM and SIGINT ask for a stop, SIGHUP for a reload.
//! - SIGUSR1 is caught only with a watchdog, which sends it to check the main loop.
//! - `timeout(1)` signals its child and then the child's process group. A terminal signals the whole group, whose
//!   supervisor may pass the signal on. So an immediate repetition is the same request, not an impatient one.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use signal_hook::SigId;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::{Handle, Signals};
use signal_hook::low_level::unregister;
use tracing::error;

/// Signals closer together than this are one request.
const SAME_REQUEST: Duration = Duration::from_millis(500);

/// A request from a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Read the images' sizes and the configuration again: SIGHUP.
    Refresh,
    /// Answer the watchdog.
    Answer,
    /// Stop, and lose no requests.
    Stop,
    /// Stop at once, with this exit code.
    Abort(i32),
}

/// While this value exists, SIGINT and SIGTERM end the process, even if its parent ignored them: a shell without job
/// control starts `command &` with SIGINT ignored.
#[derive(Debug)]
pub struct EndAtOnce(Vec<SigId>);

impl EndAtOnce {
    /// # Errors
    /// The kernel refuses a handler.
    pub fn catch() -> io::Result<Self> {
        let always = Arc::new(AtomicBool::new(true));
        let catch = |signal| signal_hook::flag::register_conditional_default(signal, Arc::clone(&always));
        [SIGINT, SIGTERM].into_iter().map(catch).collect::<io::Result<_>>().map(Self)
    }
}

impl Drop for EndAtOnce {
    fn drop(&mut self) {
        for id in self.0.drain(..) {
            unregister(id);
        }
    }
}

/// The process's signals since the creation of this value.
#[derive(Debug)]
pub struct Requests {
    signals: Signals,
    history: History,
}

impl Requests {
    /// Takes over the signals from [`EndAtOnce`].
    pub fn catch() -> io::Result<Self> {
        Ok(Self { signals: Signals::new([SIGTERM, SIGINT, SIGHUP])?, history: History::default() })
    }

    /// From now on [`ask_main_loop`] causes a [`Request::Answer`].
    pub fn expect_questions(&self) -> io::Result<()> {
        self.signals.handle().add_signal(SIGUSR1)
    }

    /// Ends the wait in [`Requests::next`] from another thread.
    pub fn closer(&self) -> Handle {
        self.signals.handle()
    }

    /// Sleeps until a request arrives. `None`: the wait was ended by [`Requests::closer`].
    pub fn next(&mut self) -> Option<Request> {
        let history = &mut self.history;
        self.signals.forever().find_map(|signal| history.interpret(signal, Instant::now()))
    }
}

/// Asks the main loop for an answer.
pub fn ask_main_loop() {
    if let Err(error) = signal_hook::low_level::raise(SIGUSR1) {
        error!("cannot ask the main loop whether it is alive: {error}");
    }
}

/// The time of the first request for a stop.
#[derive(Debug, Default)]
struct History {
    stop: Option<Instant>,
}

impl History {
    fn interpret(&mut self, signal: i32, now: Instant) -> Option<Request> {
        match self.stop {
            _ if signal == SIGUSR1 => Some(Request::Answer),
            None if signal == SIGHUP => Some(Request::Refresh),
            None => {
                self.stop = Some(now);
                Some(Request::Stop)
            }
            Some(_) if signal == SIGHUP => None,
            Some(first) if now.saturating_duration_since(first) < SAME_REQUEST => None,
            // Shells report a process that a signal ended with this code.
            Some(_) => Some(Request::Abort(128 + signal)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_stop_after_a_while_is_an_abort_with_the_shells_exit_code() {
        let (mut history, start) = (History::default(), Instant::now());
        assert_eq!(history.interpret(SIGTERM, start), Some(Request::Stop));
        assert_eq!(history.interpret(SIGINT, start + SAME_REQUEST), Some(Request::Abort(130)));
    }

    #[test]
    fn second_stop_at_once_is_the_same_request() {
        let (mut history, start) = (History::default(), Instant::now());
        assert_eq!(history.interpret(SIGTERM, start), Some(Request::Stop));
        assert_eq!(history.interpret(SIGTERM, start), None);
    }

    #[test]
    fn question_is_answered_before_and_during_a_stop_and_is_no_second_one() {
        let (mut history, start) = (History::default(), Instant::now());
        assert_eq!(history.interpret(SIGUSR1, start), Some(Request::Answer));
        assert_eq!(history.interpret(SIGTERM, start), Some(Request::Stop));
        assert_eq!(history.interpret(SIGUSR1, start + SAME_REQUEST), Some(Request::Answer));
    }

    #[test]
    fn hangup_refreshes_before_a_stop_and_is_nothing_after() {
        let (mut history, start) = (History::default(), Instant::now());
        assert_eq!(history.interpret(SIGHUP, start), Some(Request::Refresh));
        assert_eq!(history.interpret(SIGINT, start), Some(Request::Stop));
        assert_eq!(history.interpret(SIGHUP, start + SAME_REQUEST), None);
    }
}
