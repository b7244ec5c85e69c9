//! A disk on another machine that is not served yet. `waiting.rs` opens such disks.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Error;
use tracing::warn;

use crate::config::difference::NamedDisk;

/// A disk that is not served yet, because its server does not answer.
#[derive(Debug)]
pub struct WaitingDisk {
    pub disk: NamedDisk,
    since: Instant,
    /// The error of the latest attempt; `None` during the first one.
    error: Mutex<Option<String>>,
    unwanted: AtomicBool,
}

impl WaitingDisk {
    pub fn new(disk: NamedDisk) -> Self {
        let (since, error, unwanted) = (Instant::now(), Mutex::default(), AtomicBool::new(false));
        Self { disk, since, error, unwanted }
    }

    /// The error of the latest attempt.
    pub fn error(&self) -> String {
        let error = self.error.lock().unwrap_or_else(PoisonError::into_inner).clone();
        error.unwrap_or_else(|| "its server has not answered yet".to_owned())
    }

    /// How long the disk has been waiting.
    pub fn waited(&self) -> Duration {
        self.since.elapsed()
    }

    /// Ends the wait. An attempt that is running ends without effect.
    pub fn give_up(&self) {
        // Relaxed: it orders no other data. The change that gives the disk up holds the lock of changes.
        self.unwanted.store(true, Ordering::Relaxed);
    }

    /// Whether nobody has given the disk up.
    pub fn is_wanted(&self) -> bool {
        !self.unwanted.load(Ordering::Relaxed)
    }

    /// Records the error. Logs it if it differs from the error before.
    pub fn note(&self, error: &Error) {
        let text = format!("{error:#}");
        let mut known = self.error.lock().unwrap_or_else(PoisonError::into_inner);
        if known.as_deref() != Some(&text) {
            warn!(disk = self.disk.name, "this disk is not served yet, and the server tries again: {text}");
            *known = Some(text);
        }
    }
}
