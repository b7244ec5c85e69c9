//! Asks all servers at the same time, and waits at most one second for their answers.
//!
//! `paths and patterns → one thread per monitor socket → stats, limit → Scraped`
//!
//! A thread may outlive that second. Until it has ended, its server is not asked again, so a server that hangs costs
//! one thread.

use std::collections::{BTreeSet, HashSet};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use bareblk::client::{Connection, plain};
use serde_json::json;

use super::answer::{Group, Limits, Stats};
use crate::labels::labels;

/// Time limit for a server's answers. A server that takes longer counts as down.
const PATIENCE: Duration = Duration::from_secs(1);

/// The figures of one server.
#[derive(Debug)]
pub struct Scraped {
    /// The value of the label `server`.
    pub label: String,
    pub took: Duration,
    /// The figures, or the reason why there are none.
    pub figures: Result<Figures, String>,
}

#[derive(Debug, Default)]
pub struct Figures {
    pub version: String,
    pub stats: Stats,
    pub groups: Vec<Group>,
}

/// The result of a thread: how long the server took, and its figures, or why there are none.
type Answer = (Duration, Result<Figures, String>);

/// The servers to ask.
#[derive(Debug)]
pub struct Servers {
    sources: Vec<Source>,
    /// The servers whose threads have not ended.
    busy: Arc<Mutex<HashSet<PathBuf>>>,
}

#[derive(Debug)]
enum Source {
    Path(PathBuf),
    /// All sockets that match.
    Pattern(String),
}

impl Servers {
    /// # Errors
    /// A pattern is invalid.
    pub fn new(words: &[String]) -> Result<Self, String> {
        let source = |word: &String| {
            if !word.contains(['*', '?', '[']) {
                return Ok(Source::Path(word.into()));
            }
            glob::Pattern::new(word).map_err(|error| format!("--monitor {}: {error}", plain(word)))?;
            Ok(Source::Pattern(word.clone()))
        };
        let sources = words.iter().map(source).collect::<Result<_, String>>()?;
        Ok(Self { sources, busy: Arc::default() })
    }

    /// The paths of all servers, each once and in a fixed order.
    fn paths(&self) -> Vec<PathBuf> {
        let mut paths = BTreeSet::new();
        for source in &self.sources {
            match source {
                Source::Path(path) => _ = paths.insert(path.clone()),
                Source::Pattern(pattern) => paths.extend(glob::glob(pattern).into_iter().flatten().flatten()),
            }
        }
        paths.into_iter().collect()
    }

    pub fn scrape(&self) -> Vec<Scraped> {
        let paths = self.paths();
        let begin = Instant::now();
        let answers: Vec<_> = paths.iter().map(|path| self.start(path)).collect();
        let paths: Vec<&Path> = paths.iter().map(PathBuf::as_path).collect();
        let scraped = labels(&paths).into_iter().zip(answers).map(|(label, answer)| {
            let left = PATIENCE.saturating_sub(begin.elapsed());
            let answered = answer.and_then(|answer| {
                answer.recv_timeout(left).map_err(|_| "it did not answer within a second".to_owned())
            });
            let (took, figures) =
                answered.unwrap_or_else(|why| (begin.elapsed(), Err(format!("{label}: {why}"))));
            Scraped { label, took, figures }
        });
        scraped.collect()
    }

    /// Starts a thread that asks the server.
    fn start(&self, path: &Path) -> Result<Receiver<Answer>, String> {
        let busy = Busy::begin(&self.busy, path).ok_or("it has not answered an earlier request yet")?;
        let (sender, answer) = mpsc::channel();
        let path = path.to_owned();
        let asking = move || {
            let begin = Instant::now();
            let figures = ask(&path).map_err(|error| plain(&format!("{error:#}")));
            drop(busy);
            // Fails if the scrape has ended without this answer.
            let _ = sender.send((begin.elapsed(), figures));
        };
        let started = thread::Builder::new().spawn(asking);
        started.map(|_| answer).map_err(|error| format!("cannot start a thread: {error}"))
    }
}

/// Marks a server as being asked by a thread, until dropped.
struct Busy {
    all: Arc<Mutex<HashSet<PathBuf>>>,
    path: PathBuf,
}

impl Busy {
    /// `None`: another thread is still asking this server.
    fn begin(all: &Arc<Mutex<HashSet<PathBuf>>>, path: &Path) -> Option<Self> {
        let is_new = all.lock().unwrap_or_else(PoisonError::into_inner).insert(path.to_owned());
        is_new.then(|| Self { all: Arc::clone(all), path: path.to_owned() })
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.all.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.path);
    }
}

fn ask(path: &Path) -> Result<Figures> {
    let mut server = Connection::open(path)?;
    server.limit_wait(PATIENCE)?;
    let stats: Stats = server.ask_for(&json!({"do": "stats", "queues": false, "histograms": true}))?;
    let groups = if stats.disks.iter().any(|disk| disk.throttling.group.is_some()) {
        server.ask_for::<Limits>(&json!({"do": "limit"}))?.groups
    } else {
        Vec::new()
    };
    Ok(Figures { version: plain(server.version()), stats, groups })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pattern_stands_for_the_sockets_that_exist_now_and_a_path_for_itself() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let words =
            [path("*.monitor"), path("b.monitor"), path("gone")].map(|path| path.display().to_string());
        let servers = Servers::new(&words).unwrap();
        assert_eq!(servers.paths(), [path("b.monitor"), path("gone")]);
        std::fs::write(path("a.monitor"), "").unwrap();
        std::fs::write(path("b.monitor"), "").unwrap();
        assert_eq!(servers.paths(), [path("a.monitor"), path("b.monitor"), path("gone")]);
    }

    #[test]
    fn wrong_pattern_is_refused_and_named() {
        let error = Servers::new(&["/run/[.monitor".into()]).unwrap_err();
        assert!(error.starts_with("--monitor /run/[.monitor: "), "{error}");
    }

    #[test]
    fn server_that_is_still_asked_is_not_asked_again() {
        let all = Arc::default();
        let first = Busy::begin(&all, Path::new("/a"));
        assert!(Busy::begin(&all, Path::new("/a")).is_none() && Busy::begin(&all, Path::new("/b")).is_some());
        drop(first);
        assert!(Busy::begin(&all, Path::new("/a")).is_some());
    }
}
