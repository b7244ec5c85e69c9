//! Sends signs of life to the service manager while all workers and the main loop answer.
//!
//! `every third of the manager's time → workers and main loop are asked → all have answered → WATCHDOG=1`
//!
//! - It runs only if the manager sets `WATCHDOG_USEC`: otherwise an idle server has no wake-ups.
//! - A thread may take the manager's whole watchdog time to answer. It is not asked again before it has answered.
//! - The watchdog ends when a stop begins, for which the manager has a different time limit.

use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use blk_server::{LivenessCheck, Server, format_cpus};
use tracing::{info, warn};

use crate::service::service_manager::ServiceManager;
use crate::serving::Serving;
use crate::signals;

/// Rounds per watchdog time: question and answer take at most two.
const ROUNDS: u32 = 3;

/// Minimum length of a round, because each round wakes the workers.
const MIN_ROUND: Duration = Duration::from_millis(10);

/// Starts the watchdog if the manager asks for it. Returns the main loop's channel for answers.
pub fn start(manager: &Arc<ServiceManager>, serving: &Arc<Serving>) -> Result<Option<SyncSender<()>>> {
    let Some(time) = manager.watchdog() else { return Ok(None) };
    let (answer, main_loop) = sync_channel(1);
    let watchdog = Watchdog {
        manager: Arc::clone(manager),
        serving: Arc::downgrade(serving),
        round: (time / ROUNDS).max(MIN_ROUND),
        main_loop,
        main_loop_asked: false,
        workers: None,
        warned: false,
    };
    let thread = std::thread::Builder::new().name("bareblk-watch".into());
    thread.spawn(move || watchdog.watch()).context("cannot start the watchdog's thread")?;
    info!(time = ?time, "watchdog: the server notifies the service manager while workers and main loop answer");
    let least = MIN_ROUND * ROUNDS;
    if time < least {
        warn!(
            "watchdog: WATCHDOG_USEC={} is too short, because the server notifies at most once per {MIN_ROUND:?}: set \
             WatchdogSec= to at least {least:?}",
            time.as_micros()
        );
    }
    Ok(Some(answer))
}

struct Watchdog {
    manager: Arc<ServiceManager>,
    /// Weak, so that a stop does not wait for the watchdog.
    serving: Weak<Serving>,
    round: Duration,
    main_loop: Receiver<()>,
    main_loop_asked: bool,
    /// A check that some workers have not answered yet.
    workers: Option<LivenessCheck>,
    warned: bool,
}

impl Watchdog {
    fn watch(mut self) {
        let mut next = Instant::now();
        while let Some(silent) = self.ask() {
            if silent.is_empty() {
                self.manager.alive();
                self.warned = false;
            } else if !std::mem::replace(&mut self.warned, true) {
                warn!("watchdog: no answer from {silent}, so the service manager is not notified");
            }
            next = (next + self.round).max(Instant::now());
            std::thread::sleep(next.saturating_duration_since(Instant::now()));
        }
    }

    /// The threads that have not answered; `None` if the server is stopping.
    fn ask(&mut self) -> Option<String> {
        if self.workers.is_none() {
            self.workers = Some(self.serving.upgrade()?.with_server(Server::check_liveness).ok()?);
        }
        if !std::mem::replace(&mut self.main_loop_asked, true) {
            signals::ask_main_loop();
        }
        let begin = Instant::now();
        let silent =
            self.workers.as_mut().map(|workers| workers.silent_after(self.round)).unwrap_or_default();
        if silent.is_empty() {
            self.workers = None;
        }
        let left = self.round.saturating_sub(begin.elapsed());
        self.main_loop_asked = match self.main_loop.recv_timeout(left) {
            Ok(()) => false,
            Err(RecvTimeoutError::Timeout) => true,
            // The channel is closed: a stop has begun.
            Err(RecvTimeoutError::Disconnected) => return None,
        };
        // `with_server` fails once a stop has begun.
        self.serving.upgrade()?.with_server(|_| ()).ok()?;
        let numbers: Vec<u32> = silent.iter().map(|id| id.0).collect();
        let workers = (!numbers.is_empty()).then(|| format!("worker {}", format_cpus(&numbers)));
        let main_loop = self.main_loop_asked.then(|| "the main loop".to_owned());
        Some(workers.into_iter().chain(main_loop).collect::<Vec<_>>().join(" and "))
    }
}
