//! The flushes of a disk, one at a time.

use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

/// Whether a flush runs.
#[derive(Debug, Default)]
pub(crate) struct FlushTurns {
    is_taken: Mutex<bool>,
    freed: Condvar,
}

impl FlushTurns {
    /// Waits until no other flush runs.
    ///
    /// # Errors
    /// [`io::ErrorKind::TimedOut`] at the deadline.
    pub(crate) fn take(turns: &Arc<Self>, deadline: Instant) -> io::Result<FlushTurn> {
        let left = deadline.saturating_duration_since(Instant::now());
        let is_taken = turns.is_taken.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = turns.freed.wait_timeout_while(is_taken, left, |is_taken| *is_taken);
        let (mut is_taken, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if std::mem::replace(&mut *is_taken, true) {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "an earlier flush is still running"));
        }
        Ok(FlushTurn(Arc::clone(turns)))
    }
}

/// The right to flush the disk, until it is dropped.
#[derive(Debug)]
pub(crate) struct FlushTurn(Arc<FlushTurns>);

impl Drop for FlushTurn {
    fn drop(&mut self) {
        *self.0.is_taken.lock().unwrap_or_else(PoisonError::into_inner) = false;
        self.0.freed.notify_one();
    }
}
