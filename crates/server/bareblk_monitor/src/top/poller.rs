//! One thread per server: asks for statistics once per interval, and reconnects after the connection has failed.
//!
//! `Pace (interval, pause) → stats, limit → Reading → difference → News`
//!
//! - Each interval brings one piece of news per server: a sample, or why there is none.
//! - A server that never answers keeps only its own thread waiting.

use std::path::{Path, PathBuf};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use bareblk::client::{Connection, ErrorKind, Reply, plain};
use serde_json::{Value, json};

use super::answer::Reading;
use super::sample::Sample;

/// A server that does not answer for this long counts as unreachable.
const PATIENCE: Duration = Duration::from_secs(10);

/// A poller's report about its server.
#[derive(Debug)]
pub enum News {
    /// The sample of an interval, and the server's version.
    Sample(Box<Sample>, String),
    /// The server did not answer; the line gives the reason.
    Gone(String),
    /// The poller has ended, which should never happen.
    Ended,
}

/// The interval and the pause, which all pollers share.
#[derive(Clone, Debug)]
pub struct Pace {
    shared: Arc<(Mutex<Setting>, Condvar)>,
}

#[derive(Clone, Copy, Debug)]
struct Setting {
    interval: Duration,
    is_paused: bool,
}

impl Pace {
    pub fn new(interval: Duration) -> Self {
        let setting = Setting { interval, is_paused: false };
        Self { shared: Arc::new((Mutex::new(setting), Condvar::new())) }
    }

    /// Changes the pace from the next request on.
    pub fn set(&self, interval: Duration, is_paused: bool) {
        *self.lock() = Setting { interval, is_paused };
        self.shared.1.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Setting> {
        self.shared.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until one interval after `begin`, and until a pause ends.
    fn wait(&self, begin: Instant) {
        let mut setting = self.lock();
        loop {
            let left = setting.interval.saturating_sub(begin.elapsed());
            if left.is_zero() && !setting.is_paused {
                return;
            }
            let change = &self.shared.1;
            setting = if setting.is_paused {
                change.wait(setting).unwrap_or_else(PoisonError::into_inner)
            } else {
                change.wait_timeout(setting, left).unwrap_or_else(PoisonError::into_inner).0
            };
        }
    }
}

/// Starts the thread. `connection`: the existing connection, if any. `tell` wraps the news for the channel.
pub fn start<M: Send + 'static>(
    path: PathBuf,
    connection: Option<Connection>,
    pace: Pace,
    news: Sender<M>,
    tell: impl Fn(News) -> M + Send + 'static,
) {
    thread::spawn(move || {
        let teller = Teller { news, tell };
        poll(&path, connection, &pace, &teller);
    });
}

/// Reports [`News::Ended`] when dropped, even by a panic, so that the main thread notices that this thread has ended.
struct Teller<M, F: Fn(News) -> M> {
    news: Sender<M>,
    tell: F,
}

impl<M, F: Fn(News) -> M> Teller<M, F> {
    /// Returns false if the receiver is closed.
    fn tell(&self, news: News) -> bool {
        self.news.send((self.tell)(news)).is_ok()
    }
}

impl<M, F: Fn(News) -> M> Drop for Teller<M, F> {
    fn drop(&mut self) {
        self.tell(News::Ended);
    }
}

fn poll<M, F: Fn(News) -> M>(
    path: &Path,
    connection: Option<Connection>,
    pace: &Pace,
    teller: &Teller<M, F>,
) {
    let mut server = connection.map(Server::new);
    let mut before: Option<Reading> = None;
    loop {
        let begin = Instant::now();
        let told = match ask(path, &mut server) {
            Ok((now, version)) => {
                let sample = before.as_ref().map(|before| Sample::between(before, &now));
                before = Some(now);
                sample.is_none_or(|sample| teller.tell(News::Sample(Box::new(sample), version)))
            }
            Err(error) => {
                (server, before) = (None, None);
                teller.tell(News::Gone(plain(&format!("{error:#}"))))
            }
        };
        if !told {
            return;
        }
        pace.wait(begin);
    }
}

fn ask(path: &Path, server: &mut Option<Server>) -> Result<(Reading, String)> {
    let server = match server {
        Some(server) => server,
        None => server.insert(Server::new(Connection::open(path)?)),
    };
    Ok((server.read()?, plain(server.connection.version())))
}

/// A connected server, and those of the newer requests that it has not refused so far.
#[derive(Debug)]
struct Server {
    connection: Connection,
    has_histograms: bool,
    has_limits: bool,
}

impl Server {
    fn new(connection: Connection) -> Self {
        Self { connection, has_histograms: true, has_limits: true }
    }

    fn read(&mut self) -> Result<Reading> {
        self.connection.limit_wait(PATIENCE)?;
        let mut reading = Reading::new(self.stats()?)?;
        if self.has_limits && reading.has_limits() {
            let reply = self.connection.ask_json(&json!({"do": "limit"}))?;
            self.has_limits = !is_refused(&reply, ErrorKind::UnknownVerb);
            if self.has_limits {
                reading.add_limits(reply.into_ok()?)?;
            }
        }
        Ok(reading)
    }

    /// Server versions without histograms refuse the field that requests them.
    fn stats(&mut self) -> Result<Value> {
        if self.has_histograms {
            let reply = self.connection.ask_json(&json!({"do": "stats", "histograms": true}))?;
            if !is_refused(&reply, ErrorKind::BadRequest) {
                return reply.into_ok();
            }
            self.has_histograms = false;
        }
        self.connection.ask_json(&json!({"do": "stats"}))?.into_ok()
    }
}

fn is_refused(reply: &Reply, kind: ErrorKind) -> bool {
    reply.answer.error.as_ref().is_some_and(|fault| fault.kind == kind)
}
